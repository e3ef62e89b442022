"""A plan on its way to another process of ours: settings and code by value, data and states in shared memory."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from fednorm.core.method import Method, Phase
from fednorm.core.state import Tree, is_batch_norm
from fednorm.errors import FednormError, first_line
from fednorm.halves.merging import Schema
from fednorm.halves.prepared import lr_factors
from fednorm.running.plan import Plan

_ALIGNMENT = 64  # what torch's own allocator gives: some matrix kernels round differently on other addresses


class CannotSend(FednormError):
    """Something of the plan cannot go to another process; the text says what and why."""


@dataclass(frozen=True)
class Parcel:
    """What a process needs to train clients of a plan; the tensors are in shared memory."""

    packed: bytes
    x: Tensor
    y: Tensor
    phases: tuple[int, ...]
    """Places in `plan.phases` of the phases that could be packed."""


@dataclass(frozen=True)
class _Factors:
    """Factors on the learning rate that were found already."""

    found: Mapping[str, float]

    def __call__(self, model: nn.Module) -> Mapping[str, float]:
        return self.found


class _ByValue(ForkingPickler):
    """Packs tensors by value, where multiprocessing would open a file for each parameter of a model.

    What is packed goes to processes we started and comes from no file, so that nothing foreign is ever unpacked.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is MappingProxyType:
            return _read_only, (dict(value),)
        if type(value) not in (Tensor, nn.Parameter) or value.device.type != "cpu" or value.layout != torch.strided:
            return NotImplemented
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (raw, value.dtype, tuple(value.shape), type(value) is nn.Parameter, value.requires_grad)


def _read_only(value: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(value)


def _tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], is_parameter: bool, learns: bool) -> Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=dtype).clone() if raw else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    return nn.Parameter(tensor, requires_grad=learns) if is_parameter else tensor.requires_grad_(learns)


def _pack(value: Any, what: str) -> bytes:
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


def pack(plan: Plan) -> Parcel:
    """A plan as a parcel. The data set's memory becomes shared where it lies; nothing is copied."""
    data = plan.federation
    phases: dict[int, bytes] = {}
    refusals: list[CannotSend] = []
    for place, phase in enumerate(plan.phases):
        try:
            phases[place] = _pack(_of_client(plan, phase), f"the phase '{phase.name}'")
        except CannotSend as refusal:
            refusals.append(refusal)
    if not phases:
        raise refusals[0]
    nothing = torch.empty(0)
    hollow = replace(data, x=nothing, y=nothing, test_x=nothing, test_y=nothing, own_test=(), domains={})
    prepared = replace(plan.prepared, method=Method(name=plan.method.name), initial={}, notes=())
    parts = {
        "config": plan.config,
        "prepared": prepared,
        "federation": hollow,
        "batches": replace(plan.batches, federation=hollow),
        "task": plan.task,
        "optimizer": plan.optimizer,
        "probes": plan.probes,
        "phases": phases,
        "batch_norms": _batch_norms(prepared.model),
        "default_dtype": torch.get_default_dtype(),
    }
    packed = _pack(parts, "the model" if _refused(prepared) else "the plan")
    return Parcel(packed, shared(data.x), shared(data.y), tuple(phases))


def shared(tensor: Tensor) -> Tensor:
    """The tensor, its memory now shared with processes it is passed to."""
    try:
        return tensor.share_memory_()
    except RuntimeError as error:  # containers often have little of it
        size = f"{tensor.nbytes / 1e6:.0f} MB"
        raise CannotSend(f"{size} do not fit into the system's shared memory ({first_line(error)})") from error


def _refused(value: Any) -> bool:
    try:
        _pack(value, "")
    except CannotSend:
        return True
    return False


def _of_client(plan: Plan, phase: Phase) -> Phase:
    """The client's part of a phase: what the server does with updates stays here."""
    factors = (_Factors(dict(lr_factors(plan.prepared, phase))),) if phase.rule.lr_factors else ()
    rule = replace(phase.rule, numbers=dict(phase.rule.numbers), lr_factors=factors)
    return replace(phase, rule=rule, policy=dict(phase.policy), measures=dict(phase.measures), weigh={}, merge={})


def _batch_norms(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if is_batch_norm(module)]


def unpack(parcel: Parcel) -> tuple[Plan, dict[int, Phase]]:
    """The plan and its phases by place, in the process that got the parcel."""
    parts = load(parcel.packed)
    torch.set_default_dtype(parts["default_dtype"])
    prepared = parts["prepared"]
    strange = set(parts["batch_norms"]) ^ set(_batch_norms(prepared.model))
    if strange:  # it would be trained as another kind of layer, in silence
        raise CannotSend(
            f"'{min(strange)}' was registered as a norm in the running program alone; "
            "register it in the module that defines it"
        )
    federation = replace(parts["federation"], x=parcel.x, y=parcel.y)
    plan = Plan(
        config=parts["config"],
        method=prepared.method,
        prepared=prepared,
        federation=federation,
        batches=replace(parts["batches"], federation=federation),
        task=parts["task"],
        optimizer=parts["optimizer"],
        device=torch.device("cpu"),
        probes=parts["probes"],
    )
    return plan, {place: load(packed) for place, packed in parts["phases"].items()}


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
