"""Rounds on the device that cannot be played the best way: slower ones take their place, and one line says so."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import tiny
from fednorm.data.federation import Federation
from fednorm.engines.stack import phase_program, program
from fednorm.engines.stack.kernels.layers import use_kernels
from fednorm.engines.stack.slot import StackSlot
from fednorm.engines.stack.stacked import StackedEngine
from fednorm.engines.stack.ways import Way
from fednorm.errors import DivergedError
from fednorm.running.run import Run
from test_stacked import gap


@pytest.fixture(autouse=True)
def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})


CHANGES = {"data": tiny.federation((8, 8, 8)), "rounds": 2, "train__local_steps": 3, "train__lr": 0.02}


def engine_of(run: Run) -> StackedEngine:
    assert isinstance(run.engine, StackedEngine)
    return run.engine


def way_of(run: Run) -> Way | None:
    """The way the run's only phase is played by; None where it left the device."""
    assert isinstance(run.server.held, StackSlot)
    stack = run.server.held.stack
    (phase,) = run.plan.phases
    return None if phase.id in stack.refused else stack.ways.of(phase)


def played(model: nn.Module, kernels: bool, **changes: object) -> tuple[Run, float]:
    """A stacked run of a model, and how far it is from the sequential one."""
    reference = tiny.play(tiny.plan(model=copy.deepcopy(model), engine__name="sequential", **CHANGES, **changes))
    plan = tiny.plan(model=model, engine__name="stacked", **CHANGES, **changes)
    if kernels:
        assert use_kernels(plan.prepared.model)
    run = tiny.play(plan)
    return run, gap(reference, run)


class Viewed(nn.Module):
    """A network that flattens by `view`, which asks how activations lie in memory."""

    def __init__(self, *before: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*before)
        self.head = nn.Linear(4 * 36, tiny.NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(x.view(len(x), -1))


BODIES = {
    "convolution": lambda: (nn.Conv2d(1, 4, 3, padding=1),),
    "batch norm": lambda: (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
    "bare batch norm": lambda: (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False)),
    "pooling": lambda: (nn.ZeroPad2d(3), nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2)),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_view_of_activations_is_played_with_copies(
    body: Callable[[], tuple[nn.Module, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    run, off = played(Viewed(*body()).double(), kernels=True)
    assert off < 1e-10
    assert way_of(run) is Way.DENSE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stacked engine: 'train' takes longer than it could (Cannot view a tensor with shape")
    assert line.endswith("); activations are copied into torch's layout behind each layer")


class WritesThroughFlatten(nn.Module):
    """A network that scales its activations through a flattened view of them."""

    def __init__(self, how: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Linear(4, tiny.NUM_CLASSES)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        self.how(x.flatten(1))
        return self.head(x.mean((2, 3)))


def first_half(x: Tensor) -> None:
    x[:, : x.shape[1] // 2] = 0.5


WRITES: dict[str, Callable[[Tensor], object]] = {
    "a method": lambda x: x.mul_(3.0),
    "a part": lambda x: x[:, :20].add_(1.0),
    "an assignment": first_half,
    "a function": lambda x: nn.functional.relu(x, inplace=True),
}


@pytest.mark.parametrize("how", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("on_device", [True, False], ids=["on the device", "step by step"])
def test_what_is_written_through_a_flattened_view_is_not_lost(
    how: Callable[[Tensor], object],
    on_device: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"} if on_device else set())
    run, off = played(WritesThroughFlatten(how).double(), kernels=True)
    assert off < 1e-10
    assert not on_device or way_of(run) is Way.DENSE
    (line,) = capsys.readouterr().err.splitlines()
    assert "(it writes into activations that it flattened and reads them afterwards); " in line


def test_writing_into_what_is_never_looked_at_again_costs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.ReLU(inplace=True))
    run, off = played(nn.Sequential(body, nn.Linear(4 * 36, tiny.NUM_CLASSES)).double(), kernels=True)
    assert off < 1e-10
    assert way_of(run) is Way.FUSED
    assert capsys.readouterr().err == ""


class CompilationError(Exception):
    """As Triton has them: not a RuntimeError."""


FAILURES = {
    "a rewrite": ("fuse", AttributeError("no such node")),
    "tracing": ("trace", ValueError("Cannot view a tensor")),
    "writing in place": ("write_in_place", KeyError("row")),
    "a kernel": ("trace", CompilationError("at 7:12: unsupported\nmany more lines")),
}


@pytest.mark.parametrize("kernels", [False, True], ids=["torch's layers", "stack operators"])
@pytest.mark.parametrize(("step", "error"), FAILURES.values(), ids=FAILURES)
def test_what_cannot_be_traced_is_played_unfused(
    step: str,
    error: Exception,
    kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*args: object) -> None:
        raise error

    monkeypatch.setattr(program, step, fails)
    run, off = played(tiny.residual_net(), kernels)
    assert off < 1e-10
    assert way_of(run) is Way.PLAIN
    why = str(error).splitlines()[0]
    (line,) = capsys.readouterr().err.splitlines()
    wanted = f"'train' takes longer than it could ({why}); torch's own layers are used, and nothing is fused"
    assert line == f"stacked engine: {wanted}"


class OutOfResources(Exception):
    """As Triton has them."""


@pytest.mark.parametrize("kernels", [False, True], ids=["torch's layers", "stack operators"])
def test_what_is_no_program_at_all_is_stacked_step_by_step(
    kernels: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: object) -> None:
        raise OutOfResources("out of resource: shared memory, Required: 131072, Hardware limit: 101376.")

    monkeypatch.setattr(phase_program, "Program", fails)
    run, off = played(tiny.residual_net(), kernels)
    assert off < 1e-10
    assert way_of(run) is None
    assert not engine_of(run).fell_back
    (line,) = capsys.readouterr().err.splitlines()
    why = "out of resource: shared memory, Required: 131072, Hardware limit: 101376."
    assert line == f"stacked engine: rounds cannot stay on the device ({why}); clients are stacked step by step"


def test_kernels_that_fail_step_by_step_too_give_way_to_torchs_own_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: object, **named: object) -> None:
        raise OutOfResources("out of resource")

    monkeypatch.setattr(phase_program, "Program", fails)
    monkeypatch.setattr("fednorm.engines.stack.kernels.ops.conv", fails)
    run, off = played(tiny.residual_net(), kernels=True)
    assert off < 1e-10
    assert not engine_of(run).fell_back
    assert capsys.readouterr().err.splitlines() == [
        "stacked engine: rounds cannot stay on the device (out of resource); clients are stacked step by step",
        "stacked engine: the model cannot be mapped over clients (out of resource); using torch's own layers",
    ]


class LooksAtNumbers(Viewed):
    """What no mapping can follow, behind a view of activations."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.sum() > 0 else 1)


def test_at_last_clients_train_one_by_one_with_torchs_own_layers(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    run, off = played(LooksAtNumbers(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)).double(), kernels=True)
    assert off == 0
    assert engine_of(run).fell_back
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("stacked engine: rounds cannot stay on the device (")
    assert first.endswith("; clients are stacked step by step")
    assert second.startswith("stacked engine: the model cannot be mapped over clients (")
    assert second.endswith("; using sequential")


class Counting(nn.Module):
    """A network whose forward pass depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.passes = tiny.conv_net(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return self.body(x) / self.passes if self.training else self.body(x)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_model_that_counts_its_passes_is_not_frozen(
    on_device: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not on_device:
        monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", set())
    run, off = played(Counting(), kernels=False)
    assert off == 0
    assert engine_of(run).fell_back
    why = "its forward pass changes 'passes'"
    wanted = f"stacked engine: the model cannot be mapped over clients ({why}); using sequential"
    assert capsys.readouterr().err.splitlines() == [wanted]


class Remembering(nn.Module):
    """A network that keeps what it saw for others to look at, which changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.sizes = tiny.conv_net(), (1, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return self.body(x)


def test_a_model_that_keeps_tensors_for_others_stays(capsys: pytest.CaptureFixture[str]) -> None:
    run, off = played(Remembering(), kernels=False)
    assert off < 1e-10
    assert way_of(run) is Way.FUSED
    assert not capsys.readouterr().err


def with_huge(data: Federation, row: int) -> Federation:
    """One example so large that what is computed of it overflows."""
    x = data.x.clone()
    x[row] = 1e200
    return replace(data, x=x)


ENGINES = ["sequential", "stacked", "on device", "on device, stack operators", "on device, unequal work"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_a_client_that_diverges_is_refused_in_the_same_round_everywhere(
    method: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 1 meets an example that is too large in its third round."""
    data = tiny.federation((24, 24, 20) if "unequal" in engine else (24, 24, 24))
    changes = {"rounds": 6, "train__local_steps": 1, "train__batch_size": 4, "eval__every": 6}
    row = int(tiny.plan(method, data=data, **changes).batches.rows_and_key(1, 2)[0][0])
    refuses(method, engine, with_huge(data, row), "round 3, client 1", monkeypatch, **changes)


@pytest.mark.parametrize("engine", ENGINES[:3])
def test_phases_before_the_last_of_a_round_are_looked_at_too(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are taken first, then all train on from them: by then everybody's numbers would be no numbers."""
    data = tiny.federation((24, 24, 24))
    changes = {"rounds": 3, "train__local_steps": 1, "train__batch_size": 4, "eval__every": 3}
    huge = with_huge(data, int(tiny.plan("decoupled", data=data, **changes).batches.rows_and_key(1, 1)[0][0]))
    refuses("decoupled", engine, huge, "round 2, client 1", monkeypatch, **changes)


def refuses(
    method: str, engine: str, data: Federation, where: str, monkeypatch: pytest.MonkeyPatch, **changes: object
) -> None:
    if "device" not in engine:
        monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", set())
    name = "stacked" if "device" in engine else engine
    plan = tiny.plan(method, data=data, engine__name=name, **changes)
    if "operators" in engine:
        assert use_kernels(plan.prepared.model)
    with pytest.raises(DivergedError) as caught:
        tiny.play(plan)
    advice = "lower train.lr, or set engine.quorum to go on without the client"
    assert re.fullmatch(f"diverged in {where}: .* not finite; {advice}", str(caught.value))


def test_what_nobody_will_see_may_be_anything() -> None:
    """The squares of huge gradients overflow in Adam's buffers, which start anew in every round."""
    data = tiny.federation((8, 8, 8))
    changes = {**CHANGES, "data": with_huge(data, int(data.clients[1][0])), "train__optimizer": "adam"}
    changes |= {"train__momentum": 0.0, "train__weight_decay": 0.0}
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, tiny.NUM_CLASSES)).double()
    plans = [tiny.plan(model=model, engine__name=name, **changes) for name in ("sequential", "stacked")]
    reference, stayed = map(tiny.play, plans)
    assert way_of(stayed) is Way.FUSED
    assert gap(reference, stayed) < 1e-10
