"""CA2FL: the server remembers every client's last update, so that those who are not in the buffer count as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fednorm.core.reductions import wide
from fednorm.core.state import Tree
from fednorm.core.strategy import Arrived, Context, Memory, Strategy
from fednorm.core.strategy_registry import register_strategy


@dataclass(frozen=True)
class CachedUpdates:
    """v = h + mean over the buffer of (Delta_k - h_k), h_k the client's last update, h the mean of all clients' h_k.

    Then h_k <- Delta_k. Clients that never came have h_k = 0. One model for each client that came is remembered.
    """

    def begin(self, context: Context) -> Memory:
        return Memory({"clients": len(context.clients)}, {})

    def revise(
        self, arrivals: Sequence[Arrived], server: Tree, memory: Memory, context: Context
    ) -> tuple[Sequence[Tree | None], Memory]:
        cached, count = dict(memory.tree), int(memory.facts["clients"])
        common = {key: cached[f"mean|{key}"] for key in server if f"mean|{key}" in cached}
        merged: list[Tree | None] = []
        for each in arrivals:
            values: Tree = {}
            for key, value in each.moved.items():
                old, mean = memory.tree.get(f"{each.client}|{key}"), common.get(key)
                values[key] = value if old is None else value - old
                values[key] = values[key] if mean is None else values[key] + mean
            merged.append(values)
        for each in arrivals:
            for key, value in each.moved.items():
                own, new = f"{each.client}|{key}", value - wide(server[key])
                gone = new if own not in cached else new - cached[own]
                cached[own] = new
                cached[f"mean|{key}"] = gone / count + cached.get(f"mean|{key}", 0.0)
        return merged, Memory(memory.facts, cached)


@register_strategy(
    "ca2fl",
    paper="Wang, Cao, Wu, Chen 2024, ICLR",
    summary="b updates make a version, calibrated by the last updates of all clients, which the server remembers",
    reconstruction=True,
)
def ca2fl(
    b: int = 10,
    lr: float = 1.0,
    statistics: Literal["values", "fresh"] = "values",
    fresh: int = 0,
) -> Strategy:
    return Strategy(buffer=b, rate=lr, weights="uniform", statistics=statistics, fresh=fresh, revise=CachedUpdates())
