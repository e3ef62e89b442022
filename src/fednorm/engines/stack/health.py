"""Whether clients' numbers can be used, found out inside a program: of what they would send or keep, no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fednorm.engines.stack.row_matrix import Flats, RowMatrix
from fednorm.halves.guard import cannot_be_negative
from fednorm.halves.prepared_phase import PreparedPhase

FINE, NOT_FINITE, NEGATIVE = 1.0, 0.0, -1.0
"""What the log says of a client's numbers."""


def health(
    phase: PreparedPhase, flats: Mapping[str, Flats], stacks: Mapping[str, RowMatrix], may_be_negative: Flats
) -> Tensor:
    """For each client FINE, or what is wrong with the numbers that it would send or keep."""
    found = [_all_finite(flat) for flat in _checked(phase, flats, stacks)]
    rows = next(flat for part in flats.values() for flat in part.values())
    finite = torch.stack(found).all(0) if found else torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    told = torch.where(finite, FINE, NOT_FINITE)
    least = [torch.where(mask, 0, flats["state"][name]).amin(1) >= 0 for name, mask in may_be_negative.items()]
    if least:
        told = torch.where(finite & ~torch.stack(least).all(0), NEGATIVE, told)
    return told.to(torch.float64)


def signed(phase: PreparedPhase, layout: RowMatrix, device: torch.device) -> Flats:
    """For the numbers of each type that are not trained, whether they may be negative: variances may not."""
    checked = {*phase.shared, *phase.kept}
    masks: Flats = {}
    for name, keys in layout.keys.items():
        entries = [phase.schema[key][0] for key in keys]
        parts = [
            torch.full((entry.size,), not (cannot_be_negative(entry) and entry.key in checked)) for entry in entries
        ]
        mask = torch.cat(parts).to(device)
        if not bool(mask.all()):
            masks[name] = mask
    return masks


def _checked(phase: PreparedPhase, flats: Mapping[str, Flats], stacks: Mapping[str, RowMatrix]) -> Iterator[Tensor]:
    """Numbers that go to the server or stay with clients, as rows; what starts anew next time may be anything."""
    counts = {*phase.shared, *phase.kept}
    for part, each in flats.items():
        for name, keys in stacks[part].keys.items():
            if each[name].is_floating_point() and counts.issuperset(keys):
                yield each[name]
            elif each[name].is_floating_point():
                rows = stacks[part].rows(each)
                yield from (rows[key] for key in keys if key in counts)


def _all_finite(rows: Tensor) -> Tensor:
    """Whether all numbers of each row are: a sum is if its terms are, and is quicker where it cannot overflow."""
    if rows.dtype is torch.float64:
        return rows.isfinite().all(1)
    return rows.sum(1, dtype=torch.float64).isfinite()
