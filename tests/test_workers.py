"""The workers engine against the reference, to the bit; what happens when a worker fails; nothing is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import tiny
from fednorm.core.method import Method, Phase, Rule
from fednorm.core.state import Tree
from fednorm.core.step import Carry
from fednorm.engines import choose
from fednorm.engines.base import Engine
from fednorm.engines.sequential import SequentialEngine
from fednorm.engines.worker_messages import from_message, to_message
from fednorm.engines.workers import Worker, WorkersEngine, _lost
from fednorm.errors import ConfigError, DivergedError, FednormError, UserCodeError
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.training import Job
from fednorm.methods import known_methods
from fednorm.running.api import run
from fednorm.running.config import EngineConfig
from fednorm.running.plan import Plan
from fednorm.running.run import Run
from fednorm.running.store import Store

EQUAL = tiny.federation((8, 8, 8, 8))
"""Lock-step methods need equal batches."""


def jobs(made: Plan, phase: PreparedPhase) -> list[Job]:
    starts = phase.starts(made.initial(), [{}] * len(made.federation.training_clients), made.device)
    clients = zip(made.federation.training_clients, starts, strict=True)
    return [made.job(phase, client, start, 0, made.numbers(phase.id, 1)) for client, start in clients]


def chosen(made: Plan, remembered: str | None = None) -> tuple[str, Engine]:
    """The engine that a run of this plan would have, and its name."""
    return choose.make_engine([made], made.config.engine, cohort=made.cohort_size, remembered=remembered)


@pytest.mark.parametrize("method", known_methods())
def test_a_plan_survives_the_way_to_another_process(method: str) -> None:
    """Phases that cannot go are trained at home; all that go train to the same bits there."""
    made = tiny.plan(method, data=EQUAL)
    message = to_message(made)
    there, phases = from_message(message)
    assert tuple(phases) == message.phases
    assert phases
    for id, phase in phases.items():
        own = made.phase(id)
        if own.phase.lockstep or made.method.data == "union":
            continue
        mine = list(SequentialEngine(made).train(own, jobs(made, own)))
        theirs = list(SequentialEngine(there).train(phase, jobs(made, own)))
        for left, right in zip(mine, theirs, strict=True):
            assert left.update.report == right.update.report
            sent = (left.update.shared, right.update.shared), (left.update.reported, right.update.reported)
            for one, other in (*sent, (left.kept, right.kept)):
                assert one.keys() == other.keys()
                assert all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedbn", {"clients_per_round": 3, "eval__probes": ("grad-norm", "drift")}),
        ("fixbn+local-momentum", {"train__local_steps": None, "train__local_epochs": 2}),
        ("fedtan", {"data": EQUAL}),
    ],
)
def test_workers_equal_the_sequential_engine_to_the_bit(method: str, changes: dict[str, Any]) -> None:
    given = {"data": tiny.federation((7, 14, 9, 3)), **changes}
    both = [tiny.play(tiny.plan(method, engine__name=name, **given)) for name in ("sequential", "workers")]
    assert tiny.fingerprint(both[0]) == tiny.fingerprint(both[1])
    assert multiprocessing.active_children() == []


def test_float32_convolutions_are_equal_too() -> None:
    both = [tiny.play(tiny.plan(engine__name=name, train__dtype="float32")) for name in ("sequential", "workers")]
    assert tiny.fingerprint(both[0]) == tiny.fingerprint(both[1])


def test_a_resumed_run_equals_one_in_a_go_and_keeps_its_engine(tmp_path: Path) -> None:
    whole = tiny.play(tiny.plan("fedbn", engine__name="sequential"))
    plan = tiny.plan("fedbn", engine__name="workers")
    store = Store(tmp_path / "state")
    tiny.play(plan, store, rounds=2)
    gc.collect()  # the generator of rounds that was left is closed, and with it the workers
    assert multiprocessing.active_children() == []
    again = Run(plan, store)
    assert (again.engine_name, again.round) == ("workers", 2)
    list(again.rounds())
    assert tiny.fingerprint(again)["server"] == tiny.fingerprint(whole)["server"]
    store.close()


def broken(grads: Tree, carry: Carry, numbers: object, facts: object) -> Tree:
    """A gradient transform of a user that fails, in a process of its own too."""
    raise DivergedError("the gradient of this user is broken")


def peculiar(grads: Tree, carry: Carry, numbers: object, facts: object) -> Tree:
    raise Peculiar(1, 2)


class Peculiar(Exception):
    """An error that cannot be rebuilt from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def with_grads(transform: object) -> Method:
    return Method(name="own", stages=((Phase(rule=Rule(grads=(transform,))),),))  # type: ignore[arg-type]


def test_an_error_in_a_worker_is_the_same_error_here() -> None:
    with pytest.raises(DivergedError) as caught:
        tiny.play(tiny.plan(with_grads(broken), engine__name="workers"))
    assert str(caught.value) == "the gradient of this user is broken"
    assert "in a worker process, with client" in caught.value.__notes__[0]
    assert multiprocessing.active_children() == []


def test_an_error_that_cannot_travel_arrives_as_text() -> None:
    with pytest.raises(UserCodeError, match=r"^'peculiar' failed: Peculiar: 1 and 2 \(test_workers.py:\d+\)\n"):
        tiny.play(tiny.plan(with_grads(peculiar), engine__name="workers", engine__workers=1))


def test_a_killed_worker_is_noticed_and_replaced() -> None:
    made = tiny.plan(engine__name="workers", engine__workers=1)
    phase = made.phases[0]
    engine = WorkersEngine(made, 1)
    outcomes = engine.train(phase, jobs(made, phase))
    next(outcomes)
    assert engine._crew is not None
    os.kill(engine._crew.pids[0], signal.SIGKILL)
    text = r"^a worker process was ended by SIGKILL (with|before) client \d; if memory is short, "
    with pytest.raises(FednormError, match=text):
        list(outcomes)
    assert multiprocessing.active_children() == []
    reference = {o.update.client: o.update for o in SequentialEngine(made).train(phase, jobs(made, phase))}
    for outcome in engine.train(phase, jobs(made, phase)):
        shared = reference[outcome.update.client].shared
        assert all(torch.equal(value, shared[key]) for key, value in outcome.update.shared.items())
    del engine, outcomes
    gc.collect()
    assert multiprocessing.active_children() == []


SCRIPT = """
import multiprocessing, os, signal, sys, torch
import fednorm

torch.set_num_threads(1)
x, y = torch.randn(8, 3), torch.tensor([0, 1] * 4)
print("once", flush=True)

class Net(torch.nn.Sequential):
    pass

def net():
    layers = (torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    return (Net if "own" in sys.argv else torch.nn.Sequential)(*layers)

def tell(run, row):
    pids = [child.pid for child in multiprocessing.active_children()]
    if "signals" in sys.argv:
        for pid in pids:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
    if "die" in sys.argv:
        print(*pids, flush=True)
        os.kill(os.getpid(), 9)

result = fednorm.run(model=net(), clients=[(x, y)] * 2, test=(x, y), rounds=2, local_steps=1, engine="workers",
                     device="cpu", on_row=tell)
print("done")
"""


def play_script(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=600)


def test_a_plain_script_is_not_run_again_by_its_workers(tmp_path: Path) -> None:
    done = play_script(tmp_path)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["once", "done"], "")


def test_signals_to_the_whole_group_are_left_to_the_parent(tmp_path: Path) -> None:
    done = play_script(tmp_path, "signals")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["once", "done"], "")


def test_what_lives_in_the_script_alone_is_trained_at_home(tmp_path: Path) -> None:
    done = play_script(tmp_path, "own")
    assert done.stdout.split() == ["once", "done"]
    assert done.stderr.startswith("workers engine: the plan cannot be rebuilt in another process (Can't get attribute")
    assert done.stderr.endswith("; using sequential\n")


def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    done = play_script(tmp_path, "die")
    assert done.returncode == -signal.SIGKILL
    pids = [int(word) for word in done.stdout.split()[1:]]
    assert len(pids) == min(2, len(os.sched_getaffinity(0)))
    deadline = time.monotonic() + 300
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_model_that_cannot_be_sent_is_trained_at_home(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.conv_net()
    model.note = lambda: None  # type: ignore[assignment]
    both = [tiny.play(tiny.plan(model=model, engine__name=name, rounds=1)) for name in ("sequential", "workers")]
    assert tiny.fingerprint(both[0]) == tiny.fingerprint(both[1])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("workers engine: the model cannot be sent to another process (Can't ")
    assert lines[0].endswith("; using sequential")


class Viewing(nn.Module):
    """A network that depends on the layout of its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(144, tiny.NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).view(len(x), -1))


def test_a_model_that_needs_channels_first_gets_them() -> None:
    torch.manual_seed(0)
    run = tiny.play(tiny.plan(model=Viewing(), train__dtype="float32", engine__name="sequential"))
    assert run.server.finished


# -- auto --


def test_auto_plays_short_runs_sequentially_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    for rounds in (4, 60):  # without and with a step to look
        name, engine = chosen(tiny.plan(rounds=rounds))
        assert name == "sequential"
        assert isinstance(engine, SequentialEngine)
    assert EngineConfig().name == "auto"
    assert capsys.readouterr().err == ""


def test_auto_measures_a_long_run_and_says_what_it_chose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choose, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(choose, "STACK_STEPS", 1)
    monkeypatch.setattr("fednorm.engines.workers.usable_cores", lambda: 2)
    reference = tiny.play(tiny.plan(rounds=20, engine__name="sequential"))
    run = Run(tiny.plan(rounds=20), Store())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"engine: {run.engine_name}")
    assert {"sequential", "workers"} <= set(re.findall(r"\w+", line)), "the stack is named only where it is faster"
    assert run.store.facts()["engine"] == run.engine_name
    list(run.rounds())
    assert multiprocessing.active_children() == []
    assert run.engine_name in ("sequential", "workers")
    assert tiny.fingerprint(run)["server"] == tiny.fingerprint(reference)["server"]


def test_auto_leaves_out_a_stack_that_cannot_be_and_says_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choose, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(choose, "STACK_STEPS", 1)
    name, _ = chosen(tiny.plan(rounds=60, model=tiny.Choosy(), engine__threads=1))
    assert name == "sequential"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("engine: sequential: ")
    assert "stacked" not in line


def test_auto_offers_the_stack_by_a_clear_margin_and_never_takes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It agrees up to rounding only, so a clock must not decide on it."""
    monkeypatch.setattr(choose, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(choose, "STACK_STEPS", 1)
    lines = []
    for seconds in (0.79, 0.81):  # 1.25 times as fast, and not quite
        times = {"sequential": 1.0, "stacked": seconds}
        monkeypatch.setattr(choose, "_seconds_of_rounds", lambda *_, times=times: times)
        name, engine = chosen(tiny.plan(rounds=60, engine__threads=1))
        assert (name, type(engine)) == ("sequential", SequentialEngine)
        lines += capsys.readouterr().err.splitlines()
    assert lines == [
        "engine: sequential: 1 s a round; --engine stacked takes 0.79 s and agrees up to rounding",
        "engine: sequential: 1 s a round",
    ]


def test_auto_on_several_threads_is_sequential_whatever_a_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MIN_SECONDS", 0.0)
    name, engine = chosen(tiny.plan(rounds=60, engine__threads=2))
    assert (name, type(engine)) == ("sequential", SequentialEngine)
    assert multiprocessing.active_children() == []


def test_auto_tries_no_stack_that_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(choose, "STACK_STEPS", 1)
    monkeypatch.setattr(choose, "STACK_BYTES", 1000)
    assert chosen(tiny.plan(rounds=60, engine__threads=1))[0] == "sequential"


@pytest.mark.parametrize("changes", [{"engine__threads": 1}, {"engine__workers": 1}, {"clients_per_round": 1}])
def test_auto_takes_no_cores_it_was_not_given(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    monkeypatch.setattr(choose, "MIN_SECONDS", 0.0)
    assert chosen(tiny.plan(rounds=60, **changes))[0] != "workers"
    assert multiprocessing.active_children() == []


def test_a_run_that_goes_on_keeps_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "MIN_SECONDS", 0.0)
    name, engine = chosen(tiny.plan(rounds=60), "workers")
    assert (name, type(engine)) == ("workers", WorkersEngine)


def test_the_library_starts_no_process_for_a_small_run() -> None:
    x, y = tiny.examples(8, 0.0, 1)
    run(model=tiny.conv_net(), clients=[(x, y), (x, y)], test=(x, y), rounds=2, local_steps=1, dtype="float64")
    assert multiprocessing.active_children() == []


def test_workers_are_for_the_cpu() -> None:
    made = tiny.plan()
    object.__setattr__(made, "device", torch.device("meta"))
    with pytest.raises(
        ConfigError, match=r"^engine 'workers' trains on the CPU, but the device is meta; give --device"
    ):
        WorkersEngine(made, 2)


@pytest.mark.parametrize(
    ("code", "how"), [(0, "ended with exit code 0"), (3, "ended with exit code 3"), (-9, "was ended by SIGKILL")]
)
def test_a_worker_that_is_gone_is_told_of_by_how_it_ended(code: int, how: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=_end, args=(code,))
    process.start()
    process.join()
    lost = _lost(cast(Worker, SimpleNamespace(process=process)), "in round 3")
    assert str(lost) == (
        f"a worker process {how} in round 3; if memory is short, give fewer engine.workers, then resume the run"
    )


def _end(code: int) -> None:
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


FAULTS = """
import resource
import sys
from fednorm.engines import machine
getattr(machine, sys.argv[1])()
for turn in range(12):
    if turn == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [b"x" * (8 << 20) for _ in range(4)]
    del kept
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of Linux's C library")
@pytest.mark.parametrize("how", ["keep_memory", "expect_large_tensors"])
def test_a_process_that_keeps_its_memory_asks_for_none_again(how: str) -> None:
    """Ten turns of 32 MB, which are 80,000 small pages or 160 large ones."""
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100
