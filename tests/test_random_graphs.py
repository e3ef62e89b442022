"""Random networks, stacked, traced and rewritten: the same numbers as client by client, in float64."""

from __future__ import annotations

import copy
import os
from collections import Counter

import pytest

import tiny
from fednorm.core.phases import Purpose
from fednorm.engines.stack.kernels.layers import use_kernels
from fednorm.engines.stack.slot import StackSlot, can_be_alone
from fednorm.engines.stack.ways import Way
from fednorm.methods import known_methods
from random_graphs import KEEP, STEPS, Graph, Several, drawn
from test_stacked import assert_same_clients, gap

AT_ONCE = 4
"""Graphs side by side in a model."""
TURNS = int(os.environ.get("FEDNORM_RANDOM_GRAPHS", "1"))
"""Models for every method, with torch's layers and with stack operators; a night's run may ask for more."""
LEAVE = {"fedtan"}
"""Methods whose training is not played by programs."""
CHANGES = {"data": tiny.federation((4, 4)), "rounds": 1, "train__lr": 0.02, "train__batch_size": 3}
CHANGES |= {"eval__every": 1, "allow_noop": True}
WAYS = pytest.mark.parametrize("kernels", [False, True], ids=["torch's layers", "stack operators"])


def compare(graphs: list[Graph], method: str, steps: int, kernels: bool) -> None:
    """A round by the reference, and one in traced and fused programs, which it may not leave."""
    model = Several(graphs).double()
    wanted = {**CHANGES, "train__local_steps": steps}
    reference = tiny.play(tiny.plan(method, model=copy.deepcopy(model), engine__name="sequential", **wanted))
    plan = tiny.plan(method, model=model, engine__name="stacked", **wanted)
    if kernels:
        use_kernels(plan.prepared.model)
    run = tiny.play(plan)
    assert isinstance(run.server.held, StackSlot)
    stack, trained = run.server.held.stack, [phase for phase in plan.phases if phase.id.purpose is Purpose.TRAIN]
    assert not any(phase.id in stack.refused for phase in trained)
    assert all(stack.ways.of(phase) is Way.FUSED for phase in plan.phases)
    played = {phase.id for phase in trained if phase.id.stage == run.server.stage and can_be_alone(phase)}
    assert method in LEAVE or {program.phase.id for program in stack._programs.values()} >= played > set()
    assert gap(reference, run) < 1e-9
    assert_same_clients(reference, run)


def check(graphs: list[Graph], method: str, steps: int, kernels: bool) -> None:
    try:
        compare(graphs, method, steps, kernels)
    except Exception:
        for graph in graphs:  # the one that goes wrong by itself says more
            print(graph)
            compare([graph], method, steps, kernels)
        raise


@pytest.fixture(autouse=True, scope="module")
def stay() -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    yield
    patch.undo()


def graphs_of(method: str, kernels: bool, turn: int) -> list[Graph]:
    return drawn(f"{method}, {kernels}, {turn}", AT_ONCE)


@pytest.mark.slow
@pytest.mark.timeout(120 * TURNS)
@WAYS
@pytest.mark.parametrize("method", known_methods())
def test_random_networks_equal_the_reference(method: str, kernels: bool) -> None:
    for turn in range(TURNS):
        check(graphs_of(method, kernels, turn), method, 1, kernels)


def test_all_that_models_are_made_of_is_drawn() -> None:
    """In what every run of the tests plays: some hundred graphs, each of their parts with many methods."""
    graphs = [
        graph for method in known_methods() for kernels in (False, True) for graph in graphs_of(method, kernels, 0)
    ]
    parts = Counter(step for steps, _ in graphs for step in set(steps))
    around = [
        steps for steps, _ in graphs if KEEP in steps[:-1] and any("shortcut" in s for s in steps[steps.index(KEEP) :])
    ]
    assert len(graphs) >= 290
    assert {step for step in STEPS if parts[step] < 15} == set()
    assert len(around) >= 15


FOUND = {
    "a row changed in place": (["relu in place", "one row in place", "per channel"], "reshape"),
    "axes counted from the back": (["conv", "roll axes", "mixer"], "flatten"),
    "rows of pieces joined": (["gate", "bn without affine", "relu6"], "mean"),
}


@WAYS
@pytest.mark.parametrize("graph", FOUND.values(), ids=FOUND)
def test_networks_that_once_went_wrong_or_left(graph: Graph, kernels: bool) -> None:
    check([graph], "fedavg", 2, kernels)
