"""What the server refuses of sites, and sites of the server: each in one line that names site, round and entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from course_by_hand import Change, Federation, setup_of

from fednorm.errors import DivergedError, QuorumError, StateError, WireError
from fednorm.halves.messages import PROTOCOL, Message, Refusal, Update
from fednorm.nvflare import parts
from fednorm.nvflare.keeping import site_file
from fednorm.nvflare.member import Member

pytestmark = pytest.mark.nvflare


def of(site: str, change: Callable[[Any], Message], kind: type = Update) -> Change:
    """A change of one site's messages of a kind."""
    return lambda who, message: change(message) if who == site and isinstance(message, kind) else message


def spoilt(update: Update, value: float) -> Update:
    return replace(update, shared={**update.shared, "features.0.bias": torch.full((16,), value)})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            of("site-2", lambda hello: replace(hello, schema="0" * 64), object),
            "site 'site-2', before the first round: client 'site-2' has schema '00000000', this side ",
        ),
        (
            of("site-2", lambda hello: replace(hello, protocol=PROTOCOL - 1), object),
            f"site 'site-2', before the first round: client 'site-2' speaks protocol {PROTOCOL - 1}, this side "
            f"{PROTOCOL}; install the same fednorm on both",
        ),
        (
            of("site-2", lambda hello: replace(hello, num_examples=0), object),
            "site 'site-2', before the first round: client 'site-2' has 0 examples; it needs one at least",
        ),
        (
            of("site-2", lambda hello: replace(hello, name="site-1"), object),
            "site 'site-2', before the first round: it calls itself 'site-1'; a site speaks for itself only",
        ),
        (
            of("site-2", lambda hello: Refusal("'mine.csv' does not exist"), object),
            "site 'site-2', before the first round: 'mine.csv' does not exist",
        ),
    ],
    ids=["model", "version", "no data", "name", "refusal"],
)
def test_a_site_that_cannot_take_part_is_refused_by_name(change: Change, error: str, tmp_path: Path) -> None:
    with pytest.raises(WireError) as caught:
        Federation(tmp_path, setup_of(), change=change).begin()
    assert str(caught.value).startswith(error)


def test_a_site_with_another_method_refuses_the_terms(tmp_path: Path) -> None:
    federation = Federation(tmp_path, setup_of(method="fedbn"))
    federation.begin()
    welcome, request = federation.course.asked()["site-1"]
    other = replace(welcome, terms=replace(welcome.terms, method="silobn"))
    with pytest.raises(
        WireError, match=r"the server has schema '.{8}', this side '.{8}'; give both the same model, met"
    ):
        federation.members["site-1"].answer(other, request)


def test_a_site_with_other_initial_values_refuses_the_terms(tmp_path: Path) -> None:
    federation = Federation(tmp_path, setup_of())
    federation.begin()
    welcome, request = federation.course.asked()["site-1"]
    member = Member(setup_of(seed=7), "site-1", tmp_path / "other")
    with pytest.raises(WireError, match="starts from other values than this site's"):
        member.answer(welcome, request)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda update: spoilt(update, float("nan")), None),
        (
            lambda update: replace(update, shared={key: update.shared[key] for key in list(update.shared)[1:]}),
            "site 'site-2', round 1: client 1, exchange 1, entry 'features.0.weight': is missing",
        ),
        (
            lambda update: replace(update, shared={**update.shared, "features.0.bias": torch.zeros(3)}),
            "site 'site-2', round 1: client 1, exchange 1, entry 'features.0.bias': has shape (3,), expected (16,)",
        ),
        (
            lambda update: replace(update, report=replace(update.report, client=0)),
            "site 'site-2', round 1: it answers for client 0, and is client 1",
        ),
        (lambda update: Refusal("no space left"), "site 'site-2', round 1: no space left"),
    ],
    ids=["nan", "truncated", "shape", "somebody else's", "refusal"],
)
def test_an_answer_that_cannot_be_used_ends_the_run_or_is_left_out(
    change: Callable[[Any], Message], error: str | None, tmp_path: Path
) -> None:
    federation = Federation(tmp_path / "1", setup_of(rounds=1), change=of("site-2", change))
    federation.begin()
    where = "round 1, client 1 ('site-2'): "
    with pytest.raises(DivergedError if error is None else QuorumError) as caught:
        federation.exchange()
    assert str(caught.value).startswith(f"diverged in {where}" if error is None else where)
    assert federation.refused == ([] if error is None else [error])

    tolerant = Federation(tmp_path / "2", setup_of(rounds=1, engine_quorum=0.5), change=of("site-2", change))
    tolerant.begin()
    tolerant.exchange()
    tolerant.exchange()
    (row,) = tolerant.course.ledger.rows
    assert list(row["refused"]) == [1]
    told = [line for line in tolerant.said if line.startswith("round 1 of 1")]
    assert len(told) == 1
    assert "without site-2: " in told[0]
    if error is None:
        assert row["refused"][1] == "'features.0.bias' is not finite"


@pytest.mark.parametrize("what", ["tensor", "header", "lost", "code"])
def test_a_message_that_was_altered_on_the_way_is_refused(what: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, setup_of())
    federation.begin()
    welcome, request = federation.course.asked()["site-2"]
    shareable = parts.to_shareable(federation.members["site-2"].answer(welcome, request))
    dxo = shareable["DXO"]
    if what == "tensor":
        dxo["data"]["shared/features.0.bias"][0] += 1
    elif what == "header":
        dxo["meta"]["fednorm"]["fields"]["report"]["num_examples"] += 1
    elif what == "lost":
        del dxo["data"]["shared/features.0.bias"]
    else:
        shareable.set_return_code("EXECUTION_EXCEPTION")
    expected = {
        "tensor": "client 1, exchange 1, entry 'features.0.bias': was altered on the way (its digest differs)",
        "header": "client 1, exchange 1: its header was altered on the way (its digest differs)",
        "lost": "client 1, exchange 1, entry 'features.0.bias': is missing",
        "code": "it ended with EXECUTION_EXCEPTION; the log of that site says why",
    }
    with pytest.raises(WireError) as caught:
        parts.message_in(shareable)
    assert str(caught.value) == expected[what]


def test_a_late_answer_is_refused_and_the_open_one_may_still_come(tmp_path: Path) -> None:
    federation = Federation(tmp_path, setup_of())
    course = federation.begin()
    welcome, request = course.asked()["site-1"]
    late = federation.members["site-1"].answer(welcome, request)
    federation.exchange()
    with pytest.raises(
        WireError, match="site 'site-1', round 2: client 0, exchange 1: it answers attempt 1 of exchange"
    ):
        course.take("site-1", late)
    assert course.missing == ["site-1", "site-2"]


def test_a_site_whose_state_is_gone_says_so(tmp_path: Path) -> None:
    setup = setup_of(method="fedbn")
    federation = Federation(tmp_path, setup)
    federation.begin()
    federation.exchange()
    site_file(tmp_path / "site-1" / "fednorm_state", "trial", "site-1").unlink()
    federation.members["site-1"] = Member(setup, "site-1", tmp_path / "site-1")
    welcome, request = federation.course.asked()["site-1"]
    with pytest.raises(StateError, match="the server goes on from this client's exchange 1, but its state is that of"):
        federation.members["site-1"].answer(welcome, request)
