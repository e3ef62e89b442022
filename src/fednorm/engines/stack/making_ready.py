"""What is being made ready, told while somebody waits for it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

WORTH_A_LINE = 3.0
"""Seconds of waiting after which it is told what for; compiled kernels are kept on disk, so the next run is quicker."""


@contextmanager
def making_ready(what: str) -> Iterator[None]:
    """Say what is being made ready once that takes long, and how long it took."""
    started = time.perf_counter()
    later = threading.Timer(WORTH_A_LINE, _say, (f"making ready: {what}",))
    later.daemon = True
    later.start()
    try:
        yield
    finally:
        later.cancel()
    seconds = time.perf_counter() - started
    if seconds > WORTH_A_LINE:
        _say(f"{what} made ready in {seconds:.1f} s")


def _say(line: str) -> None:
    print(f"stacked engine: {line}", file=sys.stderr, flush=True)
