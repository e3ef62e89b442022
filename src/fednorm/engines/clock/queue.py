"""The jobs that are under way, and which of them arrive next; none of them is looked at to find out."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from fednorm.halves.landing import Flight


@dataclass(frozen=True)
class UnderWay:
    """A job of the simulation: what the server knows of it, and when it is where."""

    flight: Flight
    arrives: float
    free: float
    """when its client has trained, and may be sent the model again if it keeps nothing"""
    used: int
    """batches of its life that the client has used before it"""

    @property
    def order(self) -> tuple[float, int, int]:
        """Updates of one instant arrive by client."""
        return self.arrives, self.flight.client, self.flight.number


class Queue:
    """Jobs in the order in which they arrive."""

    def __init__(self, jobs: Iterable[UnderWay] = ()) -> None:
        self._jobs: dict[int, UnderWay] = {}
        self._of: dict[int, list[UnderWay]] = defaultdict(list)
        self._next: list[tuple[float, int, int]] = []
        """a heap"""
        for each in jobs:
            self.add(each)

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: UnderWay) -> None:
        self._jobs[job.flight.number] = job
        self._of[job.flight.client].append(job)
        heapq.heappush(self._next, job.order)

    def take(self, job: UnderWay) -> None:
        """Take away the job that arrives first."""
        if heapq.heappop(self._next) != job.order:
            raise AssertionError(f"job {job.flight.number} is not the one that arrives next")
        del self._jobs[job.flight.number]
        self._of[job.flight.client].remove(job)
        if not self._of[job.flight.client]:
            del self._of[job.flight.client]

    @property
    def first(self) -> float:
        """When the next job arrives."""
        return self._next[0][0]

    def due(self) -> list[UnderWay]:
        """The jobs that arrive at the next instant, in their order."""
        found: list[tuple[float, int, int]] = []
        places = [0]
        while places:  # those below one that is later are later
            place = places.pop()
            if place < len(self._next) and self._next[place][0] == self.first:
                found.append(self._next[place])
                places += 2 * place + 1, 2 * place + 2
        return [self._jobs[number] for _, _, number in sorted(found)]

    def coming(self) -> list[UnderWay]:
        """All jobs, in the order in which they arrive."""
        return [self._jobs[number] for _, _, number in sorted(self._next)]

    def begun(self) -> Iterable[UnderWay]:
        """All jobs, in the order in which they began."""
        return self._jobs.values()

    def of(self, client: int) -> list[UnderWay]:
        """The jobs of a client."""
        return self._of.get(client, [])

    def busy(self, time: float | None) -> set[int]:
        """Clients that have a job, or with a time those that have not trained it by then."""
        if time is None:
            return set(self._of)
        return {each.flight.client for each in self._jobs.values() if each.free > time}
