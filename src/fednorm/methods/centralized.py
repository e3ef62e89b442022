"""Centralized: one model trains on everybody's data, as if there were no federation."""

from dataclasses import replace

from fednorm.core.claims import DATA
from fednorm.core.method import Part
from fednorm.core.registry import register
from fednorm.pieces.changes import chain, keep


@register(
    "centralized",
    paper="baseline",
    summary="one model on the union of all data, with the clients' batches joined",
)
def centralized() -> Part:
    return Part(
        chain(lambda method: replace(method, data="union"), keep(optimizer="local")),
        claims=frozenset({DATA, "policy:optimizer"}),
    )
