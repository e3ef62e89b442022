"""How long clients take: the time of a job's download, training and upload, as data.

Times are in units of the schedule's own; nothing waits for them. A client's means are drawn once and stay, single jobs
lie around them, and every draw is a function of the seed, the client and the job, so that there is nothing to save.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, cast, runtime_checkable

from torch import Tensor

from fednorm.core import rng
from fednorm.core.factories import Factories
from fednorm.core.user_code import UserCode
from fednorm.engines.clock.schedule_file import FILE, LONGEST, Row, read_rows
from fednorm.errors import ConfigError
from fednorm.halves.wire_format import short

Around = Literal["fixed", "exponential", "uniform"]


class Times(NamedTuple):
    """How long the parts of one job take."""

    download: float
    compute: float
    upload: float


@runtime_checkable
class Schedule(Protocol):
    """What tells the times of jobs; a number of the job is its place among all jobs of a run, from 1."""

    def times(self, seed: int, client: int, job: int) -> Times: ...


@dataclass(frozen=True)
class Clients:
    """The clients of a run, for schedules that name single ones."""

    count: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Span:
    """How long one part of a job takes: each client has one of some means, and its jobs lie around that."""

    means: tuple[float, ...] = (0.0,)
    shares: tuple[float, ...] = (1.0,)
    """how many clients have each of the means, as shares of all"""
    around: Around = "fixed"
    width: float = 0.0
    """of a uniform spread, to either side"""

    def mean(self, luck: float) -> float:
        """The mean of a client with this luck, a number in [0, 1).

        >>> span = Span((1.0, 1.3, 1.6), (0.25, 0.5, 0.25))
        >>> span.mean(0.0), span.mean(0.25), span.mean(0.999)
        (1.0, 1.3, 1.6)
        """
        total = 0.0
        for mean, share in zip(self.means, self.shares, strict=True):
            total += share
            if luck < total:
                return mean
        return self.means[-1]

    def drawn(self, mean: float, luck: float) -> float:
        """The time of a job with this luck."""
        if self.around == "exponential":
            return -mean * math.log1p(-luck)
        if self.around == "uniform":
            return max(0.0, mean + self.width * (2 * luck - 1))
        return mean


@dataclass(frozen=True)
class Drawn:
    """A schedule by three spans."""

    download: Span = Span()
    compute: Span = Span()
    upload: Span = Span()

    def times(self, seed: int, client: int, job: int) -> Times:
        spans = (self.download, self.compute, self.upload)
        means = _luck_of_life(seed, client)
        lucks = _luck(rng.key(seed, "times", client, job))
        both = zip(spans, means, lucks, strict=True)
        return Times(*(span.drawn(span.mean(own), luck) for span, own, luck in both))


@dataclass(frozen=True)
class Listed:
    """A schedule whose means were read from a file."""

    rows: tuple[Row, ...]
    """one a client"""

    def times(self, seed: int, client: int, job: int) -> Times:
        row = self.rows[client]
        luck = _luck(rng.key(seed, "times", client, job))[1]
        return Times(row.download, Span(around=row.around).drawn(row.compute, luck), row.upload)


@dataclass(frozen=True)
class Asked:
    """A schedule that is a function of a user's: (seed, client, job) -> (download, compute, upload)."""

    name: str
    function: Callable[[int, int, int], tuple[float, float, float]]

    def times(self, seed: int, client: int, job: int) -> Times:
        with UserCode(f"schedule '{self.name}'"):
            given = self.function(seed, client, job)
        try:
            told = Times(*map(float, given))
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(
                f"schedule '{self.name}' gives client {client} {short(given)}; give three numbers, "
                "the times of download, training and upload"
            ) from None
        for part, value in told._asdict().items():
            if not 0 <= value <= LONGEST:  # also refuses NaN
                raise ConfigError(
                    f"schedule '{self.name}' gives client {client} a {part} of {value}; give 0 up to {LONGEST:g}"
                )
        return told


SCHEDULES = Factories[Schedule](
    "schedule",
    "exponential(mean=1.0)",
    given=Clients,
    returns=Schedule,
    called="schedule: an object with `times`",
    beside=f"{FILE}PATH",
)


def register_schedule(name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Make a function available as a schedule: (seed, client, job) -> (download, compute, upload).

    Its further keyword arguments are the options of an expression. It should draw with `fednorm.core.rng`, by its
    arguments alone: a run that goes on asks it again.
    """

    def add(function: Callable[..., object]) -> Callable[..., object]:
        SCHEDULES.register(name)(_factory(name, function))
        return function

    return add


def _factory(name: str, function: Callable[..., object]) -> Callable[..., Schedule]:
    named = {"seed", "client", "job"}
    parameters = inspect.signature(function).parameters
    if not named <= parameters.keys():
        raise ConfigError(
            f"schedule '{name}' must take seed, client and job; it takes {', '.join(parameters) or 'none'}"
        )

    @functools.wraps(function)
    def make(**options: object) -> Schedule:
        def ask(seed: int, client: int, job: int) -> tuple[float, float, float]:
            return cast("tuple[float, float, float]", function(seed=seed, client=client, job=job, **options))

        return Asked(name, ask)

    kept = [parameter for key, parameter in parameters.items() if key not in named]
    vars(make)["__signature__"] = inspect.Signature(kept)
    return make


@SCHEDULES.register("default")
def default() -> Schedule:
    """Download 0.1; training exponential with a mean of 1, 1.3 or 1.6; upload about 0.15 or 0.25 (FedRevive)."""
    compute = Span((1.0, 1.3, 1.6), (0.25, 0.5, 0.25), "exponential")
    return Drawn(Span((0.1,)), compute, Span((0.15, 0.25), (0.5, 0.5), "uniform", 0.02))


@SCHEDULES.register("shifted")
def shifted() -> Schedule:
    """Ten times quicker training: download 0.02, training exponential, upload about 0.05 or 0.1 (FedRevive)."""
    return Drawn(Span((0.02,)), Span((0.1,), around="exponential"), Span((0.05, 0.1), (0.5, 0.5), "uniform", 0.01))


@SCHEDULES.register("exponential")
def exponential(mean: float = 1.0) -> Schedule:
    """Training exponential with one mean for all, nothing else takes time."""
    return Drawn(compute=Span((_positive("exponential", "mean", mean),), around="exponential"))


@SCHEDULES.register("equal")
def equal(time: float = 1.0) -> Schedule:
    """Every job takes the same time."""
    return Drawn(compute=Span((_positive("equal", "time", time),)))


def make_schedule(text: str, clients: Clients) -> Schedule:
    """The schedule that an expression names, or the one in the file of `file:PATH`.

    >>> make_schedule("equal(time=2)", Clients(3)).times(0, 1, 1)
    Times(download=0.0, compute=2.0, upload=0.0)
    """
    if text.startswith(FILE):
        return Listed(read_rows(Path(text.removeprefix(FILE)), clients.count, clients.names))
    return SCHEDULES.make(text, clients)[1]


def digest_of_file(schedule: Schedule) -> str:
    """What a file of times said, for a run that goes on to tell whether it still does; empty without a file."""
    return hashlib.sha256(repr(schedule.rows).encode()).hexdigest() if isinstance(schedule, Listed) else ""


def _positive(name: str, option: str, value: float) -> float:
    if not 0 < value <= LONGEST:  # also refuses NaN
        raise ConfigError(
            f"schedule '{name}': {option}={value} is out of range; give a number above 0, up to {LONGEST:g}"
        )
    return value


def _luck(key: Tensor) -> list[float]:
    """A number in [0, 1) for each part of a job."""
    return cast(list[float], rng.uniform(key, (3,)).double().tolist())  # pyright: ignore[reportUnknownMemberType]


@functools.lru_cache(maxsize=1 << 16)
def _luck_of_life(seed: int, client: int) -> list[float]:
    """What a client's means are drawn by, which every job of it asks for."""
    return _luck(rng.key(seed, "mean times", client))
