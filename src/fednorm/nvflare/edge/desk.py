"""Where reports of devices come in and jobs go out: the course of a run, as on any transport, on NVFlare's tree.

The course decides what is asked and what becomes of an answer. Here is who the devices are, which job each of them has,
and what the tree carries. A job is one device's until it answers, fails, or is silent for too long; whatever it says
later is refused in one line.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from fednorm.core.state import Tree
from fednorm.errors import QuorumError, WireError
from fednorm.halves import wire
from fednorm.halves.arrivals import ArrivalServer
from fednorm.halves.messages import Hello, Message, Refusal, Request, Welcome
from fednorm.halves.server import Server
from fednorm.nvflare.arrivals import ArrivalCourse
from fednorm.nvflare.course import Course
from fednorm.nvflare.edge.jobs import Jobs, Pace
from fednorm.nvflare.edge.packing import decode
from fednorm.nvflare.edge.post import HELLO, Node


class Desk:
    """The server's end of the tree."""

    def __init__(self, course: Course, pace: Pace) -> None:
        self.course, self.pace = course, pace
        self._node = Node()
        self.jobs = Jobs(self._node)
        self.names: dict[str, str] = {}
        """what devices call themselves, by their id"""
        self.begun = False
        self._changed = False
        self._opened = time.monotonic()

    @property
    def version(self) -> int:
        """Versions of the model, or rounds, that were made."""
        return self.course.played if self.begun else 0

    @property
    def half(self) -> Server | ArrivalServer:
        """The server's half of the method, as of now."""
        arrivals = self.course.arrivals if isinstance(self.course, ArrivalCourse) else None
        half = self.course.server or arrivals
        if half is None:
            raise WireError("the run has not begun; wait for all devices")
        return half

    @property
    def tree(self) -> Tree:
        """The server's present state, all entries of it."""
        return self.half.tree

    # -- reports --

    def hear(self, child: str, report: Mapping[str, Any]) -> None:
        """Take what a child reports of its devices; whatever cannot be used is refused in one line."""
        self._node.route(report, child)
        for device, (id, data) in report["said"].items():
            try:
                if id == HELLO:
                    self._greet(device, decode(data))
                else:
                    self._take(device, id, data)
            except WireError as error:
                self.course.say(f"device '{device}': {error}")
        for device, (id, why) in report["failed"].items():
            if id == HELLO or not self._has(device, id):
                self.course.say(f"device '{device}': {why}")
            else:
                self._answered(device, Refusal(why))
        self.go_on()

    def reply(self, child: str, has: Collection[str]) -> dict[str, Any]:
        """The answer to a child's report: the jobs of its devices."""
        return self._node.reply(child, has)

    def go_on(self) -> None:
        """Give up who is silent for too long, and give jobs to whoever is to have one."""
        if not self.begun:
            seconds = self.pace.hello_timeout
            if seconds and time.monotonic() - self._opened > seconds:
                raise QuorumError(
                    f"{len(self.names)} of {self.pace.devices} devices said hello within {seconds:g} seconds; "
                    "start the others, or give a smaller number of devices"
                )
            return
        for device in self.jobs.overdue(self.pace.job_timeout):
            self._answered(device, Refusal(f"it is silent for {self.pace.job_timeout:g} seconds; it is given up"))
        while self._changed:  # an exchange that needs nobody is over at once
            self._changed = False
            for name, asked in self._due().items():
                self._give(name, *asked)

    # -- hellos --

    def _greet(self, device: str, message: Message) -> None:
        name = message.name if isinstance(message, Hello) else device
        others = [other for other, called in self.names.items() if called == name and other != device]
        if others:
            raise WireError(f"it calls itself '{name}', as '{others[0]}' does; give each its own number")
        if self.begun:
            if device in self.names:  # its leaf was started again
                return
            raise WireError(f"'{name}' is not one of the {self.pace.devices} devices of this run, which has begun")
        self.course.greet(name, message)
        self.names[device] = name
        if len(self.names) == self.pace.devices:
            self.course.begin()
            self.begun = self._changed = True

    # -- answers --

    def _has(self, device: str, id: int) -> bool:
        job = self.jobs.of(device)
        return job is not None and job.id == id

    def _take(self, device: str, id: int, data: bytes) -> None:
        job = self.jobs.of(device)
        if job is None or job.id != id:
            raise WireError(f"it answers job {id}, which is not open any more; its answer was ignored")
        asked = self.jobs.request(job)
        entries = (entry for entry, _ in self.half.agreed.phase(asked.phase).schema.values())
        try:
            answer = decode(data, asked.tree, limits=wire.limits_for(entries))
        except WireError as error:
            answer = Refusal(str(error))
        self._answered(device, answer)

    def _answered(self, device: str, answer: Message) -> None:
        """What became of a device's job is for the course to judge."""
        self.jobs.close(device)
        self._changed = True
        course, name = self.course, self.names[device]
        if isinstance(course, ArrivalCourse) and not course.arrived:
            course.arrive(name, answer)
            if course.arrived:
                self._stop()
            return
        try:
            course.take(name, answer)
        except WireError as error:
            course.say(str(error))

    def _stop(self) -> None:
        """The last version is made: whoever works for another one need not go on."""
        left = list(self.jobs.open)
        for device in left:
            self.jobs.close(device)
        if left:
            self.course.say(f"version {self.version} is the last; {len(left)} devices at work are not waited for")

    # -- jobs --

    def _due(self) -> dict[str, tuple[Welcome, Request]]:
        """What devices are to be asked now, by name."""
        course = self.course
        if isinstance(course, ArrivalCourse) and not course.arrived:
            return course.sent()
        if not course.over and not course.missing:
            course.close()
            self._changed = True
        return {} if course.over else course.asked()

    def _give(self, name: str, welcome: Welcome, request: Request) -> None:
        """Put a job where the next report of its device's child finds it."""
        device = next(device for device, called in self.names.items() if called == name)
        if self.jobs.of(device) is None:
            self._node.terms = self._node.terms or wire.encode(welcome)
            self.jobs.give(device, request)
