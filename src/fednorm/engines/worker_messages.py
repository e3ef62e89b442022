"""What our worker processes are sent: settings and code by value, data and states in shared memory."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
from torch import Tensor, nn

from fednorm.core.method import Method
from fednorm.core.phases import PhaseId
from fednorm.core.state import Tree, is_batch_norm
from fednorm.data.live import LiveRows
from fednorm.errors import FednormError, first_line
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.schema import Schema
from fednorm.halves.site import Sites
from fednorm.models.zoo import working_directory_importable

_ALIGNMENT = 64  # what torch's own allocator gives: some matrix kernels round differently on other addresses


class CannotSend(FednormError):
    """Something of the plan cannot go to another process; the text says what and why."""


@dataclass(frozen=True)
class WorkerMessage:
    """What a process needs to train clients; the tensors are in shared memory."""

    packed: bytes
    x: Tensor
    y: Tensor
    phases: tuple[PhaseId, ...]
    """those that could be sent"""


class _ByValue(ForkingPickler):
    """Packs tensors by value, where multiprocessing would open a file for each parameter of a model.

    What is packed goes to processes we started and comes from no file, so that nothing foreign is ever unpacked.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (Tensor, nn.Parameter) or value.device.type != "cpu" or value.layout != torch.strided:
            return NotImplemented
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (raw, value.dtype, tuple(value.shape), type(value) is nn.Parameter, value.requires_grad)


def _tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], is_parameter: bool, learns: bool) -> Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=dtype).clone() if raw else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    return nn.Parameter(tensor, requires_grad=learns) if is_parameter else tensor.requires_grad_(learns)


def pack(value: Any, what: str) -> bytes:
    """Something as bytes for one of our own processes; `what` it is is for an error."""
    file = io.BytesIO()
    try:
        _ByValue(file).dump(value)
    except Exception as error:  # pickle raises several types, and a user's class any
        raise CannotSend(f"{what} cannot be sent to another process ({first_line(error)})") from error
    return file.getvalue()


def load(packed: bytes | memoryview) -> Any:
    """What this program packed, in one of its own processes."""
    return cast("Any", ForkingPickler).loads(packed)


def survives(error: Exception) -> bool:
    """Whether an error means the same after the way to another process."""
    try:
        again = load(ForkingPickler.dumps(error))
    except Exception:
        return False
    return type(again) is type(error) and str(again) == str(error)


def to_message(sites: Sites) -> WorkerMessage:
    """Sites as a message to a process. The data set's memory becomes shared where it lies; nothing is copied.

    Phases go one by one, each ready-made and without what the server does with updates: a user's method may hold
    functions of a script that another process does not have, and phases it does not concern are still sent.
    """
    phases: dict[PhaseId, bytes] = {}
    refusals: list[CannotSend] = []
    for phase in sites.phases:
        try:
            phases[phase.id] = pack(_of_client(phase), f"the phase '{phase.phase.name}'")
        except CannotSend as refusal:
            refusals.append(refusal)
    if not phases:
        raise refusals[0]
    pool, nothing = sites.batches.pool, torch.empty(0)
    # A worker reads for itself: there are as many as cores, and their processes may not have processes of their own.
    live = pool.live and pool.live.with_loaders(0)
    prepared = replace(sites.prepared, method=Method(), initial={}, notes=())
    parts = {
        "sites": Sites(
            prepared=prepared,
            work=sites.work,
            optimizer=sites.optimizer,
            device=sites.device,
            batches=replace(sites.batches, pool=replace(pool, x=nothing, y=nothing, live=None)),
            task=sites.task,
            probes=sites.probes,
            habits=sites.habits,
        ),
        "phases": phases,
        "live": _packed_data(live),
        "batch_norms": _batch_norms(prepared.model),
        "default_dtype": torch.get_default_dtype(),
    }
    packed = pack(parts, "the model" if _refused(prepared) else "the plan")
    return WorkerMessage(packed, shared(pool.x), shared(pool.y), tuple(phases))


def _packed_data(live: LiveRows | None) -> bytes:
    try:
        return pack(live, "the data set")
    except CannotSend as refusal:
        advice = "transforms must be functions or classes that a module defines, no lambdas"
        raise CannotSend(f"{refusal}: {advice}") from refusal


def shared(tensor: Tensor) -> Tensor:
    """The tensor, its memory now shared with processes it is passed to."""
    try:
        return tensor.share_memory_()
    except RuntimeError as error:  # containers often have little of it
        size = f"{tensor.nbytes / 1e6:.0f} MB"
        raise CannotSend(f"{size} do not fit into the system's shared memory ({first_line(error)})") from error


def _refused(value: Any) -> bool:
    try:
        pack(value, "")
    except CannotSend:
        return True
    return False


def _of_client(phase: PreparedPhase) -> PreparedPhase:
    """The client's part of a phase; factors on the learning rate are found already, whoever found them."""
    passes = tuple(replace(each, rule=replace(each.rule, lr_factors=())) for each in phase.passes)
    stripped = replace(phase.phase, weigh={}, merge={}, rule=passes[0].rule, then=())
    return replace(phase, phase=stripped, passes=passes, initial={})


def _batch_norms(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if is_batch_norm(module)]


def from_message(message: WorkerMessage) -> tuple[Sites, dict[PhaseId, PreparedPhase]]:
    """The sites and their phases, in the process that got the message."""
    with working_directory_importable():  # the user's model may be defined there
        parts = load(message.packed)
    torch.set_default_dtype(parts["default_dtype"])
    sites = parts["sites"]
    strange = set(parts["batch_norms"]) ^ set(_batch_norms(sites.prepared.model))
    if strange:  # it would be trained as another kind of layer, in silence
        raise CannotSend(
            f"'{min(strange)}' was registered as a norm in the running program alone; "
            "register it in the module that defines it"
        )
    pool = replace(sites.batches.pool, x=message.x, y=message.y, live=load(parts["live"]))
    sites = replace(sites, batches=replace(sites.batches, pool=pool))
    return sites, {id: load(packed) for id, packed in parts["phases"].items()}


def slot_bytes(schema: Schema) -> int:
    """Bytes of a slot that holds a client's whole state."""
    return sum(_padded(entry.bytes) for entry, _ in schema.values())


def slot_views(slot: Tensor, schema: Schema) -> Tree:
    """A client's state as tensors that lie in a slot, a flat piece of shared memory."""
    views: Tree = {}
    start = 0
    for key, (entry, _) in schema.items():
        views[key] = slot[start : start + entry.bytes].view(entry.dtype).view(entry.shape)
        start += _padded(entry.bytes)
    return views


def _padded(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
