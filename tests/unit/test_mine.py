"""What a client keeps: two generations, of which the server's word decides, so that no work counts that it refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tiny
from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.state import digest
from fednorm.errors import StateError, WireError
from fednorm.halves.messages import Address, LocalWork, Request, Update
from fednorm.halves.mine import ClientState, Mine
from fednorm.halves.site import Site
from fednorm.halves.terms import agree, terms_of
from fednorm.halves.wire import encode
from fednorm.scoring.tasks import Classification


def state(steps: int) -> ClientState:
    return ClientState(steps, {"bn.weight": torch.full((2,), float(steps))})


OLD, NEW, NEWER = state(2), state(4), state(6)
BETWEEN = Mine(accepted=OLD, exchange=3, pending=NEW, pending_exchange=5)
"""A client whose answer to exchange 5 the server has not spoken of yet."""


def test_a_client_begins_with_nothing_before_the_first_exchange() -> None:
    mine = Mine()
    assert (mine.accepted, mine.exchange, mine.pending, mine.pending_exchange) == (ClientState(0, {}), 0, None, 0)
    assert mine.as_of(0) == mine


def test_an_answer_is_pending_and_what_was_accepted_stays() -> None:
    mine = Mine(accepted=OLD, exchange=3).answered(5, NEW)
    assert (mine.accepted, mine.exchange) == (OLD, 3)
    assert (mine.pending, mine.pending_exchange) == (NEW, 5)


def test_the_server_s_word_promotes_the_pending_state() -> None:
    mine = BETWEEN.as_of(5)
    assert (mine.accepted, mine.exchange) == (NEW, 5)
    assert (mine.pending, mine.pending_exchange) == (None, 0)


def test_work_that_was_refused_is_dropped() -> None:
    mine = BETWEEN.as_of(3)
    assert (mine.accepted, mine.exchange) == (OLD, 3)
    assert (mine.pending, mine.pending_exchange) == (None, 0)
    with pytest.raises(StateError):
        mine.as_of(5)  # it cannot come back


def test_a_client_refused_in_its_first_exchange_begins_anew() -> None:
    assert Mine().answered(1, NEW).as_of(0) == Mine()


def test_only_the_last_answer_is_pending() -> None:
    mine = BETWEEN.answered(6, NEWER)
    assert (mine.as_of(3).accepted, mine.as_of(6).accepted) == (OLD, NEWER)
    with pytest.raises(StateError):
        mine.as_of(5)


def test_an_exchange_answered_again_takes_the_place_of_its_first_answer() -> None:
    assert BETWEEN.answered(5, NEWER).as_of(5).accepted is NEWER


def test_the_word_may_come_twice() -> None:
    for exchange in (3, 5):
        once = BETWEEN.as_of(exchange)
        assert once.as_of(exchange) == once


def test_a_chain_of_exchanges_keeps_two_generations_and_no_more() -> None:
    mine = Mine()
    for number in range(1, 6):
        mine = mine.as_of(number - 1).answered(number, state(number))
        assert (mine.exchange, mine.accepted.steps) == (number - 1, number - 1)
        assert (mine.pending_exchange, mine.pending) == (number, mine.as_of(number).accepted)


@pytest.mark.parametrize("asked", [0, 2, 4, 6])
@pytest.mark.parametrize("pending", [True, False])
def test_a_state_that_is_lost_is_an_error_that_names_both_exchanges(asked: int, pending: bool) -> None:
    mine = BETWEEN if pending else BETWEEN.as_of(3)
    with pytest.raises(StateError) as refusal:
        mine.as_of(asked)
    assert str(refusal.value) == (
        f"the server goes on from this client's exchange {asked}, but its state is that of exchange 3; "
        "bring back the state it had, or let it start anew (lost_state='anew')"
    )
    assert refusal.value.exit_code == 2


def test_a_client_that_lost_all_says_so() -> None:
    with pytest.raises(StateError) as refusal:
        Mine().as_of(7)
    assert str(refusal.value) == (
        "the server goes on from this client's exchange 7, but its state is that of exchange 0; "
        "bring back the state it had, or let it start anew (lost_state='anew')"
    )


def test_nothing_is_changed_in_place() -> None:
    before = replace(BETWEEN)
    BETWEEN.as_of(3), BETWEEN.as_of(5), BETWEEN.answered(6, NEWER)
    assert before == BETWEEN
    assert digest(OLD.tree) == digest(state(2).tree)


# At a site

WORK = LocalWork(rounds=4, unit="steps", amount=2, batch_size=4, dtype="float64", lr=0.1)
AGREED = agree(tiny.conv_net(), "fedbn", WORK)
TERMS = terms_of(AGREED, run="r")
TRAIN = PhaseId(Purpose.TRAIN)


def a_site() -> Site:
    own, test = tiny.examples(12, 0.5, seed=1), tiny.examples(6, 0.5, seed=2)
    return Site(TERMS, 0, tiny.conv_net(), own, task=Classification(tiny.NUM_CLASSES), test=test)


def request(number: int, accepted: int, phase: PhaseId = TRAIN) -> Request:
    tree = {key: AGREED.initial()[key] for key in AGREED.phase(TRAIN).sent}
    address = Address(terms=TERMS.digest, number=number)
    return Request(
        client=0,
        address=address,
        round=1,
        phase=phase,
        numbers=AGREED.numbers(TRAIN, 1),
        accepted=accepted,
        tree=tree,
    )


def same(one: tuple[Update, Mine], other: tuple[Update, Mine]) -> bool:
    """Whether two answers, and what the client keeps after them, are the same to the bit."""
    kept = [
        (mine.exchange, mine.pending_exchange, mine.accepted.steps, digest(mine.accepted.tree))
        + ((mine.pending.steps, digest(mine.pending.tree)) if mine.pending else ())
        for _, mine in (one, other)
    ]
    return encode(one[0]) == encode(other[0]) and kept[0] == kept[1]


def test_a_site_goes_on_from_what_the_server_accepted() -> None:
    site = a_site()
    first = site.work(request(1, accepted=0), Mine())
    assert (first[1].exchange, first[1].pending_exchange) == (0, 1)
    assert (first[1].accepted.steps, first[1].pending and first[1].pending.steps) == (0, 2)
    _, mine = site.work(request(2, accepted=1), first[1])
    assert (mine.exchange, mine.accepted, mine.pending_exchange) == (1, first[1].pending, 2)
    assert mine.pending is not None
    assert mine.pending.steps == 4


def test_work_that_the_server_refused_leaves_no_trace_at_a_site() -> None:
    """Its next answer is that of a client that was never asked."""
    site = a_site()
    _, refused = site.work(request(1, accepted=0), Mine())
    after = site.work(request(2, accepted=0), refused)
    assert same(after, site.work(request(2, accepted=0), Mine()))
    accepted = site.work(request(2, accepted=1), refused)
    assert not same(after, accepted)


def test_a_request_that_comes_twice_is_answered_twice_with_the_same_bytes() -> None:
    site = a_site()
    _, mine = site.work(request(1, accepted=0), Mine())
    once = site.work(request(2, accepted=1), mine)
    assert same(once, site.work(request(2, accepted=1), mine))
    assert same(once, site.work(request(2, accepted=1), once[1]))  # kept before the answer was lost
    assert same(once, a_site().work(request(2, accepted=1), mine))  # the site was started anew


def test_a_site_that_lost_its_state_trains_nothing() -> None:
    with pytest.raises(StateError, match=r"^the server goes on from this client's exchange 1, but its state is "):
        a_site().work(request(2, accepted=1), Mine())


def test_a_test_looks_at_the_accepted_state_and_changes_nothing() -> None:
    site = a_site()
    _, mine = site.work(request(1, accepted=0), Mine())
    score = PhaseId(Purpose.SCORE)
    before = site.score(request(2, accepted=0, phase=score), mine)
    after = site.score(request(2, accepted=1, phase=score), mine)
    fresh = site.score(request(2, accepted=0, phase=score), Mine())
    assert encode(before) == encode(fresh) != encode(after)
    assert (mine.exchange, mine.pending_exchange) == (0, 1)


@pytest.mark.parametrize(
    "phase",
    [
        PhaseId(Purpose.TRAIN, 1),
        PhaseId(Purpose.TRAIN, 0, 1),
        PhaseId(Purpose.QUERY),
        PhaseId(Purpose.SCORE, 1),
        PhaseId(Purpose.SCORE, 0, 1),
        PhaseId(Purpose.SCORE, -5),
    ],
    ids=str,
)
def test_a_phase_that_the_method_lacks_is_refused_at_a_site(phase: PhaseId) -> None:
    for ask in (a_site().work, a_site().score):
        with pytest.raises(WireError) as refusal:
            ask(request(1, accepted=0, phase=phase), Mine())
        assert str(refusal.value) == f"client 0, exchange 1: 'fedbn' has no phase {phase}"
