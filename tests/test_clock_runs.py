"""Runs on a clock: rows over versions and virtual time, kills at any event, rounds and arrivals side by side."""

from __future__ import annotations

import json
import random
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fednorm
import tiny
from command import TINY
from command import fednorm as command
from fednorm.core.state import digest
from fednorm.engines.clock.schedule import SCHEDULES
from fednorm.engines.stack.stacked import StackTrainer
from fednorm.errors import ConfigError, DivergedError, QuorumError, UserCodeError
from fednorm.running.clock_run import ClockRun
from fednorm.running.plan import Plan
from fednorm.running.records import RoundRow, RunId
from fednorm.running.store import Store
from test_cli_signals import running, wait_for_rounds

FIVE = tiny.federation((8, 12, 9, 10, 11))


def plan(method: str, **changes: Any) -> Plan:
    """Five tiny clients, three of which have a job at a time."""
    return tiny.plan(method, model=tiny.conv_net(), data=FIVE, **{"clock__concurrency": 3, "rounds": 6} | changes)


def played(made: Plan, store: Store | None = None) -> ClockRun:
    run = ClockRun(made, store or Store())
    for _ in run.rounds():
        pass
    return run


def fingerprint(run: ClockRun) -> dict[str, Any]:
    """Everything that two equal runs share."""
    clients = {client: run.store.get(client) for client in run.store.seen()}
    return {
        "server": digest(run.server.tree),
        "time": run.simulation.time,
        "clients": {client: (state.steps, digest(state.tree)) for client, state in clients.items()},
        "rows": [{key: value for key, value in row.items() if key != "seconds"} for row in run.store.rows()],
    }


def test_rows_have_versions_and_time() -> None:
    rows = list(played(plan("fedbuff(b=2)+fedbn")).store.rows())
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6]
    times = [row.get("time", 0.0) for row in rows]
    assert all(earlier < later for earlier, later in pairwise([0.0, *times]))
    assert all(row["clients"] == 2 == len(row.get("staleness", [])) == len(row.get("cohort", [])) for row in rows)
    assert rows[0].get("staleness") == [0, 0]
    assert max(age for row in rows for age in row.get("staleness", [])) > 0
    assert [row["round"] for row in rows if "eval" in row] == [2, 4, 6]
    assert all(row["bytes_up"] > 0 and row["bytes_down"] > 0 for row in rows)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "silobn+local-momentum", "fixbn(at=0.5)"])
def test_rounds_on_the_clock_are_rounds(method: str) -> None:
    on_clock = played(plan(f"sync+{method}", clock__concurrency=5))
    in_rounds = tiny.play(plan(method, clock__concurrency=None))
    assert digest(on_clock.server.tree) == digest(in_rounds.server.tree)
    for timed, row in zip(on_clock.store.rows(), in_rounds.store.rows(), strict=True):
        same = ("round", "stage", "clients", "exchanges", "bytes_up", "bytes_down", "lr", "train_loss", "eval")
        assert {key: timed.get(key) for key in same} == {key: row.get(key) for key in same}


def test_what_is_asked_of_all_takes_no_time_and_is_charged() -> None:
    plain, more = (list(played(plan(f"fedbuff(b=2)+{name}")).store.rows()) for name in ("fedavg", "posthoc"))
    assert [row.get("time") for row in plain] == [row.get("time") for row in more]
    assert [a["bytes_up"] for a in plain[:-1]] == [b["bytes_up"] for b in more[:-1]]
    assert more[-1]["bytes_up"] > plain[-1]["bytes_up"]
    assert more[-1]["exchanges"] == plain[-1]["exchanges"] + 1


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        ("fedbuff(b=2)+fedbn+local-momentum", "sequential"),
        ("sync+fedavg", "sequential"),
        ("fedasync+fixbn(at=0.5)", "stacked"),
    ],
)
def test_a_kill_at_any_event_changes_no_bit(method: str, engine: str, tmp_path: Path) -> None:
    """Twenty-one kills in all: some events after a commit, which may be in the middle of a version."""
    made = plan(method, engine__name=engine)
    whole = fingerprint(played(made))
    draw = random.Random(method)  # noqa: S311
    for number in range(7):
        path = tmp_path / f"{number}.sqlite"
        run, events, after = ClockRun(made, Store(path)), draw.randrange(1, 10), draw.randrange(3)
        for count in range(events + after):
            if not run.over:
                run.step()
            if count + 1 == events:
                run.stop()
        run.store.close()  # what was not committed is gone, as if the process had been killed
        assert fingerprint(played(made, Store(path))) == whole


def test_trees_that_nobody_needs_leave_the_store(tmp_path: Path) -> None:
    run = ClockRun(plan("fedbuff(b=2)", rounds=30), Store(tmp_path / "state.sqlite"))
    most = 0
    while not run.over:
        run.step()
        run.stop()
        most = max(most, len(run.store.tree_names()))
    assert most <= 10


ASYNC = ("--async", "fedbuff(b=2)", "--method", "fedbn", "--clients", "8", "--concurrency", "4", "--times", "shifted")


def test_a_real_kill_and_resume_give_the_same_bits(tmp_path: Path) -> None:
    long = (*TINY, *ASYNC, "--rounds", "60", "--set", "eval.every=60", "--set", "engine.checkpoint_every=1")
    whole = command("run", *long, "--out", tmp_path / "whole", "--json", "--quiet")
    assert whole.code == 0, whole.err
    with running("run", *long, "--out", "run", cwd=tmp_path) as process:
        wait_for_rounds(process, tmp_path / "run", 3)
        process.kill()
        process.communicate()
    assert not (tmp_path / "run" / "result.json").exists()
    done = command("resume", tmp_path / "run", "--json", "--quiet")
    for key in ("digest", "time", "staleness", "curves", "bytes"):
        assert done.json["runs"][0][key] == whole.json["runs"][0][key]


def test_a_strategy_is_given_beside_the_method_or_in_it(tmp_path: Path) -> None:
    long = (*TINY, *ASYNC[4:], "--val-fraction", "0.2", "--quiet")
    beside = command("run", *ASYNC[:4], *long, "--out", tmp_path / "a")
    assert beside.code == 0, beside.err
    inside = command("run", "--method", "fedbn+fedbuff(b=2)", *long, "--out", tmp_path / "b")
    results = [json.loads((tmp_path / name / "result.json").read_text())["runs"][0] for name in "ab"]
    assert results[0]["method"] == results[1]["method"] == "fedbuff(b=2)+fedbn"
    assert results[0]["digest"] == results[1]["digest"]
    assert "after the last version" in beside.out
    assert "best validation in version 3: " in beside.out
    assert "fedbuff(b=2)+fedbn seed 0: staleness 0 " in inside.out


def test_rounds_and_arrivals_are_compared_on_one_clock(tmp_path: Path) -> None:
    methods = ["fedavg", "fedbuff(b=2)+fedavg", "fedasync+gn"]
    result = fednorm.compare(
        methods, model=tiny.conv_net(), federation=FIVE, rounds=4, local_steps=2, batch_size=4, dtype="float64"
    )
    assert result.methods == ["sync+fedavg", "fedbuff(b=2)+fedavg", "fedasync+gn"]
    assert all(len(run["curves"].get("time", [])) == 4 for run in result.runs)
    assert all(line.get("time", {}).get("mean", 0) > 0 for line in result.table())
    assert result.runs[0].get("staleness") == {"0": 20}
    level = result.runs[0]["curves"].get("pooled", [0.0])[0]
    reached = result.time_to(level)
    assert reached is not None
    assert reached.mean == result.runs[0]["curves"].get("time", [])[0]
    assert result.time_to(101.0) is None
    pytest.importorskip("matplotlib")
    assert result.picture(tmp_path / "curves.png").stat().st_size > 0


SMALL: dict[str, Any] = {"federation": FIVE, "local_steps": 2, "batch_size": 4, "dtype": "float64", "concurrency": 3}


def test_a_run_goes_on_to_more_versions(tmp_path: Path) -> None:
    model = tiny.conv_net()
    fednorm.run(method="fedbuff(b=2)+fedbn", model=model, rounds=3, out=tmp_path / "run", **SMALL)
    longer = fednorm.resume(tmp_path / "run", model=model, federation=FIVE, rounds=6)
    whole = fednorm.run(method="fedbuff(b=2)+fedbn", model=model, rounds=6, **SMALL)
    assert longer.runs[0]["digest"] == whole.runs[0]["digest"]
    assert longer.runs[0].get("time") == whole.runs[0].get("time")


def test_without_checkpoints_a_run_leaves_its_end_alone_unless_it_is_stopped(tmp_path: Path) -> None:
    model, asked = tiny.conv_net(), {"method": "fedbuff(b=2)+fedbn", "rounds": 5, **SMALL}
    whole = fednorm.run(model=model, out=tmp_path / "whole", **asked).runs[0]
    bare = fednorm.run(model=model, out=tmp_path / "bare", checkpoint_every=0, **asked).runs[0]
    assert (bare["digest"], bare["curves"], bare.get("time")) == (whole["digest"], whole["curves"], whole.get("time"))
    names = {}
    for run in ("whole", "bare"):
        with closing(Store(tmp_path / run / "state.sqlite")) as store:
            names[run] = set(store.tree_names())
    assert names["bare"] == {"model", "memory"} < names["whole"]
    assert fednorm.resume(tmp_path / "bare", model=model, federation=FIVE).runs[0]["digest"] == whole["digest"]
    with pytest.raises(ConfigError, match=r"ended with engine\.checkpoint_every=0, so nothing is left of its clients"):
        fednorm.resume(tmp_path / "bare", model=model, federation=FIVE, rounds=6)

    def stop(run: RunId, row: RoundRow) -> None:
        if row["round"] == 3:
            raise fednorm.Stop

    fednorm.run(model=model, out=tmp_path / "stopped", checkpoint_every=0, on_row=stop, **asked)
    assert fednorm.resume(tmp_path / "stopped", model=model, federation=FIVE).runs[0]["digest"] == whole["digest"]


def test_methods_that_are_objects_are_on_the_clock_too(tmp_path: Path) -> None:
    own, model = fednorm.parse("fedbn"), tiny.conv_net()
    both = fednorm.compare(
        [own, "fedavg"], model=model, rounds=2, strategy="fedbuff(b=2)", out=tmp_path / "both", **SMALL
    )
    assert both.methods == ["fedbn", "fedbuff(b=2)+fedavg"]
    by_name = fednorm.run(method="fedbuff(b=2)+fedbn", model=model, rounds=2, **SMALL)
    assert both.runs[0]["digest"] == by_name.runs[0]["digest"]
    again = fednorm.resume(tmp_path / "both", method=own, model=model, federation=FIVE)
    assert again.runs[0]["digest"] == by_name.runs[0]["digest"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ("--async", "fedbuff(b=2)", "--concurrency", "50"),
            "clock.concurrency=50 but only 5 clients train; give at most that many",
        ),
        (
            ("--async", "fedbuff(b=30)"),
            "'fedbuff(b=30)' merges 30 updates at a time, and only 5 clients train: "
            "some would count twice in every version; give b=5 or less",
        ),
        (
            ("--async", "fedbuff(b=2)", "--times", "equal(time=1e308)"),
            "schedule 'equal': time=1e+308 is out of range; give a number above 0, up to 1e+12",
        ),
        (
            ("--async", "fedbuff(b=2)", "--times", "nosuch"),
            "schedule 'nosuch' is not known; known: default, equal, exponential, file:PATH, shifted.",
        ),
        (("--method", "fedbuf(b=2)+fedbn"), "strategy 'fedbuf' is not known; did you mean 'fedbuff'?"),
        (
            ("--async", "fedbuff(b=2)", "--times", "equal(time=-1)"),
            "schedule 'equal': time=-1.0 is out of range; give a number above 0, up to 1e+12",
        ),
        (
            ("--concurrency", "3"),
            "clock.concurrency=3 is for runs on a clock, and 'fedavg' names no strategy; "
            "give --async 'fedbuff(b=2)', or leave it out",
        ),
        (("--async", "fedbuf"), "strategy 'fedbuf' is not known; did you mean 'fedbuff'?"),
        (("--async", "fedbuff", "--method", "fedasync"), "'fedbuff' and 'fedasync' are both strategies; keep one"),
        (
            ("--async", "fedbuff(b=2)", "--clients-per-round", "3"),
            "clients_per_round=3 is for rounds, and 'fedbuff(b=2)+fedavg' has none; give clock.concurrency",
        ),
        (
            ("--async", "fedbuff(b=2)", "--set", "world.dropout=0.1"),
            "world.dropout=0.1 is for rounds, and 'fedbuff(b=2)+fedavg' has none; leave it out",
        ),
        (
            ("--async", "fedbuff(b=2)", "--method", "fedtan"),
            "'fedtan' needs all clients of a round in lock-step, and here clients come one by one; "
            "play it in rounds, or take another method here",
        ),
        (
            ("--async", "dd-fedrevive"),
            "FedRevive with images=real distils on examples that the server has, and it has none; "
            "hold some out for it (data.val_fraction), or take fedrevive with images=synthetic",
        ),
        (("--async", "fedbuff(b=2)", "--concurrency", "0"), "clock.concurrency=0 is out of range; give 1 or more"),
    ],
)
def test_what_is_refused(flags: tuple[str, ...], told: str, tmp_path: Path) -> None:
    done = command("run", *TINY, *flags, "--out", tmp_path / "run")
    assert (done.code, done.err) == (2, f"error: {told}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("takes", "told"), [("float('nan')", "a compute of nan"), ("1 / 0", "ZeroDivisionError")])
def test_a_schedule_of_a_user_is_tried_before_anything_is_written(takes: str, told: str, tmp_path: Path) -> None:
    own = "import fednorm\n@fednorm.register_schedule('tried')\ndef tried(seed, client, job):\n    return 0, %s, 0\n"
    (tmp_path / "own.py").write_text(own % takes)
    flags = ("--async", "fedbuff(b=2)", "--times", "tried", "--use", tmp_path / "own.py", "--out", tmp_path / "run")
    try:
        done = command("run", *TINY, *flags)
    finally:
        SCHEDULES._known.pop("tried")  # pyright: ignore[reportPrivateUsage]
    assert done.code == 2
    assert told in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("client,compute\n7,1\n*,1\n", "names client '7', which the run does not have; it has clients 0 to 4"),
        ("client,compute\n*,nan\n", "client *: compute=nan is out of range; give 0 up to 1e+12"),
        ("client,compute\n*,-2\n", "client *: compute=-2 is out of range; give 0 up to 1e+12"),
    ],
)
def test_files_of_times_that_are_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "times.csv").write_text(text)
    done = command("run", *TINY, "--async", "fedbuff(b=2)", "--times", f"file:{tmp_path}/times.csv")
    assert done.code == 2
    assert done.err.startswith(f"error: schedule '{tmp_path}/times.csv'")
    assert done.err.endswith(f"{told}\n")
    assert done.err.count("\n") == 1


def test_a_file_of_times_is_found_again_from_anywhere_and_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("times.csv").write_text("client,compute\n*,2\n")
    flags = ("--async", "fedbuff(b=2)", "--times", "file:times.csv", "--quiet")
    assert command("run", *TINY, *flags, "--out", "run").code == 0
    monkeypatch.chdir("/")
    done = command("resume", tmp_path / "run", "--rounds", "4", "--quiet")
    assert done.code == 0, done.err
    (tmp_path / "times.csv").write_text("client,compute\n*,3\n")
    done = command("resume", tmp_path / "run", "--rounds", "5", "--quiet")
    assert (done.code, done.err) == (
        2,
        f"error: 'file:{tmp_path}/times.csv' is not what it was when the run began; "
        "put the old times back, or start a new run\n",
    )


def test_updates_that_cannot_be_used_end_the_run() -> None:
    with pytest.raises(DivergedError, match="diverged in version 1, client "):
        played(plan("fedbuff(b=2)", train__lr=1e300))
    with pytest.raises(QuorumError, match=r"0 of the last 3 updates usable in version 1, client \d: .* needs more"):
        played(plan("fedbuff(b=2)", train__lr=1e300, engine__quorum=0.5))


class Picky(nn.Module):
    """A network that fails on some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.conv_net()

    def forward(self, x: Tensor) -> Tensor:
        if float(x.max()) > 500:
            raise ValueError("a broken camera")
        return self.inner(x)


def test_a_client_whose_training_fails_costs_its_own_updates_where_there_is_a_quorum() -> None:
    broken = tiny.federation((8, 12, 9, 10, 11))
    broken.x[broken.clients[2]] = 777.0

    def made(method: str, **changes: Any) -> Plan:
        return tiny.plan(method, model=Picky(), data=broken, **{"rounds": 3} | changes)

    quorum = {"engine__quorum": 0.5}
    in_rounds = tiny.play(made("fedavg", **quorum))
    on_clock = played(made("sync+fedavg", clock__concurrency=5, **quorum))
    assert [row["refused"] for row in on_clock.store.rows()] == [row["refused"] for row in in_rounds.store.rows()]
    assert digest(on_clock.server.tree) == digest(in_rounds.server.tree)
    late = list(played(made("fedbuff(b=2)", clock__concurrency=5, rounds=9, **quorum)).store.rows())
    assert {int(client) for row in late for client in row.get("refused", {})} == {2}
    with pytest.raises(UserCodeError, match="a broken camera"):
        played(made("sync+fedavg", clock__concurrency=5))


def test_those_who_are_trained_for_a_checkpoint_are_trained_as_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of clients of two stages nobody may ask for those of one before it is written, in which they are kept."""
    seen, commits = list[tuple[bool, bool]](), list[bool]()
    real, commit = StackTrainer._train_stack, ClockRun._commit

    def train(self: StackTrainer, *args: Any) -> Any:
        seen.append((bool(commits), torch.backends.cudnn.deterministic))
        return real(self, *args)

    def committing(self: ClockRun) -> None:
        commits.append(True)
        commit(self)
        commits.clear()

    monkeypatch.setattr(StackTrainer, "_train_stack", train)
    monkeypatch.setattr(ClockRun, "_commit", committing)
    saved = {"engine__name": "stacked", "engine__checkpoint_every": 1}
    played(plan("fedbuff(b=1)+fixbn(at=0.5)", rounds=12, clock__concurrency=5, **saved))
    assert set(seen) == {(True, True), (False, True)}


def test_a_dry_run_knows_the_clock(tmp_path: Path) -> None:
    done = command("run", *TINY, *ASYNC, "--dry-run", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "each of 2 clients sends" in done.out


def test_a_strategy_says_what_its_options_take() -> None:
    lines = command("strategies", "fedrevive").out.splitlines()
    assert any(line.split()[:3] == ["statistics", "tracker", "tracker"] for line in lines)
    assert next(line for line in lines if line.startswith("statistics ")).endswith("tracker or bn or none")
