"""On a GPU: every method's stacked rounds equal the sequential engine's, with cuDNN's kernels and with our own."""

from __future__ import annotations

import pytest
import torch

import own_models
import tiny
from fednorm.engines.stack.kernels.layers import use_kernels
from fednorm.methods import known_methods
from fednorm.running.run import Run
from fednorm.running.store import Store
from test_stacked import gap

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
EXACT = {"engine__device": "cuda", "engine__precision": "fp32", "train__dtype": "float32"}


def after_one_step(method: str, engine: str, kernels: bool) -> Run:
    plan = tiny.plan(
        method, engine__name=engine, data=tiny.federation((8, 8, 8)), rounds=1, train__local_steps=1, **EXACT
    )
    if kernels:
        use_kernels(plan.prepared.model)
    return tiny.play(plan)


@pytest.mark.parametrize("kernels", [False, True], ids=["cudnn", "triton"])
@pytest.mark.parametrize("method", known_methods())
def test_a_step_of_a_stack_equals_the_reference(method: str, kernels: bool) -> None:
    assert gap(after_one_step(method, "sequential", False), after_one_step(method, "stacked", kernels)) < 1e-5


@pytest.mark.parametrize("kernels", [False, True], ids=["cudnn", "triton"])
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedprox", "fixbn"])
def test_unequal_work_equals_the_reference(method: str, kernels: bool) -> None:
    """Enough rounds for the steps on smaller batches to be captured."""
    changes = {**EXACT, "data": tiny.federation((7, 14, 11, 3)), "rounds": 8, "train__lr": 0.001}
    changes |= {"train__local_steps": None, "train__local_epochs": 2}
    plan = tiny.plan(method, engine__name="stacked", **changes)
    if kernels:
        use_kernels(plan.prepared.model)
    assert gap(tiny.play(tiny.plan(method, engine__name="sequential", **changes)), tiny.play(plan)) < 1e-5


@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 2e-2), ("bf16", 1e-1)])
def test_coarser_precisions_stay_near(precision: str, tolerance: float) -> None:
    changes = {**EXACT, "data": tiny.federation((8, 8, 8)), "rounds": 2, "train__local_steps": 3, "train__lr": 0.01}
    exact = tiny.play(tiny.plan("fedavg", engine__name="sequential", **changes))
    coarse = tiny.play(tiny.plan("fedavg", engine__name="stacked", **{**changes, "engine__precision": precision}))
    assert gap(exact, coarse) < tolerance


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedadam", "fixbn"])
def test_an_interrupted_run_on_the_device_goes_on_to_the_same_bits(method: str) -> None:
    changes = {**EXACT, "data": tiny.federation((8, 8, 8)), "rounds": 6, "train__local_steps": 2}
    plan = tiny.plan(method, engine__name="stacked", **changes)
    whole = tiny.play(plan)
    store = Store()
    first = Run(tiny.plan(method, engine__name="stacked", engine__checkpoint_every=2, **changes), store)
    for _ in first.rounds():
        if first.round >= 3:
            break
    first.stop()
    second = Run(first.plan, store)
    assert 3 <= second.round == first.round < 6
    list(second.rounds())
    for key, value in whole.server.tree.items():
        assert torch.equal(value, second.server.tree[key]), key


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("name", own_models.NAMES)
def test_models_of_users_equal_the_reference(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Attention, recurrence and random functions: the masks on a GPU are those of the sequential engine."""
    changes = {**EXACT, "data": own_models.text((8, 8, 8)), "rounds": 1, "train__local_steps": 1}
    runs = [
        tiny.play(tiny.plan("fedavg", model=own_models.make(name), engine__name=engine, **changes))
        for engine in ("sequential", "stacked")
    ]
    # Relative to tensors whose gradients are all rounding, as those of the keys' biases in attention.
    assert gap(*runs) < 5e-4
    assert "cannot" not in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_run_twice_gives_the_same_bits(precision: str) -> None:
    changes = {**EXACT, "data": tiny.federation((8, 8, 8)), "rounds": 6, "engine__precision": precision}
    first, second = (tiny.play(tiny.plan("fedavg", engine__name="auto", **changes)) for _ in range(2))
    assert tiny.fingerprint(first) == tiny.fingerprint(second)
