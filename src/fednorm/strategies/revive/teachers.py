"""The clients' models that came last, and what the server believes of their classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.core.state import Tree
from fednorm.strategies.revive.network import Mode, Network

PROBED_UPLOADS = 2
"""of each client"""
PROBE_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Teacher:
    """A client's model as it arrived."""

    client: int
    tree: Tree
    proportions: Tensor
    """q_k, shares of the classes (C,)"""
    mode: Mode = "still"


def common_mode(teachers: Sequence[Teacher]) -> Mode | None:
    """How all of them are run, if all are run alike."""
    mode = teachers[0].mode
    return mode if all(teacher.mode == mode for teacher in teachers) else None


def stack_of(teachers: Sequence[Teacher]) -> Tree:
    """Their trees as one, with a row for each."""
    return {key: torch.stack([teacher.tree[key] for teacher in teachers]) for key in teachers[0].tree}


def with_teacher(teachers: Sequence[Teacher], new: Teacher, most: int) -> list[Teacher]:
    """The newest first, no more than some; what is newly believed of a client holds for its older models too."""
    known = [replace(each, proportions=new.proportions) if each.client == new.client else each for each in teachers]
    return [new, *known][:most]


@torch.no_grad()
def probe(network: Network, tree: Tree, mode: Mode, inputs: Tensor, temperature: float) -> Tensor:
    """What a model makes of noise: the mean over inputs of softmax(logits / temperature), float64 (C,)."""
    return torch.softmax(network(tree, inputs, mode).double() / temperature, -1).mean(0)


def noise(key: Tensor, count: int, shape: Sequence[int], like: Tensor) -> Tensor:
    """Gaussian inputs."""
    return rng.normal(key.to(like.device), (count, *shape)).to(like)


@dataclass(frozen=True)
class Belief:
    """A client's class proportions as its first uploads were probed: the mean of them, then it stays."""

    proportions: Tensor
    uploads: int = 0

    def after(self, probed: Tensor) -> Belief:
        """With one more upload."""
        count = self.uploads + 1
        return Belief((self.proportions * self.uploads + probed) / count, count)
