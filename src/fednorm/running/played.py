"""What runs in rounds and runs on a clock have in common: an engine, an end before the last row, words on both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from fednorm.core.report import Report
from fednorm.engines.base import Awaited, Engine
from fednorm.engines.stack.scores import StackScorer
from fednorm.running.how_it_ran import how_it_ran
from fednorm.running.plan import Plan
from fednorm.running.records import Ran
from fednorm.running.store import Store


class PlayedRun(ABC):
    """A run in progress, whatever its rows are of."""

    unit: ClassVar[str]
    """what a row is of"""
    plan: Plan
    store: Store
    engine: Engine
    engine_name: str
    stopped: bool = False
    """whether somebody wanted the run to end before its last row"""
    _ran_before: Ran | None

    @property
    @abstractmethod
    def round(self) -> int:
        """Rounds, or versions, that are over."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether all of them are."""

    @abstractmethod
    def stop(self) -> None:
        """Commit what was played since the last checkpoint, so that an orderly stop loses nothing."""

    @property
    def over(self) -> bool:
        """Whether nothing is to be played any more."""
        return self.finished or self.stopped

    def stop_early(self) -> None:
        """End here, with all that was done committed."""
        self.stopped = True
        self.stop()

    def notes(self) -> list[str]:
        """What a user should know about how the run went."""
        early = f"stopped after {self.unit} {self.round} of {self.plan.config.rounds}; resume it to go on"
        return [*self.store.facts().get("notes", []), *([] if self.finished else [early])]

    def close(self) -> None:
        """Give back what the run holds beside memory: processes that train, and those that read."""
        self.engine.close()
        for rows in (self.plan.federation.live, self.plan.federation.live_test):
            if rows is not None:
                rows.close()

    @cached_property
    def _scorer_of_stacks(self) -> StackScorer:
        return StackScorer(self.plan)

    @property
    def stack_scorer(self) -> StackScorer | None:
        """What tests clients' own models many at once; None where the engine trains one after the other."""
        return self._scorer_of_stacks if self.engine_name == "stacked" and not self.engine.fell_back else None

    def ran(self) -> Ran:
        """What plays this run, and what played it before."""
        return how_it_ran(self.plan, self.engine_name, self.engine, self._ran_before)


def losses_of(reports: Sequence[Report]) -> dict[str, float]:
    """The training loss of a row: the mean over its clients, and over their examples."""
    if isinstance(reports, Awaited):
        each = reports.losses("all")
    else:
        each = [(report.num_examples, report.losses["all"]) for report in reports]
    return {
        "train_loss": sum(loss for _, loss in each) / len(each),
        "train_loss_weighted": sum(examples * loss for examples, loss in each) / sum(examples for examples, _ in each),
    }
