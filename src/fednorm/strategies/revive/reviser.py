"""FedRevive at the server: what becomes of updates that arrive before they make a version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fednorm.core.reductions import wide
from fednorm.core.state import Entry, Kind, Tree
from fednorm.core.strategy import Arrived, Context, Memory
from fednorm.strategies.revive.recall import Recall
from fednorm.strategies.revive.server_step import ServerStep
from fednorm.strategies.revive.settings import Settings


@dataclass(frozen=True)
class Revive:
    """The staler an update is, the more of it is replaced by what its model and the last others know."""

    settings: Settings

    def begin(self, context: Context) -> Memory:
        return ServerStep(self.settings, context).begin().memory()

    def revise(
        self, arrivals: Sequence[Arrived], server: Tree, memory: Memory, context: Context
    ) -> tuple[Sequence[Tree | None], Memory]:
        step = ServerStep(self.settings, context)
        recall = step.recall(memory)
        for each in arrivals:  # a client's own model is among its teachers
            step.take(recall, each)
        version, betas = arrivals[0].version, [self.settings.beta(each.staleness) for each in arrivals]
        if version < self.settings.freeze or not any(betas):
            return [None] * len(arrivals), recall.memory()
        changes = _changes(step, recall, arrivals[-1], server, version)
        blended = [
            _blended(each.moved, server, changes, beta) if beta else None
            for each, beta in zip(arrivals, betas, strict=True)
        ]
        return blended, recall.memory()


def _changes(step: ServerStep, recall: Recall, newest: Arrived, server: Tree, version: int) -> dict[str, Tensor]:
    """Delta_KD, in float64, of what is trained; empty, which is zero, up to the end of the warm-up."""
    student = {key: server.get(key, value) for key, value in step.context.initial.items()}
    if step.is_due(recall, version):
        step.synthesise(recall, student, newest.base, version)
    if version <= step.settings.warmup:
        return {}
    keys = [key for key in newest.moved if _trains(step.context.facts.entries.get(key), newest.hold)]
    taught = step.distil(recall, student, keys, version, newest.hold).trained
    return {key: wide(value) - wide(server[key]) for key, value in taught.items()}


def _trains(entry: Entry | None, hold: frozenset[Kind]) -> bool:
    """Whether the student learns an entry; what a method declares for itself is none of the model's."""
    if entry is None or not entry.trainable:
        return False
    return not (entry.kind in hold and entry.batch_norm)


def _blended(moved: Tree, server: Tree, changes: Tree, beta: float) -> Tree:
    """w + (1 - beta) Delta + beta Delta_KD, in float64."""
    found: Tree = {}
    for key, value in moved.items():
        now = wide(server[key])
        found[key] = now + (1 - beta) * (value - now)
        if key in changes:
            found[key] = found[key] + beta * changes[key]
    return found
