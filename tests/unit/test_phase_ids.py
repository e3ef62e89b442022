"""Addresses of phases: one text for each, one for every exchange, and what a tested model consists of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import checks
import tiny
from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.state import Kind, Policy
from fednorm.methods import parse

IDS = st.builds(PhaseId, st.sampled_from(Purpose), st.integers(0, 10**6), st.integers(0, 10**6))

ADDRESSES = {
    "hbn": {"train.0.0": "statistics", "train.0.1": "train", "query.0.0": "query"},
    "sbn": {"train.0.0": "train", "query.0.0": "statistics"},
    "posthoc": {"train.0.0": "train", "finish.0.0": "statistics"},
    "fixbn": {"train.0.0": "train", "train.1.0": "train"},
    "decoupled": {"train.0.0": "statistics", "train.0.1": "train"},
}
every_method = pytest.mark.parametrize("method", ADDRESSES)

COURSES = {
    "hbn": ["train.0.0", "train.0.1", "train.0.0", "train.0.1", "query.0.0"] * 2,
    "sbn": ["train.0.0", "train.0.0", "query.0.0"] * 2,
    "posthoc": ["train.0.0"] * 4 + ["finish.0.0"],
    "fixbn": ["train.0.0"] * 2 + ["train.1.0"] * 2,
    "decoupled": ["train.0.0", "train.0.1"] * 4,
}
"""Exchanges of four rounds with a test after every second."""


@given(IDS)
def test_an_id_comes_back_from_its_text(id: PhaseId) -> None:
    again = PhaseId.parse(str(id))
    assert again == id
    assert hash(again) == hash(id)
    assert isinstance(again.purpose, Purpose)


def test_the_text_is_purpose_stage_and_number() -> None:
    assert str(PhaseId(Purpose.TRAIN, 1, 2)) == "train.1.2"
    assert [str(PhaseId(purpose)) for purpose in Purpose] == ["train.0.0", "finish.0.0", "query.0.0", "score.0.0"]


@given(IDS, IDS)
def test_two_ids_have_two_texts(one: PhaseId, other: PhaseId) -> None:
    assert (str(one) == str(other)) == (one == other)


WRONG = ["", "train", "train.0", "train.0.0.0", "test.0.0", "Train.0.0", "train.a.0", "train..0", "train.0.0 "]
OTHER_SPELLINGS = [
    "train.01.0",
    "train.+1.0",
    "train. 1.0",
    "train.1_0.0",
    "train.-1.0",
    "score.0.-1",
    "train.\u0661.0",
]


@pytest.mark.parametrize("text", WRONG + OTHER_SPELLINGS)
def test_what_is_no_id_s_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the text is for programmers
        PhaseId.parse(text)


@every_method
def test_every_exchange_has_its_own_address(method: str) -> None:
    made = parse(method)
    found = made.all_phases
    assert {str(id): phase.name for id, phase in found.items()} == ADDRESSES[method]
    queries = () if made.query is None else (made.query,)
    assert tuple(found.values()) == (*made.phases, *made.finish, *queries)
    assert all(made.phase_at(PhaseId.parse(str(id))) is phase for id, phase in found.items())
    assert made.stages == tuple(
        tuple(made.phase_at(PhaseId(Purpose.TRAIN, stage, number)) for number in range(len(phases)))
        for stage, phases in enumerate(made.stages)
    )


@every_method
def test_an_address_that_the_method_lacks_is_an_error(method: str) -> None:
    made = parse(method)
    for id in (PhaseId(purpose, 9, 9) for purpose in (Purpose.TRAIN, Purpose.FINISH, Purpose.QUERY)):
        with pytest.raises(KeyError):
            made.phase_at(id)


@every_method
def test_a_run_plays_the_phases_of_its_method_by_address(method: str) -> None:
    run, spy = checks.spied(tiny.plan(method, model=tiny.conv_net(), rounds=4, eval__every=2))
    list(run.rounds())
    assert [str(exchange.phase.id) for exchange in spy.log] == COURSES[method]
    assert {str(phase.id) for phase in run.plan.phases} == set(COURSES[method])
    assert all(exchange.phase is run.plan.phase(exchange.phase.id) for exchange in spy.log)
    assert all(exchange.phase.phase == run.plan.method.phase_at(exchange.phase.id) for exchange in spy.log)


@pytest.mark.parametrize("method", ["posthoc", "fixbn", "decoupled"])
def test_without_a_query_the_evaluated_phase_is_the_stage_s_last(method: str) -> None:
    made = parse(method)
    for stage, phases in enumerate(made.stages):
        assert made.phase_at(PhaseId(Purpose.SCORE, stage)) is phases[-1]


@pytest.mark.parametrize(("method", "trained_with"), [("hbn", Policy.FROZEN), ("sbn", Policy.DROPPED)])
def test_the_evaluated_phase_counts_what_the_query_fills_as_shared(method: str, trained_with: Policy) -> None:
    made = parse(method)
    last, evaluated = made.stages[0][-1], made.phase_at(PhaseId(Purpose.SCORE, 0))
    filled = {Kind.STATISTIC, Kind.COUNTER}
    assert made.query is not None
    assert {kind for kind, policy in made.query.policy.items() if policy is Policy.SHARED} == filled
    assert {last.policy[kind] for kind in filled} == {trained_with}
    assert {evaluated.policy[kind] for kind in filled} == {Policy.SHARED}
    assert replace(evaluated, policy=last.policy) == last
    assert all(evaluated.policy[kind] is last.policy[kind] for kind in set(Kind) - filled)


@pytest.mark.parametrize("method", ["hbn", "sbn"])
def test_a_tested_model_has_the_statistics_that_the_query_left_at_the_server(method: str) -> None:
    made = tiny.plan(method, model=tiny.conv_net())
    evaluated, last = made.evaluated(0), made.phase(PhaseId(Purpose.TRAIN, 0, len(made.method.stages[0]) - 1))
    statistics = checks.keys_of(made.prepared.entries, Kind.STATISTIC)
    assert statistics
    assert set(statistics) <= set(evaluated.shared)
    assert not set(statistics) & set(last.shared)
    server = {key: value + 3 for key, value in made.initial().items()}
    state = evaluated.start(server, {}, made.device)
    assert all(torch.equal(state[key], server[key]) for key in statistics)


def test_what_clients_keep_stays_their_own_in_the_evaluated_phase() -> None:
    made = tiny.plan("hbn", model=tiny.conv_net())
    evaluated = made.evaluated(0)
    assert evaluated.kept == made.phase(PhaseId(Purpose.TRAIN, 0, 1)).kept != ()
    mine = {key: made.initial()[key] + 5 for key in evaluated.kept}
    state = evaluated.start(made.initial(), mine, made.device)
    assert all(torch.equal(state[key], mine[key]) for key in mine)


def test_stages_are_evaluated_by_number_also_from_the_end() -> None:
    made = tiny.plan("fixbn")
    assert [str(made.evaluated(stage).id) for stage in (0, 1, -1, -2)] == [
        *("score.0.0", "score.1.0"),
        *("score.1.0", "score.0.0"),
    ]
    assert made.evaluated(-1) is made.evaluated(1)
