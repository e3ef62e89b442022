"""What comes of clients' training in one place: one answer of each that was asked, and why it cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from fednorm.core.state import Tree
from fednorm.engines.tolerance import Failure
from fednorm.halves.guard import Allowed, flaws, flaws_of_kept
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.server import DID_NOT_ANSWER
from fednorm.halves.site import Sites
from fednorm.halves.stacks import Stacks
from fednorm.halves.training import Job, Outcome
from fednorm.halves.wire_format import short

log = logging.getLogger("fednorm.engines")


def received(trained: Iterable[Outcome | Failure], jobs: Sequence[Job]) -> tuple[list[Outcome], dict[int, str]]:
    """The outcomes of clients that were asked, one of each, ascending by client id; and why others are missing."""
    asked = {job.client for job in jobs}
    came: dict[int, Outcome] = {}
    missing: dict[int, str] = {}
    for each in trained:
        if isinstance(each, Failure):
            missing[each.client] = each.why
            continue
        client = each.update.client
        if type(client) is not int or client not in asked:
            log.warning("client %s was not asked; its answer was ignored", short(client))
        elif client in came:
            log.warning("client %d answered twice; the second answer was ignored", client)
        else:
            came[client] = each
    missing |= dict.fromkeys(sorted(asked - came.keys() - missing.keys()), DID_NOT_ANSWER)
    return [came[client] for client in sorted(came)], missing


def flaws_of_outcomes(
    sites: Sites,
    phase: PreparedPhase,
    server: Tree | Sequence[Tree],
    outcomes: Sequence[Outcome],
    jobs: Sequence[Job],
    stacks: Stacks,
) -> dict[int, str]:
    """Why outcomes cannot be used, by client: of their jobs, with the stacks of what they would share.

    `server` is the tree they began at, or one for each of them.
    """
    updates = [outcome.update for outcome in outcomes]
    allowed = {job.client: Allowed(sites.batches.num_examples(job.client), job.num_steps) for job in jobs}
    sent = flaws(updates, phase.schema, stacks, measures=phase.phase.measures, allowed=allowed, server=server)
    kept = flaws_of_kept(
        [outcome.kept for outcome in outcomes],
        phase.schema,
        [job.start for job in jobs],
        [job.num_steps for job in jobs],
    )
    each = zip(updates, sent, kept, strict=True)
    return {update.client: why for update, own, local in each if (why := own or local)}
