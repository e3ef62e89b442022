"""The server's workflow: each site of an open exchange is sent its own request as a task, and its answer is taken."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from nvflare.apis.controller_spec import ClientTask, SendOrder, Task, TaskCompletionStatus
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fednorm.errors import FednormError, WireError
from fednorm.halves.messages import Message, Refusal
from fednorm.nvflare import parts
from fednorm.nvflare.component import course_of, fail
from fednorm.nvflare.course import Course
from fednorm.nvflare.keeping import is_simulated
from fednorm.nvflare.watch import Watch

_LOOK = 0.5
"""Seconds after which the server looks whether the job was aborted, or a site is back, while no answer comes."""


class NormController(Controller):
    """Plays a `Course` with tasks.

    Requests differ from site to site, so each is a task of its own. A task whose site died is sent again when the site
    is back, for as long as the server waits.
    """

    def __init__(self, setup: dict[str, Any], min_clients: int = 1, task_check_period: float = 0.05) -> None:
        super().__init__(task_check_period=task_check_period)
        self.setup = setup
        self.min_clients = min_clients
        self.task_check_period = task_check_period
        self._answers: queue.Queue[tuple[str, Task, Shareable]] = queue.Queue()
        self._standing: dict[str, Task] = {}
        self._watch: Watch | None = None

    def start_controller(self, fl_ctx: FLContext) -> None:
        parts.carry_tensors()
        if not is_simulated(parts.place_of(fl_ctx).job):  # there a site is silent while others have its processes
            self._watch = Watch(self.communicator)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        self.cancel_all_tasks(fl_ctx=fl_ctx)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        try:
            self._play(abort_signal, fl_ctx)
        except FednormError as error:
            fail(self, error, fl_ctx)

    def _play(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        course = course_of(self, self.setup, fl_ctx)
        self._gather(course, abort_signal, fl_ctx)
        while not course.over and not abort_signal.triggered:
            self._exchange(course, abort_signal, fl_ctx)
        if not abort_signal.triggered:
            course.end()

    def _gather(self, course: Course, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Ask all sites of the job for a hello, and begin once all have said it that are needed and here."""
        wanted = max(self.min_clients, len(course.setup.sites))
        told: set[str] = set()
        while not abort_signal.triggered:
            here = {client.name for client in cast(Any, fl_ctx.get_engine()).get_clients()}
            if len(here) < wanted and here != told:
                told = here
                course.say(f"waits for {wanted} sites; here are {', '.join(sorted(here)) or 'none'}")
            for site in sorted(here - course.greeted):
                self._ask(site, parts.HELLO, parts.question, fl_ctx)
            for site, message in self._arrived(parts.HELLO):
                course.greet(site, message)
            if len(course.greeted) >= wanted and here <= course.greeted:
                course.begin()
                return

    def _exchange(self, course: Course, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Ask, take what comes, and close once all have answered or the server waits no longer."""
        asked, until = course.asked(), time.monotonic() + course.setup.wait
        while course.missing and not abort_signal.triggered:
            for site in course.missing:
                welcome, request = asked[site]
                if self._watch and self._watch.is_silent(site):
                    gone = WireError(f"it was not heard of for {self._watch.seconds:g} seconds; its job there is gone")
                    self.log_error(fl_ctx, str(course.refused(site, gone)))
                    continue
                self._ask(site, parts.WORK, partial(parts.to_shareable, request, welcome), fl_ctx)
            for site, message in self._arrived(parts.WORK):
                try:
                    course.take(site, message)
                except WireError as error:
                    self.log_error(fl_ctx, str(error))
            if course.setup.wait and time.monotonic() > until:
                break
        if not abort_signal.triggered:
            for task in self._standing.values():
                self.cancel_task(task, fl_ctx=fl_ctx)
            self._standing.clear()
            course.close()

    def _ask(self, site: str, name: str, data: Callable[[], Shareable], fl_ctx: FLContext) -> None:
        """Send a site a task, unless it has it; one that ended without an answer, since the site died, is sent anew."""
        standing = self._standing.get(site)
        if standing is None or standing.completion_status not in (None, TaskCompletionStatus.OK):
            self._standing[site] = Task(name=name, data=data(), result_received_cb=self._received)
            self.send(self._standing[site], fl_ctx, targets=[site], send_order=SendOrder.SEQUENTIAL)

    def _received(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Called in a thread of NVFlare's; the workflow's own takes it from the queue."""
        self._answers.put((client_task.client.name, client_task.task, cast(Shareable, client_task.result)))

    def _arrived(self, name: str) -> Iterator[tuple[str, Message]]:
        """Answers to the tasks of this name that stand; waits a moment for the first."""
        try:
            found = [self._answers.get(timeout=_LOOK)]
            while not self._answers.empty():
                found.append(self._answers.get_nowait())
        except queue.Empty:
            return
        for site, task, shareable in found:
            if self._standing.get(site) is not task or task.name != name:
                continue  # of an exchange that was closed without it
            del self._standing[site]
            try:
                yield site, parts.message_in(shareable)
            except WireError as error:  # what cannot be read is refused like what is said
                yield site, Refusal(str(error))
