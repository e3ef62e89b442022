"""The course of a run at the server, and a site's part in it, without anything that carries their messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated import tiny

from fednorm.core.state import digest
from fednorm.errors import CheckpointError, DivergedError, FednormError, QuorumError, StateError, WireError
from fednorm.halves.messages import PROTOCOL, Message, Refusal, Update
from fednorm.halves.wire_files import load_mine
from fednorm.nvflare import parts
from fednorm.nvflare.course import Course
from fednorm.nvflare.keeping import run_name, server_file, site_file
from fednorm.nvflare.member import Member
from fednorm.nvflare.recipe import Recipe
from fednorm.nvflare.setup import Setup
from fednorm.running.config import updated
from fednorm.running.given import Objects
from fednorm.running.run import Run
from fednorm.running.store import Store

pytestmark = pytest.mark.nvflare

SITES = ("site-1", "site-2")
Change = Callable[[str, Message], Message]


def setup_of(**fields: Any) -> Setup:
    return Recipe(config=tiny(**fields)).setup


def unchanged(site: str, message: Message) -> Message:
    return message


class Federation:
    """A course and its sites in one process, each with its own folder; messages go as DXOs."""

    def __init__(self, folder: Path, setup: Setup, run: str = "trial", change: Change = unchanged) -> None:
        self.folder, self.setup, self.run, self.change = folder, setup, run, change
        self.said: list[str] = []
        self.refused: list[str] = []
        self.members = {site: Member(setup, site, folder / site, say=self.said.append) for site in SITES}
        self.course = self.new_course()

    def new_course(self) -> Course:
        state = server_file(self.folder / "server", self.run)
        return Course(self.setup, state, self.folder / "records", self.run, self.said.append)

    def begin(self) -> Course:
        for site, member in self.members.items():
            self.course.greet(site, self.change(site, member.hello()))
        self.course.begin()
        return self.course

    def exchange(self, *sites: str) -> None:
        """One exchange with these sites, in this order."""
        asked = self.course.asked()
        for site in sites or SITES:
            if site in asked:
                welcome, request = asked[site]
                try:
                    self.course.take(site, self.change(site, self.members[site].answer(welcome, request)))
                except WireError as error:
                    self.refused.append(str(error))
        self.course.close()

    def play(self, *sites: str) -> Federation:
        self.begin()
        while not self.course.over:
            self.exchange(*sites)
        self.course.end()
        return self


def of(site: str, change: Callable[[Any], Message], kind: type = Update) -> Change:
    """A change of one site's messages of a kind."""
    return lambda who, message: change(message) if who == site and isinstance(message, kind) else message


def spoilt(update: Update, value: float) -> Update:
    return replace(update, shared={**update.shared, "features.0.bias": torch.full((16,), value)})


def test_the_order_of_arrival_changes_nothing(tmp_path: Path) -> None:
    setup = setup_of(method="fedbn")
    one = Federation(tmp_path / "1", setup).play(*SITES)
    other = Federation(tmp_path / "2", setup).play(*reversed(SITES))
    assert digest(one.course.server.tree) == digest(other.course.server.tree)
    for site in SITES:
        first, second = (site_file(tmp_path / each / site / "fednorm_state", "trial", site) for each in "12")
        assert first.read_bytes() == second.read_bytes()


def test_every_site_tells_one_line_a_round(tmp_path: Path) -> None:
    said = Federation(tmp_path, setup_of(method="fedbn", rounds=2)).play().said
    line = "16 entries, 6 shared, 10 local; 115752 bytes up, 115752 bytes down"
    assert [each for each in said if "entries" in each] == [f"round {number}: {line}" for number in (1, 1, 2, 2)]
    assert said[0] == f"run 'trial' starts clean; its state is kept in '{tmp_path / 'server' / 'trial'}'"


def test_phases_of_one_round_are_told_together(tmp_path: Path) -> None:
    said = Federation(tmp_path, setup_of(method="decoupled", rounds=1)).play().said
    assert [each.partition(":")[0] for each in said if "entries" in each] == ["round 1", "round 1"]


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


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "decoupled"},
        {"method": "hbn"},
        {"method": "sbn", "eval_every": 2},
        {"method": "posthoc"},
        {"method": "fedadam+fixbn"},
        {"method": "fedbn", "clients_per_round": 1, "rounds": 4},
        {"method": "fedavg", "data_val_fraction": 0.2, "train_weights": "uniform", "train_augment": "flip"},
    ],
    ids=lambda fields: fields["method"],
)
def test_methods_of_several_phases_have_the_bits_of_the_sequential_engine(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny(**fields)
    federation = Federation(tmp_path, Recipe(config=config).setup).play()
    run = Run(Objects().plan(updated(config, {"engine.name": "sequential"})), Store())
    rows = list(run.rounds())
    assert digest(federation.course.server.tree) == digest(run.server.tree)
    for name in ("stage", "exchanges", "bytes_up", "bytes_down", "train_loss"):
        assert [row[name] for row in federation.course.ledger.rows] == [row[name] for row in rows], name
    for client, site in enumerate(SITES):
        kept = load_mine(site_file(tmp_path / site / "fednorm_state", "trial", site))
        number = federation.course.server.state()[0]["accepted"].get(str(client), 0)
        assert digest(kept.as_of(number).accepted.tree) == digest(run.store.get(client).tree)


@pytest.mark.parametrize("after", range(4))
def test_a_server_that_is_started_again_goes_on(after: int, tmp_path: Path) -> None:
    setup = setup_of(method="fedbn", engine_quorum=None)
    whole = Federation(tmp_path / "whole", setup).play()
    federation = Federation(tmp_path / "cut", setup)
    federation.begin()
    for _ in range(after):
        federation.exchange()
    asked = federation.course.asked()
    welcome, request = asked["site-1"]
    federation.course.take("site-1", federation.members["site-1"].answer(welcome, request))  # lost with the server
    federation.members = {site: Member(setup, site, tmp_path / "cut" / site) for site in SITES}
    federation.course = federation.new_course()
    federation.play()
    assert federation.said[-1].startswith(f"round {3 if after < 4 else 0} of 3")
    assert digest(federation.course.server.tree) == digest(whole.course.server.tree)
    rows, wanted = ([{**row, "seconds": 0} for row in each.course.ledger.rows] for each in (federation, whole))
    assert rows == wanted
    for site in SITES:
        one, other = (site_file(tmp_path / each / site / "fednorm_state", "trial", site) for each in ("whole", "cut"))
        assert one.read_bytes() == other.read_bytes()


def test_a_run_is_continued_by_its_name_alone(tmp_path: Path) -> None:
    Federation(tmp_path, setup_of(rounds=2), run="mine").play()
    longer = Federation(tmp_path, setup_of(rounds=4), run="mine").play()
    note = "run 'mine' goes on after round 2 of 4, which had 2: what follows from the number follows the new one"
    assert longer.said[0] == note
    assert [row["round"] for row in longer.course.ledger.rows] == [1, 2, 3, 4]
    other = Federation(tmp_path, setup_of(rounds=1), run="other").play()
    assert other.said[0].startswith("run 'other' starts clean")
    with pytest.raises(CheckpointError, match="run 'mine' has 4 rounds already; give more than that"):
        Federation(tmp_path, setup_of(rounds=3), run="mine").play()
    with pytest.raises(CheckpointError, match="is of run 'mine' with another method, model, sites or settings"):
        Federation(tmp_path, setup_of(rounds=4, train_lr=0.5), run="mine").play()


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


def test_jobs_without_a_name_of_their_own_never_meet() -> None:
    assert run_name("mine", "simulate_job") == "mine"
    assert run_name(None, "0a1b-real-id") == "0a1b-real-id"
    assert run_name(None, "simulate_job") != run_name(None, "simulate_job")


@pytest.mark.parametrize("name", ["../up", "", "a/b", ".hidden", "x" * 101])
def test_a_run_id_that_is_no_folder_is_refused(name: str) -> None:
    with pytest.raises(FednormError, match="cannot name a folder; give letters, digits"):
        Recipe(config=tiny(), run_id=name)
