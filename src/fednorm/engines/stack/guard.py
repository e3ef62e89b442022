"""The guard in rounds that stay on the device: norms are taken inside the program and judged when it is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fednorm.core.report import Report
from fednorm.core.state import Policy, Tree
from fednorm.engines.stack.kernels.element_ops import moved
from fednorm.engines.stack.row_matrix import Flats, RowMatrix
from fednorm.halves.guard import ailment_of_report
from fednorm.halves.norm_bound import Length, Moved, are_near, too_far
from fednorm.halves.schema import Schema

NUM_MOVED = 4
"""What is told of each client: how far it moved, and the norm of what it was sent, each in two groups of entries."""


def moved_norms(
    flats: Mapping[str, Flats], stacks: Mapping[str, RowMatrix], schema: Schema, server: Tree, runs: int
) -> list[Tensor]:
    """(distance of trained entries, of others, the server's norm of both), a vector over all clients each.

    `server` has rows of runs, as `RowMatrix.rows` gives them. No value is asked for.
    """
    rows = len(next(flat for part in flats.values() for flat in part.values()))
    clients = rows // runs
    distance: tuple[list[Tensor], list[Tensor]] = [], []
    length: tuple[list[Tensor], list[Tensor]] = [], []
    for part, each in flats.items():
        for end, keys in _runs_of_keys(each, stacks[part], schema):
            begun = torch.cat([server[key] for key in keys], 1) if len(keys) > 1 else server[keys[0]]
            group = int(not schema[keys[0]][0].trainable)
            distance[group].append(moved(end, begun)[0].sqrt())
            length[group].append(_norms(begun).unsqueeze(1).expand(-1, clients).flatten())
    nothing = torch.zeros(rows, dtype=torch.float64, device=next(iter(server.values())).device)
    return [_joined(norms) if norms else nothing for norms in (*distance, *length)]


def _runs_of_keys(flats: Flats, stack: RowMatrix, schema: Schema) -> Iterator[tuple[Tensor, list[str]]]:
    """Neighbouring entries of one group that are merged, with the columns they take."""
    for name, keys in stack.keys.items():
        if not flats[name].is_floating_point():
            continue
        start, open_keys = 0, list[str]()
        at = 0
        for key in [*keys, ""]:
            group = _group(key, schema)
            if open_keys and (group is None or group != _group(open_keys[0], schema)):
                yield flats[name][:, start:at], open_keys
                open_keys = []
            if group is not None:
                start = start if open_keys else at
                open_keys.append(key)
            at += schema[key][0].size if key else 0


def _group(key: str, schema: Schema) -> bool | None:
    """Whether an entry is trained; None for one that is not merged."""
    return schema[key][0].trainable if key and schema[key][1] is Policy.SHARED else None


def _norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)


def _joined(norms: Sequence[Tensor]) -> Tensor:
    """The norm of rows side by side whose norms are known."""
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(list(norms)), dim=0)


def off_by_norms(
    clients: Sequence[int], columns: Sequence[Sequence[float]], norm_factor: float | None
) -> dict[int, str]:
    """Clients that moved too far, and why, by what `moved_norms` told of one run's."""
    trained, other, length, beside = columns
    model = Length(length[0], beside[0])
    if are_near((trained, other), model, norm_factor):
        return {}
    moved = {client: Moved(Length(a, b)) for client, a, b in zip(clients, trained, other, strict=True)}
    return too_far(moved, model, norm_factor)


def flaws_of_numbers(reports: Sequence[Report]) -> dict[int, str]:
    """Clients that report something that is no number, and why."""
    return {report.client: str(why) for report in reports if (why := ailment_of_report(report))}
