"""Runs played in step: what they ask for at the same time is done at the same time, and settled while they go on."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING

from fednorm.core.user_code import UserCode
from fednorm.engines.base import MOST_AWAITED, Engine, Order, Played, attempt
from fednorm.engines.machine import current, precision
from fednorm.errors import FednormError, UserCodeError

if TYPE_CHECKING:
    from fednorm.running.records import RoundRow as Row
    from fednorm.running.run import Run

SETTLE_SECONDS = 0.25
"""Rounds that stay on the device are looked at this often: for the progress, and for an interruption."""


class RoundClock:
    """Times rounds, without what it takes whoever is handed the rows to ask for more.

    A device plays on meanwhile, at most what it was asked for. So while it does, that time is the rounds' too.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._least = 0.0
        """seconds that the next rounds took in any case"""
        self.pace = 0.0
        """seconds of a round, as those that were settled last took"""

    def lap(self, rounds: float) -> float:
        """Seconds of these rounds, which are settled just now; those of the next ones begin."""
        now = time.perf_counter()
        took, self._since, self._least = max(now - self._since, self._least), now, 0.0
        self.pace = took / rounds
        return took

    def go_on(self, handed_at: float, in_flight: int) -> None:
        """Somebody had rows since a moment; so many rounds were asked for before, and nobody has settled them yet."""
        now = time.perf_counter()
        ahead = self.pace * in_flight
        if now - handed_at >= ahead:  # the device was done and waited
            self._since += now - handed_at
            self._least = ahead


def play_in_step(runs: Sequence[Run]) -> Generator[tuple[Run, Row | FednormError]]:
    """Play the remaining rounds of some runs in step; rows come when they are settled.

    Rounds that stay on the device are settled some at a time, while the next ones are played, so that it never waits
    for the host. A run that cannot go on ends with its error, without the rounds that were not settled yet; the
    others go on.
    """
    failed: dict[Run, FednormError] = {}
    burst, new, clock = 1, 0, RoundClock()
    try:
        while active := [run for run in runs if not run.over and run not in failed]:
            with current(active[0].plan.device):
                ends = False
                with precision(active[0].plan.config.engine.precision):
                    while new < burst and not ends:
                        failed |= play_round(active)
                        new += 1
                        ends = any(run in failed or run.checkpoint_is_set() or not run.is_ahead for run in active)
                ends = ends or any(run.checkpoint_is_due() for run in active)
                for run in active:
                    run.send_reports()
                # What was played since the last time stays in flight, unless a checkpoint needs to know of it.
                counts = {run: len(run.unsettled) - (0 if ends else new) for run in active}
                settled = {run: [] if run in failed else attempt(run.settle, count) for run, count in counts.items()}
                failed |= {run: rows for run, rows in settled.items() if isinstance(rows, FednormError)}
                rows = [
                    (run, row) for run, each in settled.items() if not isinstance(each, FednormError) for row in each
                ]
                new = 0
                if rows:
                    seconds = round(clock.lap(len(rows) / len(active)) / len(rows), 6)
                    burst = min(MOST_AWAITED // 2, max(1, int(SETTLE_SECONDS / clock.pace)))
                    for run, row in rows:
                        row["seconds"] = run.told_seconds = seconds
                for run in active:
                    if ends and run not in failed:
                        run.commit_if_due()
            handed_at = time.perf_counter()
            yield from sorted(rows, key=lambda each: each[1]["round"])
            for run in active:
                if run in failed:
                    run.close()
                    yield run, failed[run]
            clock.go_on(handed_at, max((len(run.unsettled) for run in active if run not in failed), default=0))
    finally:
        for run in runs:
            run.close()


def play_round(runs: Sequence[Run]) -> dict[Run, FednormError]:
    """The next round of each run; what they ask for at the same time is done at the same time. Returns who failed."""
    turns = {run: run.play() for run in runs}
    answers: dict[Run, Played | FednormError | None] = dict.fromkeys(runs)
    failed: dict[Run, FednormError] = {}
    while turns:
        orders: dict[Run, Order] = {}
        for run, turn in list(turns.items()):
            try:
                answer = answers[run]
                if isinstance(answer, FednormError):
                    raise answer
                with UserCode(run.plan.prepared.name):
                    orders[run] = next(turn) if answer is None else turn.send(answer)
            except StopIteration:
                del turns[run]
            except FednormError as error:
                failed[run] = error
                del turns[run]
        answers = {**dict.fromkeys(turns), **fulfil(orders)}
    return failed


def fulfil(orders: Mapping[Run, Order]) -> dict[Run, Played | FednormError]:
    """Have the exchanges played that runs ask for, those of one engine together."""
    engines: dict[int, tuple[Engine, list[Run]]] = {}
    for run in orders:
        engines.setdefault(id(run.engine), (run.engine, []))[1].append(run)
    answers: dict[Run, Played | FednormError] = {}
    for engine, runs in engines.values():
        try:
            with UserCode(runs[0].plan.prepared.name):
                answers |= dict(zip(runs, engine.exchange([orders[run] for run in runs]), strict=True))
        except UserCodeError as error:
            answers |= dict.fromkeys(runs, error)
    return answers
