"""Random networks, stacked, traced and rewritten: the same numbers as client by client, in float64."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import tiny
from fednorm.engines.stack.kernels.layers import use_kernels
from fednorm.engines.stack.slot import StackSlot
from random_graphs import STEPS, RandomGraph
from test_stacked import gap

METHODS = ("fedavg", "fedbn", "fedprox", "fedadam", "local-momentum", "fixbn", "fedwon", "gn")
DATA = tiny.federation((4, 4))
CHANGES = {"data": DATA, "rounds": 1, "train__lr": 0.02, "train__batch_size": 3, "eval__every": 1}
MANY = settings(
    max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
graphs = st.builds(
    RandomGraph,
    st.lists(st.sampled_from(STEPS), min_size=1, max_size=7),
    st.sampled_from(["mean", "flatten", "reshape"]),
    st.integers(0, 3),
)


def check(model: RandomGraph, method: str, steps: int, kernels: bool) -> None:
    """A round by the reference and one in programs, which no part of it may leave."""
    model = model.double()
    wanted = {**CHANGES, "train__local_steps": steps, "allow_noop": True}
    reference = tiny.play(tiny.plan(method, model=copy.deepcopy(model), engine__name="sequential", **wanted))
    plan = tiny.plan(method, model=model, engine__name="stacked", **wanted)
    if kernels:
        use_kernels(plan.prepared.model)
    run = tiny.play(plan)
    assert isinstance(run.server.held, StackSlot)
    assert not run.server.held.stack.refused
    assert gap(reference, run) < 1e-9
    for client in reference.store.seen():
        mine, theirs = reference.store.get(client), run.store.get(client)
        assert mine.steps == theirs.steps
        assert mine.tree.keys() == theirs.tree.keys()


@pytest.mark.slow
@MANY
@given(graphs, st.sampled_from(METHODS), st.sampled_from([1, 2]), st.booleans())
def test_random_networks_equal_the_reference(model: RandomGraph, method: str, steps: int, kernels: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
        check(model, method, steps, kernels)
