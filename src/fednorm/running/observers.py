"""Those who watch a run: a progress line, and trackers. None of them can change what they watch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from fednorm.running.progress import Bars, Before, PlainLines
from fednorm.running.records import OnRow, RoundRow, RunId
from fednorm.running.stopping import Interrupted
from fednorm.running.trackers import TRACKERS, Tracker, warn


@dataclass(frozen=True)
class Tracking:
    """With which trackers runs are followed, where their files go, and with which config."""

    names: Sequence[str]
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def watching(
    rounds: int,
    *,
    stream: TextIO | None,
    tracking: Tracking | None = None,
    runs: int = 1,
    before: Before | None = None,
) -> Iterator[OnRow]:
    """One observer for all that was asked for; `stream` None is silent, a terminal gets bars and a file plain lines."""
    with ExitStack() as stack:
        observers: list[OnRow] = []
        if stream is not None:
            progress = Bars if stream.isatty() else PlainLines
            observers.append(guarded(stack.enter_context(progress(rounds, runs, stream, before))))
        for name in dict.fromkeys(tracking.names) if tracking else ():
            made = Tracker(TRACKERS[name], tracking.folder, rounds, tracking.config)
            observers.append(guarded(stack.enter_context(made), made.name))

        def tell_all(run: RunId, row: RoundRow) -> None:
            for observer in observers:
                observer(run, row)

        yield tell_all


def guarded(observer: OnRow, name: str = "") -> OnRow:
    """An observer whose first failure is its last: it warns once and is not asked again."""
    broken = False

    def tell(run: RunId, row: RoundRow) -> None:
        nonlocal broken
        if broken:
            return
        try:
            observer(run, row)
        except Interrupted:
            raise
        except Exception as error:
            broken = True
            warn(name or type(observer).__name__, error)

    return tell
