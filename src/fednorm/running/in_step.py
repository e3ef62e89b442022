"""Runs played in step: what they ask for at the same time is done at the same time, and settled while they go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fednorm.core.report import Report
from fednorm.engines.stack.device_stack import LOG_ROWS, LateReports, Task
from fednorm.engines.stack.slot import BatchKey, exchange_on_device
from fednorm.errors import FednormError

if TYPE_CHECKING:
    from fednorm.running.run import Row, Run, Wish

P = ParamSpec("P")
T = TypeVar("T")
SETTLE_SECONDS = 0.25
"""Rounds that stay on the device are looked at this often: for the progress, and for an interruption."""


def play_together(runs: Sequence[Run]) -> Iterator[tuple[Run, Row | FednormError]]:
    """Play the remaining rounds of some runs in step; rows come when they are settled.

    Rounds that stay on the device are settled some at a time, while the next ones are played, so that it never waits
    for the host. A run that cannot go on ends with its error, without the rounds that were not settled yet; the
    others go on.
    """
    failed: dict[Run, FednormError] = {}
    burst, new, since = 1, 0, time.perf_counter()
    try:
        while active := [run for run in runs if run.round < run.plan.config.rounds and run not in failed]:
            for run, end in play_round(active).items():
                if isinstance(end, FednormError):
                    failed[run] = end
                else:
                    run.unsettled.append((end, run.reports))
            new += 1
            ends = any(run in failed or run.checkpoint_is_set() or not _comes_late(run) for run in active)
            if new < burst and not ends:
                continue
            ends = ends or any(run.checkpoint_is_due() for run in active)
            for run in active:
                _send_reports(run)
            # What was played since the last time stays in flight, unless a checkpoint needs to know of it.
            counts = {run: len(run.unsettled) - (0 if ends else new) for run in active}
            settled = {run: [] if run in failed else attempt(run.settle, count) for run, count in counts.items()}
            failed |= {run: rows for run, rows in settled.items() if isinstance(rows, FednormError)}
            rows = [(run, row) for run, each in settled.items() if not isinstance(each, FednormError) for row in each]
            now, new = time.perf_counter(), 0
            for _, row in rows:
                row["seconds"] = round((now - since) / len(rows), 6)
            if rows:
                pace = (now - since) / (len(rows) / len(active))
                burst, since = min(LOG_ROWS // 2, max(1, int(SETTLE_SECONDS / pace))), now
            for run in active:
                if ends and run not in failed:
                    run.commit_if_due()
            yield from sorted(rows, key=lambda each: each[1]["round"])
            for run in active:
                if run in failed:
                    run.close()
                    yield run, failed[run]
    finally:
        for run in runs:
            run.close()


def _comes_late(run: Run) -> bool:
    """Whether the last round's reports are still on the device."""
    return isinstance(run.reports, LateReports)


def _send_reports(run: Run) -> None:
    """Let all reports that are still on the device come to the host, behind the rounds under way."""
    for _, reports in run.unsettled:
        if isinstance(reports, LateReports):
            reports.send()


def play_round(runs: Sequence[Run]) -> dict[Run, Row | FednormError]:
    """The next round of each run; what they ask for at the same time is done at the same time."""
    turns = {run: run.play(run.round + 1) for run in runs}
    answers: dict[Run, Any] = dict.fromkeys(runs)
    ends: dict[Run, Row | FednormError] = {}
    while turns:
        wishes: dict[Run, Wish] = {}
        for run, turn in list(turns.items()):
            try:
                if isinstance(answers[run], FednormError):
                    raise answers[run]
                wishes[run] = turn.send(answers[run])
            except (StopIteration, FednormError) as end:
                ends[run] = end.value if isinstance(end, StopIteration) else end
                del turns[run]
        answers = fulfil(wishes)
    return {run: ends[run] for run in runs}


def fulfil(wishes: Mapping[Run, Wish]) -> dict[Run, Sequence[Report] | FednormError]:
    """Do the exchanges that runs ask for: together on the device where they can stay there, else one by one."""
    answers: dict[Run, Sequence[Report] | FednormError] = {}
    groups: dict[BatchKey, dict[Run, Task]] = {}
    for run, wish in wishes.items():
        task = run.task(wish) if run.slot and not run.probing(wish.number) else None
        alike = run.slot.alike(task) if run.slot and task else None
        if task is not None and alike is not None:
            groups.setdefault(alike, {})[run] = task
    for alike, tasks in groups.items():
        slots = [(run.slot, task, run.store) for run, task in tasks.items() if run.slot]
        together = attempt(exchange_on_device, slots, alike.work)
        for place, (run, task) in enumerate(tasks.items()):
            reports = together if isinstance(together, FednormError) else together[place]
            if reports is not None:
                answers[run] = reports
                run.count(wishes[run], len(task.clients))
    for run, wish in wishes.items():
        if run not in answers:
            answers[run] = attempt(run.exchange, wish)
    return answers


def attempt(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | FednormError:
    """What a function returns, or the error it ends with: one run's, which need not be the end of others."""
    try:
        return function(*arguments, **named)
    except FednormError as error:
        return error
