"""Runs over NVFlare's Collab API have the bits of the sequential engine, and survive what sites do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from collab_several import SILENCE, WAIT, Case, in_engine, left, rows, setup_of, start, told

from fednorm.core.state import Policy
from fednorm.halves.wire_files import load_mine
from fednorm.nvflare.keeping import site_file
from fednorm.running.plan import make_plan

pytestmark = pytest.mark.nvflare

METHODS = {
    "fedavg": "fedavg",
    "fedbn": "fedbn",
    "silobn": "silobn",
    "window": "fixbn(at=window,window=2,tau=100.0)",
    "switch": "fedbs(eps=100.0,rounds=2)",
    "posthoc": "posthoc",
    "sbn": "sbn",
    "decoupled": "fedadam+decoupled",
    "hbn": "hbn",
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs of this module, after they were played."""
    folder = tmp_path_factory.mktemp("collab")
    runs = {name: Case(setup_of(folder, method, run_id=name)) for name, method in METHODS.items()}
    faulty = {"quorum": 0.6, "run_id": ""}

    def case(name: str, *faults: str, **settings: Any) -> None:
        runs[name] = Case(setup_of(folder, "fedbn", **{**faulty, "run_id": name, "rounds": 3, **settings}), faults)

    case("raises", "site-2 raises in 2")
    case("chats", "site-2 chats in 2")
    case("leaks", "site-2 leaks in 2")
    case("diverges", "site-1 diverges in 2")
    case("spies", "site-1 spies on site-2")
    case("waits", "site-3 waits in 2", wait=10.0)
    case("strict", "site-2 raises in 2", quorum=None)
    case("first_half", run_id="halves", rounds=2, quorum=None)
    case("second_half", run_id="halves", rounds=4, quorum=None)
    case("dies", "site-3 dies in 2")  # the last: its process is gone
    start(folder, runs)
    return folder


SENT = ("stage", "exchanges", "bytes_up", "bytes_down")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_bits_of_the_sequential_engine(name: str, played: Path) -> None:
    digests, expected = in_engine(setup_of(played, METHODS[name], run_id="x"))
    assert left(played, name) == digests
    sent = [[row[fact] for fact in SENT] for row in rows(played, name)]
    assert sent == [[row[fact] for fact in SENT] for row in expected]


@pytest.mark.parametrize("name", ["window", "switch"])
def test_stages_change_over_collab(name: str, played: Path) -> None:
    assert {row["stage"] for row in rows(played, name)} == {0, 1}


@pytest.mark.parametrize("name", ["fedbn", "silobn"])
def test_no_local_entry_crosses_the_wire(name: str, played: Path) -> None:
    plan = make_plan(setup_of(played, name, run_id="x").config)
    schema = plan.phases[0].schema
    local = [key for key, (_, policy) in schema.items() if policy is Policy.LOCAL]
    shared = [key for key, (_, policy) in schema.items() if policy is Policy.SHARED]
    assert local
    for number in (1, 2, 3):
        sent = (played / name / f"site-{number}.messages").read_bytes()
        assert [key for key in local if key.encode() in sent] == []
        assert [key for key in shared if key.encode() not in sent] == []
        own = load_mine(site_file(played / "state", name, f"site-{number}"))
        kept = [state.tree[key] for state in (own.accepted, own.pending) if state for key in local]
        values = [value.numpy().tobytes() for value in kept if value.numel() > 1]
        assert values
        assert not any(value in sent for value in values)


LEFT_OUT = {
    "raises": ("site-2", "ValueError: the graphics card melted"),
    "chats": ("site-2", "it sent a hello where an answer was expected"),
    "leaks": ("site-2", "client 1, exchange 2, entry 'layers.1.running_mean': was not expected"),
    "waits": ("site-3", "it had no answer after 10 s"),
    "dies": ("site-3", f"it gave no sign of life for {WAIT + SILENCE:g} s"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_run_with_a_quorum_goes_on_without_a_site_that_fails(name: str, played: Path) -> None:
    site, why = LEFT_OUT[name]
    second = rows(played, name)[1]
    assert second["refused"] == {str(int(site[-1]) - 1): why}
    assert f"site '{site}', round 2: {why}" in told(played, name)
    assert len(rows(played, name)) == 3


def test_what_a_site_keeps_back_never_left_it(played: Path) -> None:
    """The server was told the name of the entry, and was not sent the entry."""
    sent = (played / "leaks" / "site-2.messages").read_bytes()
    assert b"shared/layers.0.weight" in sent
    assert b"shared/layers.1.running_mean" not in sent


def test_a_site_that_is_gone_stays_out(played: Path) -> None:
    gone = "it cannot be reached; its process has ended, or the network"
    assert rows(played, "dies")[2]["refused"] == {"2": gone}
    assert f"site 'site-3', round 3: {gone}" in told(played, "dies")


def test_a_site_answers_no_other_site(played: Path) -> None:
    assert (played / "spies" / "spied").read_text() == (
        "call to site-2.spies.work failed: WireError: 'site-1' called this site; it answers the server alone"
    )
    assert not any(row.get("refused") for row in rows(played, "spies"))


def test_values_that_cannot_be_used_are_refused_by_the_server(played: Path) -> None:
    assert rows(played, "diverges")[1]["refused"] == {"0": "'layers.0.weight' is not finite"}


def test_a_site_that_failed_is_asked_again_in_the_next_round(played: Path) -> None:
    assert [row.get("refused", {}) for row in rows(played, "raises")][2] == {}


def test_without_a_quorum_a_site_that_fails_ends_the_run(played: Path) -> None:
    assert told(played, "strict")[-1] == (
        "the end: QuorumError: round 2, client 1 ('site-2'): ValueError: the graphics card melted; "
        "ask it again, or give a quorum to go on without it"
    )


def test_a_run_goes_on_where_it_was_left(played: Path) -> None:
    first, second = told(played, "first_half"), told(played, "second_half")
    assert first[0].startswith("run 'halves' starts clean; ")
    assert second[0].startswith("run 'halves' goes on after round 2 of 4")
    assert left(played, "second_half", "halves") == in_engine(setup_of(played, "fedbn", run_id="x"))[0]
