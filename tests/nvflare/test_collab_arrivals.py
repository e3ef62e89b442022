"""Asynchronous runs over Collab: the bits of the clock engine where the order is given, and its rules where not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from collab_several import SITES, Case, in_engine, left, rows, setup_of, start, told

from fednorm.core.state import Policy
from fednorm.halves.wire_files import load
from fednorm.nvflare.keeping import server_file
from fednorm.running.plan import make_plan

pytestmark = pytest.mark.nvflare

REVIVE = (
    "fedrevive(lr=0.5,s_max=2,freeze=1,warmup=1,teachers=2,batch=4,steps=1,latent=8,width=8,pool=64,crop=0,flip=false,"
    "kd_batch=4,kd_steps=1,kd_lr=0.1,probes=4)"
)
ONE_BY_ONE = {
    "buffered": "fedbuff(b=2)+fedbn",
    "each": "fedasync+silobn",
    "switch": "fedbuff(b=1)+fixbn(at=2)",
    "ended": "fedbuff(b=2)+posthoc",
    "revived": f"{REVIVE}+fedavg",
}
VERSIONS = 5


def one_by_one(folder: Path, name: str, **settings: Any) -> Any:
    return setup_of(folder, ONE_BY_ONE[name], **{"rounds": VERSIONS, "run_id": name, "concurrency": 1, **settings})


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs of this module, after they were played."""
    folder = tmp_path_factory.mktemp("arrivals")
    runs = {name: Case(one_by_one(folder, name)) for name in ONE_BY_ONE}

    def case(name: str, method: str, *faults: str, **settings: Any) -> None:
        runs[name] = Case(setup_of(folder, method, **{"run_id": name, "rounds": VERSIONS, **settings}), faults)

    case("barrier", "sync+fedbn", concurrency=3)
    case("many", "fedbuff(b=2)+fedbn", rounds=10)
    case("revive", f"{REVIVE}+fedavg", rounds=12)
    case("two", "fedbuff(b=2)+fedbn", rounds=6, concurrency=2)
    case("first_half", ONE_BY_ONE["buffered"], run_id="halves", rounds=2, concurrency=1)
    case("second_half", ONE_BY_ONE["buffered"], run_id="halves", concurrency=1)
    others = ("site-1 waits in 1", "site-3 waits in 1")  # else the run may be over before site-2 has failed
    case("again", "fedbuff(b=2)+fedbn", "site-2 raises in 1", *others, quorum=0.6, retries=1)
    case("without", "fedbuff(b=2)+fedbn", "site-2 diverges in 1", *others, quorum=0.6)
    case("strict", "fedbuff(b=2)+fedbn", "site-2 raises in 1", *others)
    case("dies", "fedbuff(b=2)+fedbn", "site-3 dies in 1", quorum=0.6)  # the last: its process is gone
    start(folder, runs)
    return folder


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_one_site_at_a_time_has_the_bits_of_the_clock_engine(name: str, played: Path) -> None:
    digests, expected = in_engine(one_by_one(played, name))
    assert left(played, name) == digests
    facts = ("round", "stage", "clients", "cohort", "staleness", "exchanges", "bytes_up", "bytes_down", "train_loss")
    assert [{fact: row[fact] for fact in facts} for row in rows(played, name)] == [
        {fact: row[fact] for fact in facts} for row in expected
    ]


def test_under_a_barrier_the_order_of_arrival_has_no_effect(played: Path) -> None:
    setup = setup_of(played, "sync+fedbn", run_id="barrier", rounds=VERSIONS, concurrency=3)
    assert left(played, "barrier") == in_engine(setup)[0]


def jobs(folder: Path, name: str) -> dict[int, list[tuple[int, int]]]:
    """Number and base version of the training jobs that each site was sent, in order."""
    found = {}
    for client in range(SITES):
        lines = (folder / name / f"site-{client + 1}.jobs").read_text().splitlines()
        sent = [json.loads(line) for line in lines]
        found[client] = [(number, base) for phase, number, base in sent if phase.startswith("train")]
    return found


@pytest.mark.parametrize(("name", "versions", "concurrency"), [("many", 10, 3), ("two", 6, 2)])
def test_with_several_sites_at_a_time_every_staleness_is_right(
    name: str, versions: int, concurrency: int, played: Path
) -> None:
    sent = jobs(played, name)
    numbers = sorted(number for each in sent.values() for number, _ in each)
    assert numbers == list(range(1, len(numbers) + 1))  # no job twice, none left out
    found = rows(played, name)
    assert [row["round"] for row in found] == list(range(1, versions + 1))
    bases = {client: [base for _, base in each] for client, each in sent.items()}
    for row in found:
        assert row["clients"] == len(row["cohort"]) == 2
        for client, staleness in zip(row["cohort"], row["staleness"], strict=True):
            assert staleness == row["round"] - 1 - bases[client].pop(0)
    left_over = sum(len(each) for each in bases.values())
    assert left_over <= concurrency - 1  # those under way when the last version was made
    assert len(numbers) == 2 * versions + left_over
    assert max(age for row in found for age in row["staleness"]) >= 1


def test_fedrevive_revives_what_comes_late(played: Path) -> None:
    """The server computes updates of its own; sites beside it are never asked for more than they share or report."""
    found = rows(played, "revive")
    assert [row["round"] for row in found] == list(range(1, 13))
    assert max(age for row in found for age in row["staleness"]) >= 1
    assert "accuracy" in found[-1]["eval"]["own_client"]
    assert load(server_file(played / "state", "revive"))[1]["remembered"]


@pytest.mark.parametrize("name", ["many", "buffered"])
def test_no_local_entry_crosses_the_wire(name: str, played: Path) -> None:
    schema = make_plan(setup_of(played, "fedbn", run_id="x").config).phases[0].schema
    local = [key for key, (_, policy) in schema.items() if policy is Policy.LOCAL]
    shared = [key for key, (_, policy) in schema.items() if policy is Policy.SHARED]
    for site in range(1, SITES + 1):
        sent = (played / name / f"site-{site}.messages").read_bytes()
        assert [key for key in local if key.encode() in sent] == []
        assert [key for key in shared if key.encode() not in sent] == []


def test_a_run_goes_on_where_it_was_left(played: Path) -> None:
    assert told(played, "second_half")[0] == (
        "run 'halves' goes on after version 2 of 5, which had 2: what follows from the number follows the new one"
    )
    assert left(played, "second_half", "halves") == in_engine(one_by_one(played, "buffered"))[0]


def test_a_site_that_failed_is_asked_again(played: Path) -> None:
    failed = [line for line in told(played, "again") if "melted" in line]
    assert len(failed) == 1
    assert re.fullmatch(r"site 'site-2', version \d: ValueError: the graphics card melted", failed[0])
    assert len(jobs(played, "again")[1]) > 1
    assert len(rows(played, "again")) == VERSIONS


def test_a_site_whose_update_cannot_be_used_is_left_out(played: Path) -> None:
    refused = [row["refused"] for row in rows(played, "without") if "refused" in row]
    assert refused == [{"1": "'layers.0.weight' is not finite"}]
    assert len(jobs(played, "without")[1]) == 1
    assert len(rows(played, "without")) == VERSIONS


def test_without_a_quorum_a_site_that_fails_ends_the_run(played: Path) -> None:
    assert re.fullmatch(
        r"the end: QuorumError: site 'site-2', version \d: ValueError: the graphics card melted; "
        r"ask it again \(engine.retries\), or give a quorum to go on without it",
        told(played, "strict")[-1],
    )


def test_a_site_that_is_gone_does_not_hold_up_the_others(played: Path) -> None:
    gone = "it cannot be reached; its process has ended, or the network"
    assert f"site 'site-3', version {VERSIONS}: {gone}" in told(played, "dies")
    assert {client for row in rows(played, "dies") for client in row["cohort"]} == {0, 1}
    assert len(rows(played, "dies")) == VERSIONS
