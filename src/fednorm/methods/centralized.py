"""Centralized: one model trains on everybody's data, as if there were no federation."""

from dataclasses import dataclass, replace

from fednorm.core.claims import DATA
from fednorm.core.method import Method, Part
from fednorm.core.registry import register
from fednorm.pieces.changes import chain, keep


@dataclass(frozen=True)
class JoinData:
    """One model trains on all clients' data."""

    def __call__(self, method: Method) -> Method:
        return replace(method, data="union")


@register(
    "centralized",
    paper="baseline",
    summary="one model on the union of all data, in batches as large as those of a round's clients together",
)
def centralized() -> Part:
    return Part(chain(JoinData(), keep(optimizer="local")), claims=frozenset({DATA, "policy:optimizer"}))
