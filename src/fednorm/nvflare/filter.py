"""A site's guard at the door: whatever a training script hands over, only what the method shares leaves, or comes in.

It stands in the chains of a client's task data and task results, in a job or in the site's own `local/privacy.json`.
What it lets out is stamped anew, so filters of the site that stand before it and change values, for privacy, are no
corruption to the server. What comes in must be as the server sealed it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from nvflare.apis.dxo import DXO, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.filter import FilterContextKey, FilterSource
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.apis.utils.fl_context_utils import add_job_audit_event
from torch import Tensor

from fednorm.core.expression import parse_term
from fednorm.core.optimizers import make_optimizer
from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.state import Policy, Tree
from fednorm.errors import ConfigError, FednormError, WireError
from fednorm.halves.messages import Hello, Message, Refusal, Request, Scores, Update, Welcome
from fednorm.halves.prepared import Prepared, prepare
from fednorm.halves.schema import DOWN, Schema, keys_with
from fednorm.halves.wire import from_parts
from fednorm.halves.wire_format import DTYPES, as_object, reseal, short
from fednorm.methods import parse
from fednorm.models.registry import build
from fednorm.nvflare.parts import HEADER, from_dxo, question, to_dxo, welcome_in
from fednorm.nvflare.permission import Permission
from fednorm.nvflare.setup import Setup, dotted, is_code

_PHASE = "fednorm.phase"
"""Where the filter of task data leaves for that of the result which phase a task is of."""
_WAYS: dict[str, tuple[type[Message], ...]] = {
    FilterKey.IN: (Request, Welcome, Refusal),
    FilterKey.OUT: (Update, Scores, Hello, Refusal),
}


class SharingFilter(DXOFilter):
    """Lets through what a method shares of a model in the phase at hand, and drops or refuses all else.

    `model` is an expression such as `resnet20(shortcut=B)` or `package.module:factory`, and `model_args` are its sizes
    (num_classes, in_channels, image_size); in place of both, `entries` lists the keys that may cross in any phase.
    `unshared` says what becomes of other entries: `drop` them and say so in the log, or `refuse` the message.
    `scores=False` keeps results of tests at the site as well. `optimizer` and `momentum` are those of the run, for
    methods that share what the optimizer remembers.
    """

    def __init__(
        self,
        method: str = "fedavg",
        model: str | None = None,
        model_args: dict[str, Any] | None = None,
        entries: list[str] | None = None,
        unshared: str = "drop",
        scores: bool = True,
        optimizer: str = "sgd",
        momentum: float = 0.9,
    ) -> None:
        super().__init__(supported_data_kinds=None, data_kinds_to_filter=None)
        if unshared not in ("drop", "refuse"):
            raise ConfigError(f"unshared={unshared!r} is not known to the sharing filter; give drop or refuse")
        if (model is None) == (entries is None):
            raise ConfigError("the sharing filter needs a model, or the entries that may cross; give one of the two")
        # NVFlare writes a component into a job by its arguments, each read from the attribute of its name.
        self.method, self.model, self.model_args, self.entries = method, model, model_args, entries
        self.unshared, self.scores = unshared, scores
        self.optimizer, self.momentum = optimizer, momentum
        self._prepared: Prepared | None = None

    @classmethod
    def of(cls, setup: Setup) -> SharingFilter:
        """The filter of a job with this setup."""
        config = setup.config
        sizes = {"num_classes": setup.outputs, "in_channels": setup.in_channels, "image_size": setup.image_size}
        train = config.train
        return cls(config.method, config.model, sizes, optimizer=train.optimizer, momentum=train.momentum)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """A message with what may cross; one that may not cross at all ends in an error, which NVFlare reports."""
        code = shareable.get_return_code()
        if code != ReturnCode.OK:  # it says that something failed, and is let through without anything else
            return make_reply(code)
        leaving = fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.OUT
        try:
            dxo = from_shareable(shareable)
            kept = self.process_dxo(dxo, shareable, fl_ctx)
        except (FednormError, ValueError) as error:
            self.log_error(
                fl_ctx, f"the sharing filter let nothing {'out' if leaving else 'in'}: {error}", fire_event=False
            )
            raise
        kept.add_filter_history([*(dxo.get_filter_history() or []), type(self).__name__])
        add_job_audit_event(fl_ctx=fl_ctx, msg=f"applied filter: {type(self).__name__}, {len(kept.data)} entries pass")
        headers = shareable[ReservedHeaderKey.HEADERS]
        found = Shareable()
        for name, value in headers.items():
            if not leaving or isinstance(value, str | int | float):
                found.set_header(name, value)
        return kept.update_shareable(found)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """A message of fednorm's without what may not cross: entries, and whatever else lies beside it."""
        way = str(fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION))
        if way == FilterKey.IN and HEADER not in dxo.meta and not dxo.data:  # the server asks who is there
            return from_shareable(question())
        message = stamped(dxo) if way == FilterKey.OUT else from_dxo(dxo)
        if not isinstance(message, _WAYS[way]):
            raise WireError(f"a {type(message).__name__.lower()} does not go this way")
        if isinstance(message, Request):
            # The result's filter is another object, but is asked in the same context.
            fl_ctx.set_prop(_PHASE, str(message.phase), private=True, sticky=False)
            down = self._allowed([message.phase], fl_ctx, *DOWN)
            kept = replace(message, tree=self._passing(message, message.tree, down, fl_ctx))
            return to_dxo(kept, welcome_in(dxo.meta))
        if isinstance(message, Update):
            phases = self._phases(fl_ctx)
            trees = {
                name: self._passing(message, getattr(message, name), self._allowed(phases, fl_ctx, policy), fl_ctx)
                for name, policy in (("shared", Policy.SHARED), ("reported", Policy.REPORTED))
            }
            return to_dxo(replace(message, **trees))
        if isinstance(message, Scores) and not self.scores:
            raise WireError("results of tests stay here (scores=False)", client=message.client)
        return to_dxo(message)

    def _phases(self, fl_ctx: FLContext) -> list[PhaseId]:
        """The phase that a result is of; every one where no filter of task data has seen it."""
        noted = fl_ctx.get_prop(_PHASE)
        return [PhaseId.parse(noted)] if noted else list(parse(self.method).all_phases)

    def _allowed(self, phases: Collection[PhaseId], fl_ctx: FLContext, *policies: Policy) -> set[str]:
        """Keys of the entries that have one of these policies in each of the phases."""
        if self.entries is not None:
            return set(self.entries)
        return set.intersection(*(set(keys_with(self._schema(phase, fl_ctx), *policies)) for phase in phases))

    def _passing(self, message: Request | Update, tree: Tree, allowed: set[str], fl_ctx: FLContext) -> Tree:
        stray = sorted(tree.keys() - allowed)
        where = {"client": message.client, "exchange": message.address.number if message.address else None}
        if stray and self.unshared == "refuse":
            raise WireError(f"is not shared by '{self.method}' in this phase", entry=stray[0], **where)
        if stray:
            what = f"{len(stray)} entries that '{self.method}' does not share"
            self.log_warning(
                fl_ctx, f"the sharing filter dropped {what}: {', '.join(map(short, stray[:3]))}", fire_event=False
            )
        return {key: value for key, value in tree.items() if key in allowed}

    def _model(self, fl_ctx: FLContext) -> Prepared:
        if self._prepared is None:
            term = parse_term(str(self.model), "model", "resnet20(shortcut=B)")
            # What the site's own policy names, the site lets run.
            if is_code(term.name) and self.get_prop(FilterContextKey.SOURCE) != FilterSource.SITE:
                Permission(fl_ctx)(dotted(term.name))
            model = build(term.name, **(self.model_args or {}), **term.options)
            self._prepared = prepare(model, parse(self.method), allow_noop=True)
        return self._prepared

    def _schema(self, phase: PhaseId, fl_ctx: FLContext) -> Schema:
        prepared = self._model(fl_ctx)
        method = prepared.method
        scored = phase.purpose is Purpose.SCORE and phase.stage < len(method.stages)
        if not scored and phase not in method.all_phases:
            raise WireError(f"'{self.method}' has no phase {phase}")
        return prepared.schema(method.phase_at(phase), make_optimizer(self.optimizer, self.momentum))


def stamped(dxo: DXO) -> Message:
    """A message whose values others may have changed since it was sealed, with the types that its header names."""
    header = as_object(dxo.get_meta_prop(HEADER))
    if header is None:
        raise WireError("it is no message of fednorm's; let the script send with `job.send()`")
    entries = as_object(header.get("entries")) or {}
    return from_parts(*reseal(header, {flat: _tensor(flat, value, entries) for flat, value in dxo.data.items()}))


def _tensor(flat: str, value: Any, entries: Mapping[str, Any]) -> Tensor:
    """A value as the tensor it was before a filter made an array, or numbers of another type, of it."""
    said = as_object(entries.get(flat))
    if said is None:
        raise WireError("was not there when the message was sealed", entry=flat)
    found = value if isinstance(value, Tensor) else torch.as_tensor(value)
    dtype = DTYPES[said["dtype"]]
    if found.is_floating_point() and not dtype.is_floating_point:
        found = found.round()
    return found.to(dtype)
