"""Jobs that devices have: what was given to whom and when, with the requests that they are about."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fednorm.halves import wire
from fednorm.halves.messages import Request
from fednorm.nvflare.edge.post import HELLO, Job, Node, to_sheet


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many devices there are, and how many seconds they are waited for; 0: as long as it takes."""

    devices: int
    job_timeout: float = 0.0
    hello_timeout: float = 0.0


class Jobs:
    """One job a device at a time, given to the node of the tree that the device's reports go through."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._requests: dict[str, Request] = {}
        """by sheet"""
        self._since: dict[int, float] = {}
        self._next = HELLO + 1

    def of(self, device: str) -> Job | None:
        """The job that a device has."""
        return self._node.jobs.get(device)

    @property
    def open(self) -> dict[str, Job]:
        return dict(self._node.jobs)

    def request(self, job: Job) -> Request:
        """What a job asks, as all devices that are asked the same have it."""
        return self._requests[job.sheet]

    def give(self, device: str, request: Request) -> None:
        """Give a device a job; what it asks goes by name, since others may be asked the same."""
        address, sheet = request.address, f"{request.phase}-{request.round}-{request.address.attempt}"
        own = {"client": request.client, "number": address.number, "accepted": request.accepted}
        self._node.jobs[device] = Job(id=self._next, **own, sheet=sheet)
        self._since[self._next] = time.monotonic()
        self._next += 1
        if sheet not in self._requests:
            self._requests[sheet] = to_sheet(request)
            self._node.sheets[sheet] = wire.encode(self._requests[sheet])

    def close(self, device: str) -> None:
        """A device's job is done, or given up; sheets that nobody has any more go with it."""
        self._since.pop(self._node.jobs.pop(device).id)
        named = {job.sheet for job in self._node.jobs.values()}
        self._requests = {name: each for name, each in self._requests.items() if name in named}
        self._node.sheets = {name: each for name, each in self._node.sheets.items() if name in named}

    def overdue(self, seconds: float) -> dict[str, Job]:
        """Jobs that were given out longer ago than this; none where it is 0."""
        now = time.monotonic()
        return {d: job for d, job in self.open.items() if seconds and now - self._since[job.id] > seconds}
