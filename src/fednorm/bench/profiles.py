"""Where the time of a step goes on a GPU: by kernel, how many launches and how long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch.profiler import ProfilerActivity, profile

from fednorm.bench.timing import Rounds

MOST = 25
"""Kernels that are written down, those that take longest."""


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in a step; one that serves layers of several sizes has short ones and long ones."""

    name: str
    launches: float
    us: float
    shortest: float
    longest: float


@dataclass(frozen=True)
class Profile:
    """A step of all clients: its kernels and copies, and the milliseconds in which any of them is at work."""

    launches: float
    busy_ms: float
    kernels: tuple[Kernel, ...]

    def to_json(self) -> dict[str, Any]:
        kernels = [vars(each) for each in self.kernels[:MOST]]
        return {"launches": self.launches, "busy_ms": self.busy_ms, "kernels": kernels}


def profile_of(rounds: Rounds, local_steps: int) -> Profile:
    """What a GPU does in some rounds, for one step of them."""
    times: dict[str, list[float]] = defaultdict(list)
    spans: list[tuple[float, float]] = []

    def look(play: Callable[[], object]) -> int:
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            play()
        for event in seen.events() or []:
            if event.device_type.name == "CUDA":
                times[event.name].append(event.time_range.elapsed_us())
                spans.append((event.time_range.start, event.time_range.end))
        return len(spans)

    launches = rounds.count(look) / local_steps
    share = launches / max(len(spans), 1)
    kernels = [
        Kernel(name, len(us) * share, sum(us) * share, min(us), max(us)) for name, us in times.items()
    ]  # fmt: skip
    kernels.sort(key=attrgetter("us"), reverse=True)
    busy = sum(end - start for start, end in _joined(spans)) * share / 1e3
    return Profile(launches, busy, tuple(kernels))


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time as ones that do not overlap."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined
