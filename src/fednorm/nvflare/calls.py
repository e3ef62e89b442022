"""Calls to sites over NVFlare's Collab API: many under way at once, none of them longer than a moment.

A site may train for hours, and a call that waits for hours would not notice that the site is gone. So a site that has
not finished says so after `WAIT` seconds and is asked again; one that says nothing at all for `SILENCE` more is gone.
Messages go as the bytes of `fednorm.halves.wire`: tensors are fetched in a call of their own, which takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

from nvflare.collab.api.exceptions import RunAborted

from fednorm.errors import FednormError, WireError, first_line
from fednorm.halves import wire
from fednorm.halves.messages import Message, Refusal

WAIT = 5.0
"""Seconds after which a site that is still at work says so."""
SILENCE = 30.0
"""Seconds more without a sign of life after which a site is gone; bytes that flow are one."""
LIMITS = wire.Limits(max_bytes=(1 << 32) - 1, max_entries=1 << 16, max_header=1 << 26)
"""NVFlare's own format holds no longer bytes."""
_LOOK = 0.5
"""Seconds after which one who waits looks whether the job was aborted."""


@dataclass(frozen=True)
class Outcome:
    """What became of a call: what the site says, or a refusal where it says nothing."""

    site: str
    message: Message


class Calls:
    """Calls that are under way, one a site at a time, and their outcomes in the order they come."""

    def __init__(self, proxies: Mapping[str, Any], is_aborted: Callable[[], bool]) -> None:
        self.sites = sorted(proxies)
        self.under_way: set[str] = set()
        self._proxies, self._is_aborted = proxies, is_aborted
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()

    def ask(self, site: str, function: str, *arguments: bytes, patience: float = 0.0) -> None:
        """Call a function of a site's, for `patience` seconds at most unless that is 0; `outcome` will tell."""
        self.under_way.add(site)
        told = site, function, arguments, patience
        Thread(target=self._call, args=told, daemon=True, name=f"ask {site}").start()

    def outcomes(self) -> Iterator[Outcome]:
        """The outcomes of all calls that are under way, as they come."""
        while self.under_way:
            yield self.outcome()

    def outcome(self) -> Outcome:
        """The next outcome; a `RunAborted` once the job is."""
        while not self._is_aborted():
            try:
                outcome = self._outcomes.get(timeout=_LOOK)
            except Empty:
                continue
            self.under_way.discard(outcome.site)
            return outcome
        raise RunAborted("the job was aborted while fednorm waited for its sites")

    def _call(self, site: str, function: str, arguments: tuple[bytes, ...], patience: float) -> None:
        began, proxy = time.monotonic(), self._proxies[site](timeout=WAIT + SILENCE)
        try:
            data = getattr(proxy, function)(*arguments, WAIT)
            while not data and not (patience and time.monotonic() - began > patience):
                data = proxy.more(WAIT)
            late = Refusal(f"it had no answer after {patience:g} s")
            message = wire.decode(data, limits=LIMITS) if data else late
        except Exception as error:  # whatever failed there or on the way is this site's outcome, not the server's end
            message = Refusal(_why(error))
        self._outcomes.put(Outcome(site, message))


def _why(error: Exception) -> str:
    """Why a call failed, without the frame that Collab puts around it."""
    cause = getattr(error, "cause", error)
    if isinstance(cause, TimeoutError):
        return f"it gave no sign of life for {WAIT + SILENCE:g} s"
    if getattr(error, "cause_type", "") == "str":  # not an exception of the site's: the message did not get there
        return "it cannot be reached; its process has ended, or the network"
    return first_line(cause if isinstance(cause, BaseException) else RuntimeError(cause))


class Desk:
    """A site's side of `Calls`: one piece of work after the other, away from the threads that answer calls."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._last: Future[bytes] | None = None

    def begin(self, work: Callable[[], Message], wait: float) -> bytes:
        """Begin a piece of work: its message, or nothing where it takes longer."""
        with self._lock:
            before, self._last = self._last, Future()
            Thread(target=_do, args=(work, before, self._last), daemon=True, name="fednorm site").start()
        return self.more(wait)

    def more(self, wait: float) -> bytes:
        """The message of the last piece of work, or nothing while there is none yet."""
        last = self._last
        if last is None:
            raise WireError("nothing was begun here; ask this site anew")
        try:
            return last.result(timeout=wait)
        except TimeoutError:
            return b""


def _do(work: Callable[[], Message], before: Future[bytes] | None, mine: Future[bytes]) -> None:
    if before is not None:
        before.exception()  # what the server waits for no longer is finished first: there is one state to work on
    try:
        mine.set_result(wire.encode(work()))
    except FednormError as error:
        mine.set_result(wire.encode(Refusal(str(error))))
    except BaseException as error:
        mine.set_exception(error)
