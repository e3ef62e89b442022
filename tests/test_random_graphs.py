"""Random networks, stacked, traced and rewritten: the same numbers as client by client, in float64."""

from __future__ import annotations

import copy
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
from fednorm.engines.stack.kernels.layers import use_kernels
from fednorm.engines.stack.slot import StackSlot
from fednorm.engines.stack.ways import Way
from random_graphs import STEPS, Several
from test_stacked import assert_same_clients, gap

METHODS = ("fedavg", "fedbn", "fedprox", "fedadam", "local-momentum", "fixbn", "fedwon", "gn")
EXAMPLES = int(os.environ.get("FEDNORM_RANDOM_GRAPHS", "35"))
"""Of three graphs each; a night's run may ask for more."""
CHANGES = {"data": tiny.federation((4, 4)), "rounds": 1, "train__lr": 0.02, "train__batch_size": 3}
CHANGES |= {"eval__every": 1, "allow_noop": True}
graph = st.tuples(
    st.lists(st.sampled_from(STEPS), min_size=1, max_size=6), st.sampled_from(["mean", "flatten", "reshape"])
)


def check(graphs: list[tuple[list[str], str]], method: str, steps: int, kernels: bool) -> None:
    """A round by the reference, and one in traced and fused programs, which it may not leave."""
    model = Several(graphs).double()
    wanted = {**CHANGES, "train__local_steps": steps}
    reference = tiny.play(tiny.plan(method, model=copy.deepcopy(model), engine__name="sequential", **wanted))
    plan = tiny.plan(method, model=model, engine__name="stacked", **wanted)
    if kernels:
        use_kernels(plan.prepared.model)
    run = tiny.play(plan)
    assert isinstance(run.server.held, StackSlot)
    stack = run.server.held.stack
    assert not stack.refused
    assert all(stack.ways.of(phase) is Way.FUSED for phase in plan.phases)
    assert gap(reference, run) < 1e-9
    assert_same_clients(reference, run)


@pytest.fixture(autouse=True, scope="module")
def stay() -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    yield
    patch.undo()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(st.lists(graph, min_size=3, max_size=3), st.sampled_from(METHODS), st.booleans())
def test_random_networks_equal_the_reference(graphs: list[tuple[list[str], str]], method: str, kernels: bool) -> None:
    check(graphs, method, 1, kernels)


FOUND = {
    "a row changed in place": (["relu in place", "one row in place", "per channel"], "reshape"),
    "axes counted from the back": (["conv", "roll axes", "mixer"], "flatten"),
    "rows of pieces joined": (["gate", "bn without affine", "relu6"], "mean"),
}


@pytest.mark.parametrize("kernels", [False, True], ids=["torch's layers", "stack operators"])
@pytest.mark.parametrize("graph", FOUND.values(), ids=FOUND)
def test_networks_that_once_went_wrong_or_left(graph: tuple[list[str], str], kernels: bool) -> None:
    check([graph], "fedavg", 2, kernels)
