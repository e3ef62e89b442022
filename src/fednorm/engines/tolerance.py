"""Training in which a client may fail: it is named, and the others are trained all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fednorm.core.user_code import described, is_users, user_error
from fednorm.errors import ExampleError, FednormError, UserCodeError, first_line
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.training import Job, Outcome


@dataclass(frozen=True)
class Failure:
    """A client whose training failed, and what failed."""

    client: int
    why: str

    @classmethod
    def of(cls, client: int, error: Exception, model: str) -> Failure:
        """What is said of an error, which is the same wherever it was raised."""
        error = user_error(error, model) if not isinstance(error, FednormError) and is_users(error) else error
        text = first_line(error) if isinstance(error, FednormError) else described(error)
        return cls(client, f"its training failed ({text})")


Train = Callable[[PreparedPhase, Sequence[Job], bool], Iterator[Outcome]]
Tolerant = Callable[[PreparedPhase, Sequence[Job], bool], Iterator[Outcome | Failure]]


def one_by_one(train: Train, model: str) -> Tolerant:
    """Training that goes on client by client where it fails, so that only those are lost that fail alone too.

    What is wrong with the run as a whole, such as a setting, still ends it; so does whatever fails in lock-step, where
    nobody can do without the others.
    """

    def tolerant(phase: PreparedPhase, jobs: Sequence[Job], probing: bool) -> Iterator[Outcome | Failure]:
        try:
            begun = train(phase, jobs, probing)  # now, since an engine may work on until somebody asks
        except Exception as error:
            begun = _raising(error)
        return outcomes(begun, phase, jobs, probing)

    def outcomes(
        begun: Iterator[Outcome], phase: PreparedPhase, jobs: Sequence[Job], probing: bool
    ) -> Iterator[Outcome | Failure]:
        waiting = {job.client: job for job in jobs}
        try:
            for outcome in begun:
                waiting.pop(outcome.update.client, None)
                yield outcome
            return
        except Exception as error:
            if is_the_runs(error) or phase.phase.lockstep:
                raise
        for job in waiting.values():
            try:
                yield from train(phase, [job], probing)
            except Exception as error:
                if is_the_runs(error):
                    raise
                yield Failure.of(job.client, error, model)

    return tolerant


def _raising(error: Exception) -> Iterator[Outcome]:
    """What training brings that failed before it brought anything."""
    yield from ()
    raise error


def is_the_runs(error: Exception) -> bool:
    """Whether an error says that the run cannot work, not that one client's training failed."""
    return isinstance(error, FednormError) and not isinstance(error, UserCodeError | ExampleError)
