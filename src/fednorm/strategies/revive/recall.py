"""What FedRevive remembers between versions, and its form in a checkpoint: JSON values and a flat tree of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fednorm.core.state import Tree
from fednorm.core.strategy import Memory
from fednorm.strategies.revive.guard import LossGuard
from fednorm.strategies.revive.pool import ImagePool
from fednorm.strategies.revive.teachers import Belief, Teacher


@dataclass
class Recall:
    """All of it, taken apart."""

    generator: Tree
    adam: Tree
    pool: ImagePool
    teachers: Sequence[Teacher] = ()
    beliefs: dict[int, Belief] = field(default_factory=dict[int, Belief])
    guard: LossGuard = field(default_factory=LossGuard)
    synthesised: int | None = None
    """the version of the last synthesis"""

    def memory(self) -> Memory:
        """As it is kept."""
        facts: dict[str, Any] = {
            "synthesised": self.synthesised,
            "guard": {name: list(values) for name, values in self.guard.accepted.items()},
            "teachers": [[each.client, each.mode] for each in self.teachers],
        }
        tree = {f"generator|{key}": value for key, value in self.generator.items()}
        tree |= {f"adam|{key}": value for key, value in self.adam.items()}
        tree |= {f"pool|{key}": value for key, value in self.pool.tree().items()}
        for number, each in enumerate(self.teachers):
            tree |= {f"teacher|{number}|{key}": value for key, value in each.tree.items()}
        if self.teachers:
            tree["proportions"] = torch.stack([each.proportions for each in self.teachers])
        if self.beliefs:
            clients = sorted(self.beliefs)
            tree["belief|clients"] = torch.tensor(clients)
            tree["belief|uploads"] = torch.tensor([self.beliefs[client].uploads for client in clients])
            tree["belief|proportions"] = torch.stack([self.beliefs[client].proportions for client in clients])
        return Memory(facts, tree)

    @classmethod
    def of(cls, memory: Memory, pool: ImagePool, device: torch.device) -> Recall:
        """As it is used, on a device; what was given stays as it is."""
        facts, parts = memory.facts, _parts(memory.tree)
        # As many as there are clients, of whom one is asked at a time: they stay on the host.
        belief = {key: value.cpu() for key, value in parts.pop("belief", {}).items()}
        parts = {part: {key: value.to(device) for key, value in tree.items()} for part, tree in parts.items()}
        pool.load(parts["pool"])
        proportions = parts[""].get("proportions")
        teachers = [
            Teacher(client, _below(parts["teacher"], str(number)), proportions[number], mode)
            for number, (client, mode) in enumerate(facts["teachers"])
            if proportions is not None
        ]
        beliefs = {
            client: Belief(row, uploads)
            for client, uploads, row in zip(
                *(_numbers(belief.get(name)) for name in ("clients", "uploads")),
                belief.get("proportions", ()),
                strict=True,
            )
        }
        guard = LossGuard({name: list(values) for name, values in facts["guard"].items()})
        return cls(
            generator=parts.get("generator", {}),
            adam=parts.get("adam", {}),
            pool=pool,
            teachers=teachers,
            beliefs=beliefs,
            guard=guard,
            synthesised=facts["synthesised"],
        )


def _numbers(tensor: Tensor | None) -> list[int]:
    return [] if tensor is None else tensor.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _parts(tree: Tree) -> dict[str, Tree]:
    """The tensors by the first word of their names."""
    found: dict[str, Tree] = {"": {}}
    for name, value in tree.items():
        part, bar, key = name.partition("|")
        found.setdefault(part if bar else "", {})[key if bar else part] = value
    return found


def _below(tree: Tree, word: str) -> Tree:
    """The tensors whose names begin with a word, by what follows it."""
    named = ((name.partition("|"), value) for name, value in tree.items())
    return {key: value for (first, _, key), value in named if first == word}
