"""What goes up and down NVFlare's tree of server, relays and leaves: reports of what devices said, and jobs for them.

Every node keeps the same few things, so relays and leaves are one class, and the server answers as they do. A report is
repeated until its receiver has answered it, and an answer names all open jobs of the nodes below: whatever is lost on
the way is said again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fednorm.halves.messages import Request

HELLO = 0
"""the id of the job that every device has first: to introduce itself"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one device is asked for: a sheet that it shares with others, and what of the request is its own."""

    id: int
    """counted through all that devices are asked, tests included"""
    client: int
    number: int
    """of the exchange, as the server's half counts"""
    accepted: int
    sheet: str
    """name of the encoded request; all devices that are asked the same of one model have the same"""

    def request(self, sheet: Request) -> Request:
        """The request that the server's half made for this device."""
        address = replace(sheet.address, number=self.number)
        return replace(sheet, client=self.client, address=address, accepted=self.accepted)


def to_sheet(request: Request) -> Request:
    """A request without what is one device's own."""
    return replace(request, client=0, accepted=0, address=replace(request.address, number=HELLO))


@dataclass
class Report:
    """What devices below a node said since its parent last answered, by device, each with the id of its job."""

    said: dict[str, tuple[int, bytes]] = field(default_factory=dict[str, tuple[int, bytes]])
    failed: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    """devices that could not do their job, and why"""

    def to_dict(self, sheets: Collection[str]) -> dict[str, Any]:
        """As NVFlare carries it, with the names of the sheets that need not be sent again."""
        pairs = ((name, {d: list(pair) for d, pair in getattr(self, name).items()}) for name in ("said", "failed"))
        return {**dict(pairs), "sheets": sorted(sheets)}


class Node:
    """A relay or a leaf: what it heard from below and has not passed on, and the jobs for the devices below."""

    def __init__(self) -> None:
        self.terms = b""
        self.jobs: dict[str, Job] = {}
        self.sheets: dict[str, bytes] = {}
        self.known: set[str] = set()
        """devices below that have introduced themselves"""
        self._routes: dict[str, str] = {}
        """by device, the child that last spoke for it"""
        self._waiting = Report()
        self._sent = Report()

    # -- towards the devices --

    def hear(self, report: Mapping[str, Any], child: str = "") -> None:
        """What a child, or a device itself, reports: it is passed on."""
        self.route(report, child)
        for name, kept in (("said", self._waiting.said), ("failed", self._waiting.failed)):
            kept |= {device: (id, what) for device, (id, what) in report.get(name, {}).items()}

    def route(self, report: Mapping[str, Any], child: str) -> None:
        """Note which devices a child speaks for."""
        for device in (*report.get("said", ()), *report.get("failed", ())):
            self._routes[device] = child
            self.known.add(device)

    def open_job(self, device: str) -> Job | None:
        """The job that a device has and has not answered."""
        job = self.jobs.get(device)
        answered = [each.get(device, (-1,))[0] for each in (self._waiting.said, self._waiting.failed)]
        return None if job is None or job.id in answered else job

    def reply(self, child: str, has: Collection[str]) -> dict[str, Any]:
        """What a child is answered: all jobs of the devices it spoke for, and the sheets that it lacks for them."""
        below = (device for device in self.jobs if self._routes.get(device) == child)
        jobs = {device: job for device in below if (job := self.open_job(device))}
        wanted = {job.sheet for job in jobs.values()}
        return {
            "terms": self.terms,
            "jobs": {device: asdict(job) for device, job in jobs.items()},
            "sheets": {name: self.sheets[name] for name in sorted(wanted - set(has))},
        }

    # -- towards the server --

    def report(self) -> dict[str, Any]:
        """What has not been answered yet."""
        self._sent = Report(dict(self._waiting.said), dict(self._waiting.failed))
        return self._sent.to_dict(self.sheets)

    def answered(self, reply: Mapping[str, Any]) -> None:
        """The parent's answer to the last report: what that said need not be said again."""
        for sent, waiting in ((self._sent.said, self._waiting.said), (self._sent.failed, self._waiting.failed)):
            for device, told in sent.items():
                if waiting.get(device) == told:
                    del waiting[device]
        self._sent = Report()
        self.terms = reply["terms"]
        self.jobs = {device: Job(**job) for device, job in reply["jobs"].items()}
        wanted = {job.sheet for job in self.jobs.values()}
        self.sheets = {name: sheet for name, sheet in {**self.sheets, **reply["sheets"]}.items() if name in wanted}
