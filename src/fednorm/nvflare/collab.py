"""A run over NVFlare's Collab API: the server calls its sites, which takes a tenth of the time that tasks do.

The same course and the same members as over tasks, with the same bits. What differs: NVFlare puts no filter between a
site and the server, so the site does, and checks itself what leaves it; and a site whose process ended does not come
back to the job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.collab.api.facade import Facade as collab  # its public name is that of this module
from nvflare.collab.runtime.controller import CollabController
from nvflare.collab.runtime.executor import CollabExecutor
from nvflare.job_config.api import FedJob

from fednorm.errors import ConfigError, FednormError, WireError
from fednorm.halves import wire
from fednorm.halves.guard import Sent
from fednorm.halves.messages import Message, Request, Update, Welcome
from fednorm.halves.wire import check_update
from fednorm.nvflare.arrivals import ArrivalCourse
from fednorm.nvflare.calls import LIMITS, Calls, Desk
from fednorm.nvflare.chain import passed
from fednorm.nvflare.component import course_of, fail, member_of
from fednorm.nvflare.course import Course
from fednorm.nvflare.member import Member
from fednorm.nvflare.setup import Setup

SERVER = "server"
"""what Collab calls the server of a job, whatever its name"""


class NormServer(FLComponent):
    """Plays a `Course` with calls."""

    def __init__(self, setup: dict[str, Any], min_clients: int = 1) -> None:
        super().__init__()
        self.setup, self.min_clients = setup, min_clients

    @collab.main
    def run(self) -> None:
        """The whole run; what ends it early is told in one line."""
        fl_ctx = collab.fl_ctx
        proxies = {site.name: site for site in collab.clients}
        aborted = collab.context.is_aborted
        try:
            course = course_of(self, self.setup, fl_ctx)
            refuse_absent(course.setup.sites, proxies, self.min_clients)
            play(course, Calls(proxies, aborted), partial(self.log_error, fl_ctx))
        except FednormError as error:
            fail(self, error, fl_ctx)


def refuse_absent(wanted: Sequence[str], here: Collection[str], enough: int) -> None:
    """Refuse to begin without sites that the run needs: who is not here when a Collab job begins cannot join it."""
    absent = [site for site in wanted if site not in here]
    if absent or len(here) < enough:
        who = f"{', '.join(absent)} of {len(wanted)}" if absent else f"{enough - len(here)} of {enough}"
        raise ConfigError(f"sites are missing ({who}); start the job with all of them, or give other sites=")


def play(course: Course, calls: Calls, complain: Callable[[str], None]) -> None:
    """Play a course to its end: hellos, versions out of what arrives where it has any, then exchange by exchange."""
    greet_all(course, calls)
    if isinstance(course, ArrivalCourse):
        play_versions(course, calls)
    while not course.over:
        for site, (welcome, request) in course.asked().items():
            calls.ask(site, "work", *packed(site, welcome, request), patience=course.setup.wait)
        for outcome in calls.outcomes():
            try:
                course.take(outcome.site, outcome.message)
            except WireError as error:
                complain(str(error))
        course.close()
    course.end()


def play_versions(course: ArrivalCourse, calls: Calls) -> None:
    """Send sites the model as they become idle, and take what they bring, until all versions are made."""
    while not course.arrived:
        for site, (welcome, request) in course.sent().items():
            calls.ask(site, "work", *packed(site, welcome, request), patience=course.setup.wait)
        outcome = calls.outcome()
        course.arrive(outcome.site, outcome.message)
    for _ in calls.outcomes():  # those that come too late; their sites are not free before
        pass


def greet_all(course: Course, calls: Calls) -> None:
    """Begin a course with all sites of the job."""
    for site in calls.sites:
        calls.ask(site, "hello")
    for outcome in calls.outcomes():
        course.greet(outcome.site, outcome.message)
    course.begin()


def packed(site: str, welcome: Welcome, request: Request) -> tuple[bytes, bytes]:
    """A request as bytes, with the welcome of its site."""
    data = wire.encode(request)
    if len(data) > LIMITS.max_bytes:
        raise ConfigError(
            f"site '{site}', round {request.round}: a request of {len(data)} bytes is more than the "
            f"{LIMITS.max_bytes} that one call can carry; use transport='tasks'"
        )
    return wire.encode(welcome), data


class NormSite(FLComponent):
    """Answers the server's calls with a `Member`."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__()
        self.setup = setup
        self._desk = Desk()
        self._context: FLContext | None = None
        self._member: Member | None = None

    @collab.init
    def start(self) -> None:
        """Note this site's context, which the threads that work do not have."""
        self._context = collab.fl_ctx

    @collab.publish
    def hello(self, wait: float) -> bytes:
        """How this site introduces itself, or nothing where that takes longer than `wait` seconds."""
        refuse_stranger()
        return self._desk.begin(self._hello, wait)

    @collab.publish
    def work(self, welcome: bytes, request: bytes, wait: float) -> bytes:
        """What a request asks for, or nothing where it takes longer."""
        refuse_stranger()
        return self._desk.begin(lambda: self._answer(welcome, request), wait)

    @collab.publish
    def more(self, wait: float) -> bytes:
        """What the last call asked for, or nothing again."""
        refuse_stranger()
        return self._desk.more(wait)

    def _hello(self) -> Message:
        member = self._joined()
        with self._anew() as fl_ctx:
            return passed(member.hello(), fl_ctx)

    def _answer(self, welcome: bytes, request: bytes) -> Message:
        greeting, asked = wire.decode(welcome, limits=LIMITS), wire.decode(request, limits=LIMITS)
        if not isinstance(greeting, Welcome) or not isinstance(asked, Request):
            raise WireError("the server sent something else than a welcome and a request; it is not fednorm's")
        member = self._joined()
        with self._anew() as fl_ctx:
            allowed = passed(asked, fl_ctx, greeting)
            if not isinstance(allowed, Request):
                raise WireError("a filter made something else of a request; take it out of the chain of task data")
            answer = passed(member.answer(greeting, allowed), fl_ctx)
        if isinstance(answer, Update):
            sent = Sent.by(member.site(greeting).sites.phase(asked.phase).schema)
            check_update(answer, asked.address, sent.shared, sent.reported, sender=greeting.client)
        return answer

    def _joined(self) -> Member:
        if self._member is None:
            self._member = member_of(self, self.setup, self._where())
        return self._member

    def _where(self) -> FLContext:
        """This site's context; a method, since Collab reads all attributes of an object before it sets it up."""
        if self._context is None:
            raise WireError("this site was asked for something before NVFlare had set it up; start the job anew")
        return self._context

    def _anew(self) -> AbstractContextManager[FLContext]:
        """A context for one message and its answer."""
        return cast(Any, self._where().get_engine()).new_context()


def refuse_stranger() -> None:
    """Answer the server alone: over Collab any site of a job can call any other."""
    if collab.caller != SERVER:
        raise WireError(f"'{collab.caller}' called this site; it answers the server alone")


class NormCollabController(CollabController):
    """Collab's own workflow under a name of ours, so that a site which permits `fednorm.nvflare` permits it too."""


class NormCollabExecutor(CollabExecutor):
    """Its counterpart at the sites."""


def add_parts(job: FedJob, setup: Setup, min_clients: int) -> None:
    """What a Collab recipe adds to a job, without the copies of our files that would make it bring its own code."""
    server = job.to_server(NormServer(setup.to_json(), min_clients), id="fednorm_server")
    job.to_server(NormCollabController(server_obj_id=server), id="controller")
    site = job.to_clients(NormSite(setup.to_json()), id="fednorm_site")
    job.to_clients(NormCollabExecutor(client_obj_id=site), id="executor", tasks=["*"])
