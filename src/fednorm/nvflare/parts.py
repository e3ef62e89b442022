"""A message of fednorm's as NVFlare carries it: tensors as the data of a DXO, all else as its meta.

`DXO(WEIGHTS, data={entry: tensor}, meta={"fednorm": header})`, where header and tensors are what `wire.to_parts` gives.
A script of the Client API sees the same as an `FLModel`: `params` are the tensors, `meta["fednorm"]` the header. A
request comes with the welcome of its site, so that a process which lives for one task knows the terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs
from torch import Tensor

from fednorm.errors import WireError
from fednorm.halves import wire
from fednorm.halves.messages import Message, Request, Welcome

HEADER = "fednorm"
"""meta key of a message's header"""
WELCOME = "fednorm_welcome"
"""meta key of the header of the welcome that goes with a request"""
HELLO = "fednorm_hello"
"""task that asks a site to introduce itself; its data are empty"""
WORK = AppConstants.TASK_TRAIN
"""task of every request, whatever its phase: `flare.is_train()` is true for it"""


class Place(NamedTuple):
    """Whose process this is, of which job, and where its files are."""

    name: str
    job: str
    root: Path
    """the workspace of the server or the site, which outlives jobs"""
    run_dir: Path
    """the job's own folder in it"""


def carry_tensors() -> None:
    """Let NVFlare carry tensors as they are: as safetensors, with their types."""
    fobs.register(TensorDecomposer)


def to_dxo(message: Message, welcome: Welcome | None = None) -> DXO:
    """A message; a request with the welcome of the site it goes to."""
    header, tree = wire.to_parts(message)
    meta = {HEADER: header} if welcome is None else {HEADER: header, WELCOME: wire.to_parts(welcome)[0]}
    return DXO(DataKind.WEIGHTS, data=tree, meta=meta)


def from_meta(meta: Mapping[str, Any], tree: Mapping[str, Tensor]) -> Message:
    """The message again, from the meta and the data of a DXO, or from the meta and the params of an `FLModel`."""
    header = meta.get(HEADER)
    if not isinstance(header, Mapping):
        raise WireError(f"it has no '{HEADER}' in its meta; send what fednorm gave, with its meta")
    return wire.from_parts(cast(Mapping[str, Any], header), tree)


def from_dxo(dxo: DXO) -> Message:
    """The message that a DXO holds, as it was sent, or a `WireError`."""
    return from_meta(dxo.meta or {}, dxo.data)


def welcome_in(meta: Mapping[str, Any]) -> Welcome:
    """The welcome that came with a request."""
    header = meta.get(WELCOME)
    message = wire.from_parts(cast(Mapping[str, Any], header), {}) if isinstance(header, Mapping) else None
    if not isinstance(message, Welcome):
        raise WireError(f"it has no '{WELCOME}' in its meta; the server is not fednorm's")
    return message


def to_shareable(message: Message, welcome: Welcome | None = None) -> Shareable:
    """A message as the data of a task, or as its result."""
    shareable = to_dxo(message, welcome).to_shareable()
    if isinstance(message, Request):  # what a script reads as `current_round`, from 0 as NVFlare counts
        shareable.set_header(AppConstants.CURRENT_ROUND, message.round - 1)
    return shareable


def place_of(fl_ctx: FLContext) -> Place:
    """Where a component is: every context that NVFlare gives has all of it."""
    workspace: Any = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT) or cast(Any, fl_ctx.get_engine()).get_workspace()
    job = str(fl_ctx.get_job_id())
    return Place(str(fl_ctx.get_identity_name()), job, Path(workspace.get_root_dir()), Path(workspace.get_run_dir(job)))


def question() -> Shareable:
    """The data of a task that asks for a hello."""
    return DXO(DataKind.WEIGHTS, data={}, meta={}).to_shareable()


def dxo_of(shareable: Shareable) -> DXO:
    """What a task or its result holds; a `WireError` where NVFlare or a site failed before."""
    code = shareable.get_return_code()
    if code != ReturnCode.OK:
        raise WireError(f"it ended with {code}; the log of that site says why")
    try:
        return from_shareable(shareable)
    except ValueError as error:
        raise WireError(f"it is no message of fednorm's ({error})") from None


def message_in(shareable: Shareable) -> Message:
    """The message that a task or its result holds."""
    return from_dxo(dxo_of(shareable))
