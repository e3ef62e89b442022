"""Probes: quantities to look at, of a client's last step, of its work or of the merge; looking changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fednorm.core.state import Tree

if TYPE_CHECKING:
    from fednorm.core.method import Facts
    from fednorm.core.step import Carry

See = Callable[[Tree, "Carry", "Carry", "Facts"], Tensor]
"""(gradients, client before its last step, after it, facts) -> a scalar, or what `Tell` makes one of."""

Tell = Callable[[Tensor | None, Tree, Tree, "Facts"], Tensor]
"""(what was seen of the last step, state at the end of a client's work, state at its start, facts) -> a scalar."""


@dataclass(frozen=True)
class Merged:
    """The running statistics around a merge, each a vector over all channels of all layers."""

    before: Tensor
    """of the server"""
    after: Tensor
    variance: Tensor
    """over the clients, of those they end with"""


Join = Callable[[Merged], Tensor]
"""Statistics around a merge -> a scalar of the round."""


@dataclass(frozen=True)
class Probe:
    """A quantity to look at: of a step (`see`), of a client's work (`tell`, with `see` of both), or of all (`join`)."""

    name: str
    summary: str
    see: See | None = None
    tell: Tell | None = None
    join: Join | None = None


def told(probes: Iterable[Probe], seen: Tree, end: Tree, start: Tree, facts: Facts) -> dict[str, float]:
    """What probes tell of a client's work; those of a step are silent where a phase only observed."""
    found: dict[str, float] = {}
    for probe in probes:
        if probe.see is not None and probe.name not in seen:
            continue
        own = seen.get(probe.name)
        value = own if probe.tell is None else probe.tell(own, end, start, facts)
        if value is not None:
            found[probe.name] = float(value)
    return found
