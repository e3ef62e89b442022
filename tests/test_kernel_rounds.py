"""Whole rounds through the Triton kernels, played on the CPU by Triton's interpreter: `make test-kernels`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tiny
from fednorm.core.state import Tree
from fednorm.engines.stack.kernels import ops
from fednorm.engines.stack.kernels.layers import use_kernels
from fednorm.engines.stack.kernels.tiles import ALONE
from fednorm.engines.stack.program import Moves, Program, compile_kernels
from fednorm.engines.stack.slot import StackSlot
from fednorm.engines.stack.tracing import trace
from fednorm.engines.stack.ways import Way
from fednorm.errors import DivergedError
from fednorm.models.mobilenet import InvertedResidual
from fednorm.running.run import Run
from test_stacked import gap

if ops.INTERPRETED:
    import narrow_interpreter

    narrow_interpreter.teach()
pytestmark = pytest.mark.skipif(not ops.INTERPRETED, reason="Triton does not interpret here")
KERNELS = (
    ("run_conv", "run_weight_grad", "run_point", "run_point_weight_grad"),
    ("run_norm", "run_norm_grad"),
    ("run_dropout", "run_max_pool", "run_thin", "run_relu_grad", "run_fold"),
    ("take_images",),
    ("run_group_norm", "run_group_norm_grad"),
    ("run_adam",),
    ("run_depthwise", "run_filter_grad"),
    ("run_entropy",),
    ("run_sgd",),
    ("run_standardise",),
)
ALWAYS = {"run_conv", "run_weight_grad", "run_fold", "run_sgd", "run_entropy"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel was launched."""
    from fednorm.engines.stack.kernels import adam, conv, depthwise, elements, entropy, group_norm, images, norm, sgd
    from fednorm.engines.stack.kernels import standard as weights

    counts: Counter[str] = Counter()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **named: Any) -> Any:
            counts[name] += 1
            return real(*args, **named)

        return count

    modules = conv, norm, elements, images, group_norm, adam, depthwise, entropy, sgd, weights
    for module, names in zip(modules, KERNELS, strict=True):
        for name in names:
            monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    return counts


class Shortcut(nn.Module):
    """A residual block whose shortcut thins its pixels and adds channels of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.Conv2d(6, 6, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(6)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        return (y + functional.pad(x[..., ::2, ::2], (0, 0, 0, 0, 1, 1))).relu()


def residual() -> nn.Module:
    stem = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*stem, Shortcut(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, tiny.NUM_CLASSES))


def mobile() -> nn.Module:
    """Inverted residuals: one that adds its input, one with a step of 2 and filters of another size."""
    stem = [nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU6()]
    wide = [nn.Conv2d(6, 6, 5, 2, 2, groups=6), nn.BatchNorm2d(6), nn.ReLU6(), nn.Conv2d(6, 5, 1), nn.BatchNorm2d(5)]
    blocks = [InvertedResidual(4, 4, 2, 1, 1), InvertedResidual(4, 6, 2, 1, 1), *wide]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, tiny.NUM_CLASSES))


def plain() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(36, tiny.NUM_CLASSES))


def bare() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False, track_running_stats=False)]
    return nn.Sequential(*layers, nn.ReLU6(), nn.Flatten(), nn.Linear(144, tiny.NUM_CLASSES))


def grouped() -> nn.Module:
    layers = [
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, 2, 1),
        nn.GroupNorm(4, 4),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5), nn.Linear(5, tiny.NUM_CLASSES))


NORMS = {"run_norm", "run_norm_grad"}
MODELS = {"residual": (residual, NORMS | {"run_thin"}), "bare": (bare, NORMS)}
MODELS["mobile"] = mobile, NORMS | {"run_depthwise", "run_filter_grad", "run_point", "run_point_weight_grad"}
MODELS["grouped"] = grouped, NORMS | {"run_group_norm", "run_group_norm_grad"}
MODELS["plain"] = plain, {"run_max_pool", "run_dropout", "run_relu_grad"}
CHANGES = {"data": tiny.federation((8, 8, 8)), "rounds": 1, "train__lr": 0.02, "train__dtype": "float32"}


def both(model: nn.Module, method: str, **changes: object) -> tuple[Run, Run]:
    """A run by the reference, and one that stays on the device in programs with kernels."""
    model = model.float()
    wanted = {**CHANGES, **changes}
    reference = tiny.play(tiny.plan(method, model=copy.deepcopy(model), engine__name="sequential", **wanted))
    return reference, on_the_device(model, method, None, **wanted)


def on_the_device(model: nn.Module, method: str, narrow: torch.dtype | None, **changes: object) -> Run:
    """A run that stays there, in programs with the stack's own operators."""
    plan = tiny.plan(method, model=model, engine__name="stacked", **changes)
    assert use_kernels(plan.prepared.model, narrow)
    run = tiny.play(plan)
    assert isinstance(run.server.held, StackSlot)
    assert not run.server.held.stack.refused
    assert all(run.server.held.stack.ways.of(phase) is Way.FUSED for phase in plan.phases)
    return run


@pytest.mark.parametrize(
    ("model", "method", "steps"),
    [
        ("residual", "fedavg", 3),
        ("residual", "fedbn", 1),
        ("plain", "fedprox", 2),
        ("bare", "fedadam", 1),
        ("grouped", "fedavg", 2),
        ("mobile", "fedavg", 2),
    ],
)
def test_rounds_through_the_kernels_equal_the_reference(
    model: str, method: str, steps: int, launched: Counter[str]
) -> None:
    torch.manual_seed(0)
    make, own = MODELS[model]
    reference, run = both(make(), method, train__local_steps=steps)
    assert gap(reference, run) < 2e-4
    assert launched.keys() >= ALWAYS | own


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("fedwon", {"run_standardise"}),
        ("fedavg+gn(groups=2)+ws", {"run_standardise", "run_group_norm", "run_group_norm_grad"}),
        ("fedavg+in", {"run_group_norm", "run_group_norm_grad"}),
    ],
)
def test_what_takes_the_place_of_batch_norms_goes_through_kernels(
    method: str, own: set[str], launched: Counter[str]
) -> None:
    torch.manual_seed(0)
    reference, run = both(residual(), method, train__local_steps=2)
    assert gap(reference, run) < 2e-4
    assert launched.keys() >= ALWAYS | own


@pytest.mark.parametrize(
    ("model", "method"),
    [
        *((name, "fedavg") for name in MODELS),
        ("residual", "fedwon"),
        ("residual", "fedavg+gn(groups=2)+ws"),
        ("residual", "fedavg+in"),
    ],
)
def test_rounds_in_bf16_through_the_kernels_equal_those_through_their_references(
    model: str, method: str, launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both round at the same places; how their sums are ordered decides about a rounding now and then."""
    torch.manual_seed(0)
    make = MODELS[model][0]().float()
    changes = {**CHANGES, "train__local_steps": 3}  # so many that each is played by a program of its own
    kernels = on_the_device(copy.deepcopy(make), method, torch.bfloat16, **changes)
    assert launched.keys() >= ALWAYS
    launched.clear()
    monkeypatch.setattr(ops, "_TYPES", ())
    references = on_the_device(make, method, torch.bfloat16, **changes)
    assert not launched
    assert gap(kernels, references) < 1e-3


@pytest.mark.parametrize("optimizer", ["adam(eps=1e-3)", "adamw(eps=1e-3)"])
def test_adam_through_its_kernel_equals_the_reference(optimizer: str, launched: Counter[str]) -> None:
    """An eps that large, because a gradient of zero up to rounding would be a whole step otherwise."""
    torch.manual_seed(0)
    changes = {"train__local_steps": 3, "train__optimizer": optimizer, "train__lr": 0.005}
    reference, run = both(residual(), "fedbn", **changes)
    assert gap(reference, run) < 2e-4
    assert launched.keys() >= ALWAYS - {"run_sgd"} | NORMS | {"run_adam"}
    assert not launched["run_sgd"]


def test_unequal_work_through_the_kernels_equals_the_reference(launched: Counter[str]) -> None:
    torch.manual_seed(0)
    changes = {"data": tiny.federation((5, 8, 3)), "train__local_steps": None, "train__local_epochs": 1}
    reference, run = both(residual(), "fedavg", **changes)
    assert gap(reference, run) < 2e-4
    assert launched.keys() >= ALWAYS | NORMS


def test_statistics_that_are_held_go_through_the_kernels(launched: Counter[str]) -> None:
    torch.manual_seed(0)
    reference, run = both(residual(), "fixbn", rounds=2, train__local_steps=1)
    assert gap(reference, run) < 2e-4
    assert launched.keys() >= ALWAYS | NORMS


def test_images_of_bytes_go_through_their_kernel(launched: Counter[str]) -> None:
    torch.manual_seed(0)
    data = tiny.federation((8, 8, 8))
    x, test = ((part - part.min()) / (part.max() - part.min()) * 255 for part in (data.x, data.test_x))
    data = replace(data, x=x.to(torch.uint8), test_x=test.to(torch.uint8), mean=(0.4,), std=(0.3,))
    reference, run = both(residual(), "fedavg", data=data, train__augment="crop(1)+flip")
    assert gap(reference, run) < 2e-4
    assert launched.keys() >= ALWAYS | NORMS | {"take_images"}


def test_weights_that_are_others_gradients_are_read_before_they_are_moved(launched: Counter[str]) -> None:
    """Two large ones, each of which a launch of its own moves."""
    state = {"w": torch.randn(2, 2 * ALONE), "rates": torch.rand(3, 2)}

    def step(state: Tree) -> Moves:
        grad = torch.func.grad(lambda w: torch.mul(*w.split(ALONE, 1)).sum())(state["w"])
        return {"w": torch.ops.fednorm.sgd(state["w"], [grad], None, *state["rates"].unbind(), [], [])[0]}, {}

    wanted = step(state)[0]["w"]
    Program(step, state)()
    assert torch.equal(state["w"], wanted)
    assert launched["run_sgd"] == 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, with which Triton interprets, tells of overflows
@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("fedavg", NORMS),
        ("fedwon", {"run_standardise"}),
        ("fedavg+gn(groups=2)+ws", {"run_standardise", "run_group_norm"}),
        ("fedavg+in", {"run_group_norm"}),
    ],
)
def test_a_client_that_diverges_is_seen_through_the_kernels(method: str, own: set[str], launched: Counter[str]) -> None:
    """Its numbers that are none pass two ReLUs on their way to the loss, variances beyond float32 make no zeros."""
    torch.manual_seed(0)
    data = tiny.federation((8, 8, 8))
    x = data.x.clone()
    x[data.clients[1]] = 1e30
    changes = {**CHANGES, "data": replace(data, x=x)}
    plan = tiny.plan(method, model=residual().float(), engine__name="stacked", **changes)
    use_kernels(plan.prepared.model)
    with pytest.raises(DivergedError, match=r"^diverged in round 1, client 1: its update is not finite; "):
        tiny.play(plan)
    assert launched.keys() >= ALWAYS | own


@pytest.fixture
def no_boxes(monkeypatch: pytest.MonkeyPatch) -> Event:
    """A GPU that should fetch boxes and refuses each of them; whether they were given up."""
    from fednorm.engines.stack.kernels import boxes, conv

    def refuse(*args: Any, **named: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: invalid argument\nat some line")

    given_up = Event()
    monkeypatch.setattr(boxes, "_fetches", lambda: True)
    monkeypatch.setattr(boxes, "_GIVEN_UP", given_up)
    for name in ("run_box_conv", "run_box_weight_grad"):
        monkeypatch.setattr(conv, name, refuse)
    return given_up


def test_rounds_stay_on_the_device_where_boxes_are_refused(
    no_boxes: Event, launched: Counter[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels that read by addresses take over, and give what they give alone."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, tiny.NUM_CLASSES)).float()
    data = tiny.federation((4, 4))
    data = replace(data, x=torch.randn(len(data.x), 1, 8, 8), test_x=torch.randn(len(data.test_x), 1, 8, 8))
    changes = {**CHANGES, "data": data, "train__local_steps": 1}
    found = on_the_device(copy.deepcopy(model), "fedavg", torch.bfloat16, **changes)
    assert no_boxes.is_set()
    line = "convolutions take longer than they could, boxes failed (Triton Error [CUDA]: invalid argument)"
    assert capsys.readouterr().err.count(f"stacked engine: {line}\n") == 1
    monkeypatch.setattr("fednorm.engines.stack.kernels.boxes._fetches", lambda: False)
    alone = on_the_device(model, "fedavg", torch.bfloat16, **changes)
    assert gap(found, alone) == 0
    assert launched.keys() >= ALWAYS


def test_kernels_made_side_by_side_decide_nothing_about_boxes(
    no_boxes: Event, capsys: pytest.CaptureFixture[str]
) -> None:
    def conv(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.fednorm.conv(x, w, 1, [1, 1])

    x, w = (torch.randn(2, 4, 8, 8, 32).bfloat16().permute(0, 1, 4, 2, 3), torch.randn(2, 32, 32, 3, 3).bfloat16())
    with compile_kernels(trace(conv, x, w)):
        pass
    assert not no_boxes.is_set()
    assert not capsys.readouterr().err
    conv(x, w)
    assert no_boxes.is_set()


def test_boxes_that_fail_while_a_graph_is_captured_are_an_error(
    no_boxes: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fednorm.engines.stack.kernels import boxes, conv

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="invalid argument"):
        boxes.fetched(conv.run_box_conv)  # type: ignore[arg-type]
    assert not no_boxes.is_set()
