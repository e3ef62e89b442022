"""Faults of clients that are elsewhere: what a server takes, what it refuses, and how it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import over_a_wire
import tiny
from fednorm.core.phases import Purpose
from fednorm.core.state import digest
from fednorm.errors import QuorumError, WireError
from fednorm.halves.messages import Scores, Update
from fednorm.halves.mine import Mine
from over_a_wire import Killed, fingerprint_of
from test_halves import Federation, made, request_of

LATE = "it answers attempt 1 of exchange 1, open is attempt {} of exchange {}; it is late"


def answers(federation: Federation) -> list[Update]:
    """The good answers of all three clients."""
    return [site.work(request_of(federation, client), Mine())[0] for client, site in enumerate(federation.sites)]


def spoiled(update: Update, **changes: Any) -> Update:
    return replace(update, report=replace(update.report, **changes))


def with_entry(update: Update, change: Callable[[torch.Tensor], Any]) -> Update:
    return replace(update, shared={**update.shared, "fc.weight": change(update.shared["fc.weight"])})


REFUSED: dict[str, tuple[int, Callable[[Update], Update], str]] = {
    "shape": (7, lambda u: with_entry(u, lambda t: t[:1]), "entry 'fc.weight': has shape (1, 4), expected (3, 4)"),
    "none": (7, lambda u: with_entry(u, lambda t: None), "entry 'fc.weight': is None, expected a tensor"),
    "gradient": (7, lambda u: with_entry(u, lambda t: t.clone().requires_grad_()),
                 "entry 'fc.weight': carries a gradient; send it detached"),
    "no entries": (7, lambda u: replace(u, shared=None), "its entries are None, expected tensors by name"),  # type: ignore[arg-type]
    "no loss": (6, lambda u: spoiled(u, losses={}), "its loss 'all' is missing"),
    "no report": (9, lambda u: replace(u, report=None), "it is of client None; a client is a whole number"),  # type: ignore[arg-type]
    "bool": (9, lambda u: spoiled(u, num_examples=True),
             "its number of examples is True, expected a whole number above 0"),
    "owner": (9, lambda u: spoiled(u, num_examples=10**30),
              f"it weighs 1{'0' * 30} examples, but said it trains on 12"),
    "stranger": (10, lambda u: spoiled(u, client=7),
                 "exchange 1 (train.0.0) asked it for no update; its answer was ignored"),
    "text": (10, lambda u: spoiled(u, client="1"), "it is of client '1'; a client is a whole number"),
}  # fmt: skip


@pytest.mark.fault(row=6)
@pytest.mark.fault(row=7)
@pytest.mark.fault(row=9)
@pytest.mark.fault(row=10)
@pytest.mark.parametrize("name", REFUSED)
def test_an_answer_of_another_form_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    _, change, text = REFUSED[name]
    federation = Federation("fedavg", tmp_path, quorum=0.5)
    update = answers(federation)[1]
    before = federation.state
    with pytest.raises(WireError) as refusal:
        federation.server.take(change(update))
    assert str(refusal.value).endswith(f"exchange 1, {text}" if text.startswith("entry") else f"exchange 1: {text}")
    assert federation.state == before
    assert federation.server.missing == [0, 1, 2]
    assert federation.server.take(update), "it may still send what is right"


@pytest.mark.fault(row=7)
def test_the_row_says_why_an_answer_was_not_taken(tmp_path: Path) -> None:
    federation = Federation("fedavg", tmp_path, quorum=0.5)
    good = answers(federation)
    with pytest.raises(WireError):
        federation.server.take(spoiled(good[1], num_examples=5))
    for client in (0, 2):
        federation.server.take(good[client])
    federation.server.close()
    assert federation.server.row["refused"] == {1: "it weighs 5 examples, but said it trains on 12"}


@pytest.mark.fault(row=8)
def test_values_are_judged_when_the_exchange_is_closed(tmp_path: Path) -> None:
    federation = Federation("fedavg", tmp_path, quorum=0.3)
    good = answers(federation)
    counter = next(key for key in good[1].shared if key.endswith("num_batches_tracked"))
    federation.server.take(good[0])
    federation.server.take(replace(good[1], shared={**good[1].shared, counter: torch.tensor(1 << 62)}))
    federation.server.take(with_entry(good[2], lambda value: value + 1e30))
    federation.server.close()
    told = federation.server.row["refused"]
    assert told[1] == (f"'{counter}' counts {1 << 62} more than it started with; its steps explain {2 * 65536} at most")
    assert told[2].startswith("'fc.weight' moved ")
    assert digest(federation.server.tree) == digest(alone(tmp_path, good[0]).tree)


def alone(folder: Path, update: Update) -> Any:
    """The server after an exchange in which only one client answered."""
    (folder / "alone").mkdir()
    server = Federation("fedavg", folder / "alone", quorum=0.3).server
    server.take(replace(update, address=server.requests()[0].address))
    server.close()
    return server


@pytest.mark.fault(row=10)
def test_an_answer_counts_once_and_only_in_its_round(tmp_path: Path) -> None:
    federation = Federation("fedavg", tmp_path)
    server, good = federation.server, answers(federation)
    assert [server.take(update) for update in (good[0], good[0], good[1], good[2])] == [True, False, True, True]
    server.close()
    before = digest(server.tree)
    with pytest.raises(WireError) as refusal:
        server.take(good[0])
    assert str(refusal.value) == f"client 0, exchange 1: {LATE.format(1, 2)}"
    assert (digest(server.tree), server.missing) == (before, [0, 1, 2])


@pytest.mark.fault(row=4)
def test_an_answer_to_an_attempt_that_was_given_up_is_late(tmp_path: Path) -> None:
    """Who waits how long is up to the transport: neither half has a clock."""
    federation = Federation("fedavg", tmp_path)
    good = answers(federation)
    federation.server.retry()
    with pytest.raises(WireError) as refusal:
        federation.server.take(good[0])
    assert str(refusal.value) == f"client 0, exchange 1: {LATE.format(2, 1)}"


@pytest.mark.fault(row=3)
def test_a_client_that_dies_after_the_merge_goes_on_from_the_round_that_counts(tmp_path: Path) -> None:
    """It is killed before it hears that its answer came; what it kept is what the server builds on."""
    sent = []

    def point(name: str) -> None:
        sent.append(name)
        if name == "client sent" and sent.count(name) % 3 == 0:
            raise Killed

    plan = made("fedbn", rounds=3)
    played = over_a_wire.play(plan, tiny.residual_net(), tmp_path, point)
    assert sent.count("client sent") > 6
    assert played.fingerprint == fingerprint_of(tiny.play(plan))


@pytest.mark.fault(row=5)
def test_too_few_answers_begin_the_exchange_again_and_then_end_the_run(tmp_path: Path) -> None:
    federation = Federation("fedavg", tmp_path, quorum=0.9, retries=1)
    desk, server = federation.desk.started(), federation.server
    before = digest(server.tree)
    server.take(answers(federation)[0])
    desk.close()
    assert (server.row["retried"], server.missing, desk.failure) == (1, [0, 1, 2], None)
    server.take(answers(federation)[0])
    with pytest.raises(QuorumError, match="1 of 3 updates usable in round 1, client 1: it did not answer"):
        desk.close()
    assert desk.over
    assert digest(server.tree) == before


@pytest.mark.fault(row=5)
def test_a_test_that_few_answer_is_below_the_quorum_too(tmp_path: Path) -> None:
    federation = Federation("fedavg", tmp_path, quorum=0.9, score_every=1)
    server = federation.server
    worked = [site.work(request_of(federation, client), Mine()) for client, site in enumerate(federation.sites)]
    for update, _ in worked:
        server.take(update)
    server.close()
    exchange = server.open()
    assert exchange is not None
    assert exchange.purpose is Purpose.SCORE
    answer, _ = federation.sites[0].answer(request_of(federation), worked[0][1])
    assert isinstance(answer, Scores)
    server.take(answer)
    with pytest.raises(QuorumError, match="1 of 3 updates usable in round 1, client 1: it did not answer"):
        server.close()
