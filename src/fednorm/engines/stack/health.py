"""Whether clients' numbers can be used, found out inside a program: of what they would send or keep, no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from fednorm.engines.stack.row_matrix import Flats, RowMatrix
from fednorm.halves.guard import cannot_be_negative
from fednorm.halves.prepared_phase import PreparedPhase

FINE, NOT_FINITE, NEGATIVE = 1.0, 0.0, -1.0
"""What the log says of a client's numbers."""


def health(
    phase: PreparedPhase, flats: Mapping[str, Flats], stacks: Mapping[str, RowMatrix], unsigned: Flats
) -> Tensor:
    """For each client FINE, or what is wrong with the numbers that it would send or keep."""
    rows = next(flat for part in flats.values() for flat in part.values())
    found = _finite(list(_checked(phase, flats, stacks)))
    finite = torch.ones(len(rows), dtype=torch.bool, device=rows.device) if found is None else found
    told = finite.to(torch.float64)
    below = [(flats["state"][name] * counts).amin(1) < 0 for name, counts in unsigned.items()]
    return torch.where(reduce(torch.logical_or, below), NEGATIVE * told, told) if below else told


def unsigned(phase: PreparedPhase, layout: RowMatrix, device: torch.device) -> Flats:
    """For the numbers of each type that are not trained, 1 where they may not be negative, as variances may not."""
    checked = {*phase.shared, *phase.kept}
    found: Flats = {}
    for name, keys in layout.keys.items():
        entries = [phase.schema[key][0] for key in keys]
        parts = [
            torch.full((entry.size,), float(cannot_be_negative(entry) and entry.key in checked)) for entry in entries
        ]
        counts = torch.cat(parts).to(device, entries[0].dtype)
        if bool(counts.any()):
            found[name] = counts
    return found


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


def _finite(checked: Sequence[Tensor]) -> Tensor | None:
    """Whether all numbers of each row are: a sum is if its terms are, and is quicker where it cannot overflow."""
    found = [rows.isfinite().all(1) for rows in checked if rows.dtype is torch.float64]
    sums = [rows.sum(1, dtype=torch.float64) for rows in checked if rows.dtype is not torch.float64]
    if sums:
        total = reduce(torch.add, sums)
        found.append(total - total == 0)
    return reduce(torch.logical_and, found) if found else None
