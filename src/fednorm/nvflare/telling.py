"""The one line a round that every site's log has: how many entries there are, what becomes of them, and bytes."""

from __future__ import annotations

from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.state import Policy
from fednorm.halves.agreed import Agreed
from fednorm.halves.messages import Request
from fednorm.halves.schema import keys_with

_LASTING = tuple(policy for policy in Policy if policy not in (Policy.FRESH, Policy.DROPPED))
"""Policies of entries that outlive a round."""


def round_line(agreed: Agreed, request: Request) -> str | None:
    """What a site says once its part of a round is done; None in exchanges after which the round goes on for it.

    Phases of one round are told together. Those after the last round, and statistics for a test, have lines of their
    own.
    """
    id = request.phase
    if id.purpose is Purpose.SCORE:
        return None
    ids, where = [id], f"round {request.round}, {id}"
    if id.purpose is Purpose.TRAIN:
        count = len(agreed.method.stages[id.stage])
        if id.number + 1 < count:
            return None
        ids, where = [PhaseId(Purpose.TRAIN, id.stage, number) for number in range(count)], f"round {request.round}"
    phases = [agreed.phase(each) for each in ids]
    total, shared, local = (
        {key for phase in phases for key in keys_with(phase.schema, *policies)}
        for policies in (_LASTING, (Policy.SHARED,), (Policy.LOCAL,))
    )
    up, down = sum(phase.cost.up for phase in phases), sum(phase.cost.down for phase in phases)
    counts = f"{len(total)} entries, {len(shared)} shared, {len(local)} local"
    return f"{where}: {counts}; {up} bytes up, {down} bytes down"
