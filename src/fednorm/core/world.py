"""What goes wrong with clients, as a function of the seed, the round and the client: some are gone, some are slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fednorm.core import rng


@dataclass(frozen=True)
class World:
    """How often clients are gone or slow in a round; the default is a world without failures."""

    seed: int = 0
    dropout: float = 0.0
    """probability that a client is gone"""
    stragglers: float = 0.0
    """probability that a client is slow"""
    slowness: float = 0.5
    """least share of its steps that a slow client does"""

    @property
    def spares_all(self) -> bool:
        """Whether no client is ever gone or slow."""
        return not (self.dropout or self.stragglers)

    def present(self, round: int, clients: Sequence[int]) -> list[int]:
        """Those of the clients that are there in a round: one at least, the last that would go.

        >>> World(dropout=0.5).present(1, range(10)) == World(dropout=0.5).present(1, range(10))
        True
        >>> len(World(dropout=1 - 1e-6).present(1, range(10)))
        1
        """
        if not self.dropout:
            return list(clients)
        luck = self._luck("dropout", round, clients)
        staying = luck >= self.dropout
        staying[luck.argmax()] = True
        return [client for client, stays in zip(clients, _listed(staying), strict=True) if stays]

    def shares(self, round: int, clients: Sequence[int]) -> dict[int, float]:
        """The share of its steps that each slow client does in a round.

        >>> found = World(stragglers=1.0, slowness=0.5).shares(1, [3, 4])
        >>> list(found), all(0.5 <= share < 1 for share in found.values())
        ([3, 4], True)
        """
        if not self.stragglers:
            return {}
        slow = self._luck("straggler", round, clients) < self.stragglers
        share = self.slowness + (1 - self.slowness) * self._luck("pace", round, clients).double()
        each = zip(clients, _listed(slow), _listed(share), strict=True)
        return {client: own for client, is_slow, own in each if is_slow}

    def _luck(self, what: str, round: int, clients: Sequence[int]) -> Tensor:
        """A number in [0, 1) for each client, whoever else is asked."""
        return rng.uniform(rng.key(self.seed, what, round, torch.tensor(list(clients))), ())


def steps_done(steps: int, share: float) -> int:
    """Steps of a client that does this share of them, one at least.

    >>> steps_done(10, 0.5), steps_done(10, 0.99), steps_done(3, 0.01)
    (5, 9, 1)
    """
    return max(1, int(steps * share))


def _listed(values: Tensor) -> list[float]:
    return cast(list[float], values.tolist())  # pyright: ignore[reportUnknownMemberType]
