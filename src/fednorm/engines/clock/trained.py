"""What jobs will bring that were trained and have not arrived yet, and how it is kept over a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fednorm.core.report import Report
from fednorm.core.state import Tree
from fednorm.halves.landing import Landing
from fednorm.halves.messages import Update
from fednorm.halves.norm_bound import Length, Moved


@dataclass(frozen=True)
class Trained:
    """What a job that was trained will bring, and what its client keeps."""

    landing: Landing
    kept: Tree
    steps: int


def stored(trained: Mapping[int, Trained]) -> tuple[list[Any], dict[str, Tree]]:
    """Outcomes by job as JSON values and trees."""
    facts: list[Any] = []
    trees: dict[str, Tree] = {}
    for number, each in trained.items():
        update, moved = each.landing.update, each.landing.moved
        report = None if update is None else vars(update.report)
        facts.append([number, each.steps, each.landing.why, moved and [*moved.distance, *moved.entries], report])
        if update is not None:
            for name, tree in (("shared", update.shared), ("reported", update.reported), ("kept", each.kept)):
                trees[f"trained {number} {name}"] = tree
    return facts, trees


def restored(facts: Sequence[Any], trees: Mapping[str, Tree]) -> dict[int, Trained]:
    """Outcomes by job, of what `stored` gave."""
    found: dict[int, Trained] = {}
    for number, steps, why, far, report in facts:
        shared, reported, kept = (trees.get(f"trained {number} {name}", {}) for name in ("shared", "reported", "kept"))
        update = None if report is None else Update(Report(**report), shared, reported)
        moved = far and Moved(Length(*far[:2]), (far[2], far[3]))
        found[number] = Trained(Landing(number, update, why, moved, looked=True), kept, steps)
    return found
