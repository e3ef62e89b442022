"""Seconds that rows tell: a round's own, whatever whoever is handed the rows does before they ask for more."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from itertools import count, islice
from statistics import mean
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import tiny
from fednorm.bench import timing
from fednorm.bench.timing import ENOUGH_ROWS, Rounds
from fednorm.running import in_step
from fednorm.running import run as running
from fednorm.running.in_step import play_in_step
from fednorm.running.run import Run
from fednorm.running.store import Store

CPU = torch.device("cpu")


class Device:
    """A device, and a host, with a clock that goes on only while one of them has work."""

    def __init__(self) -> None:
        self.now = self.done_at = 0.0


class OnDevice:
    """A run whose rounds take a device some seconds, after the host has prepared each. The first is also compiled.

    Where rounds are not played `ahead`, the host waits for each.
    """

    def __init__(self, device: Device, seconds: float, host: float = 1e-4, ahead: bool = True) -> None:
        self.device, self.seconds, self.host, self.is_ahead = device, seconds, host, ahead
        self.round, self.over, self.told_seconds = 0, False, math.inf
        self.unsettled: list[tuple[int, float]] = []
        self.engine = None
        self.plan: Any = SimpleNamespace(
            config=SimpleNamespace(engine=SimpleNamespace(precision="fp32")),
            device=CPU,
            prepared=SimpleNamespace(name="played"),
        )

    @property
    def takes(self) -> float:
        """Seconds of a round, one after the other."""
        return max(self.seconds, self.host) if self.is_ahead else self.seconds + self.host

    def rounds(self) -> Generator[Any]:
        return (row for _, row in play_in_step([cast(Run, self)]))

    def play(self) -> Iterator[Any]:
        device = self.device
        device.now += self.host
        device.done_at = max(device.now, device.done_at) + self.seconds + (20.0 if not self.round else 0.0)
        self.round += 1
        self.unsettled.append((self.round, device.done_at))
        return iter(())

    def settle(self, count: int) -> list[dict[str, float]]:
        settled, self.unsettled = self.unsettled[:count], self.unsettled[count:]
        for _, done_at in settled:
            self.device.now = max(self.device.now, done_at)
        return [{"round": number} for number, _ in settled]

    def checkpoint_is_set(self) -> bool:
        return False

    def checkpoint_is_due(self) -> bool:
        return False

    def send_reports(self) -> None:
        pass

    def commit_if_due(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    for module in (timing, in_step):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: device.now))
    return device


KINDS: dict[str, Callable[[Device], OnDevice]] = {
    "short": lambda device: OnDevice(device, 0.004),
    "long": lambda device: OnDevice(device, 0.03),
    "the host is slower": lambda device: OnDevice(device, 0.0005, host=0.001),
    "each is waited for": lambda device: OnDevice(device, 0.01, ahead=False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stretch", [0.3, 0.7])
def test_runs_that_are_timed_in_turn_tell_what_the_clock_tells(kind: str, stretch: float, device: Device) -> None:
    """Each waits, between two rows of a burst, while the other is timed."""
    runs = [KINDS[kind](device), OnDevice(device, 0.0155)]
    plays = [Rounds(run, CPU) for run in runs]
    for play in plays:
        play(0.0)
    for _ in range(5):
        for play in plays:
            device.now += 2.0  # others are timed
            play(stretch)
    for run, play in zip(runs, plays, strict=True):
        assert play.disagree() == ""
        assert len(play.told) >= ENOUGH_ROWS
        assert play.told == [pytest.approx(run.takes, rel=0.1)] * len(play.told)


def test_a_run_whose_rows_tell_too_much_is_told_of(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    run = OnDevice(device, 0.0155)
    whole = run.rounds
    monkeypatch.setattr(run, "rounds", lambda: ({**row, "seconds": 1.5 * row["seconds"]} for row in whole()))
    play = Rounds(run, CPU)
    play(0.0)
    for _ in range(3):
        play(0.3)
    assert play.disagree().startswith("two clocks disagree: rows tell 23.2 ms a round, timed as a whole it takes 15.")


@pytest.mark.parametrize("settled", [False, True], ids=["in flight", "settled by others"])
@pytest.mark.parametrize("after", [60, 61, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pause_between_rows_is_nobodys_round(kind: str, after: int, settled: bool, device: Device) -> None:
    run = KINDS[kind](device)
    course = run.rounds()
    before = list(islice(course, after))[-1]["seconds"]
    device.now += 1000.0
    if settled:
        run.settle(len(run.unsettled))
    later = [row["seconds"] for row in islice(course, 200)]
    assert before == pytest.approx(run.takes, rel=0.1)
    # Where nothing was in flight, the host prepares two bursts before it looks at the first.
    assert max(later) < 2.1 * run.takes
    assert mean(later) == pytest.approx(run.takes, rel=0.2)
    assert run.round < after + 200 + 3 * 64, "nor does it change how many are played in one go"


def test_rows_tell_the_devices_time_though_the_host_is_busy_with_them(device: Device) -> None:
    """While rows are looked at, which takes most of the time here, the device plays on."""
    told: list[float] = []
    for row in islice(OnDevice(device, 0.01).rounds(), 300):
        device.now += 0.008
        told.append(row["seconds"])
    assert told[100:] == [pytest.approx(0.01, rel=0.02)] * 200


def test_rounds_in_flight_when_a_run_is_stopped_do_not_tell_the_pause_before(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, pauses = count(), [0.0]
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) + sum(pauses))
    for module in (running, in_step):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    changes = {"rounds": 20, "eval__every": 20, "engine__checkpoint_every": 20, "engine__name": "stacked"}
    run = Run(tiny.plan(model=tiny.conv_net(), data=tiny.federation((8, 8, 8)), **changes), Store())
    assert next(run.rounds())["round"] == 1
    pauses.append(1e6)
    run.stop()
    first, second = (row.get("seconds", 0.0) for row in run.store.rows())
    assert 0 < second <= first < 100
