"""How a run ends early: a signal that lets it finish its round, or `Stop`, raised by whoever watches it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stop(Exception):
    """Raised in `on_row`, it ends the run after the round: all is committed, the result has what was done.

    Of several runs it ends the one whose row it was; the others go on. A run that was stopped can be resumed.
    """


class Interrupted(Exception):
    """The run was asked to stop by a signal and did, between two rounds."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@contextmanager
def orderly_stop() -> Iterator[Callable[[], int]]:
    """Let the first SIGINT or SIGTERM finish the round; a second one stops at once. Yields "which signal came?"."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    came = [0]
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: Any) -> None:
        if came[0]:
            raise Interrupted(number)
        came[0] = number

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: came[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
