"""Which updates of an exchange may be merged: all checks on what came, in one place for a server that has it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fednorm.core.state import Tree
from fednorm.halves.guard import Allowed, flaws
from fednorm.halves.messages import Update
from fednorm.halves.norm_bound import refused_by_distance
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.stacks import Stacks


class Admitted(NamedTuple):
    """Updates that can be used, their stacks where these are at hand, and why the others cannot."""

    usable: list[Update]
    stacks: Stacks | None
    refused: dict[int, str]


def admitted(
    phase: PreparedPhase,
    updates: Sequence[Update],
    server: Tree,
    allowed: Mapping[int, Allowed],
    norm_factor: float | None,
) -> Admitted:
    """Updates of different clients, ascending by client id, after every check."""
    stacks = Stacks([update.shared for update in updates])
    found = flaws(updates, phase.schema, stacks, measures=phase.phase.measures, allowed=allowed, server=server)
    refused = {update.client: why for update, why in zip(updates, found, strict=True) if why}
    sound = [update for update in updates if update.client not in refused]
    if refused:
        stacks = Stacks([update.shared for update in sound])
    far = refused_by_distance(sound, stacks, server, phase.schema, norm_factor)
    usable = [update for update in sound if update.client not in far]
    return Admitted(usable, None if far else stacks, {**refused, **far})
