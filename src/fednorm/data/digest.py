"""Digests of data: a run that goes on must go on with the data, and the division, that it was begun with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fednorm.data.client_rows import ClientRows
from fednorm.data.federation import Federation
from fednorm.data.live import LiveRows

WHOLE_BYTES = 1 << 30
"""Tensors up to this size are hashed byte by byte, at more than 1 GB a second; of larger ones, this many bytes."""
BLOCK = 1 << 20
LOOKS = 32
"""Examples that stand for all of those that are read when they are needed."""


def data_digest(federation: Federation) -> str:
    """A federation's data and division as one digest."""
    return hashlib.sha256(repr(data_digests(federation)).encode()).hexdigest()


def data_digests(federation: Federation) -> dict[str, str]:
    """Short digests of the parts of a federation, by what a person would call them."""
    x, y = _looked_at(federation.live) if federation.live else (federation.x, federation.y)
    test_x, test_y = (
        _looked_at(federation.live_test) if federation.live_test else (federation.test_x, federation.test_y)
    )
    parts = {
        "training inputs": tensor_digest(x),
        "training labels": tensor_digest(y),
        "clients": rows_digest(federation.clients),
        "test inputs": tensor_digest(test_x),
        "test labels": tensor_digest(test_y),
        "own test rows": rows_digest(federation.own_test),
    }
    return {name: digest[:16] for name, digest in parts.items()}


def _looked_at(rows: LiveRows) -> tuple[Tensor, Tensor]:
    """Some examples that lie evenly over all: what is not in memory would take as long to hash as to train on."""
    some = torch.linspace(0, len(rows) - 1, min(LOOKS, len(rows)), dtype=torch.float64).long()
    return next(rows.parts(some, LOOKS))


def tensor_digest(tensor: Tensor) -> str:
    """The digest of a tensor's type, shape and bytes.

    Of more than 1 GiB, blocks that lie evenly over it are hashed, together with a sum over all of its bytes, which no
    single change leaves as it was and which costs as much as reading them.
    """
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    if flat.nbytes <= WHOLE_BYTES:
        found.update(_bytes(flat))
        return found.hexdigest()
    whole = len(flat) - len(flat) % 8
    found.update(repr((int(flat[:whole].view(torch.int64).sum()), flat[whole:].tolist())).encode())
    stride = len(flat) // (WHOLE_BYTES // BLOCK)
    for start in range(0, len(flat), stride):
        found.update(_bytes(flat[start : start + BLOCK]))
    return found.hexdigest()


def _bytes(flat: Tensor) -> memoryview:
    """A tensor's bytes, where they lie."""
    return memoryview(cast("Any", flat.numpy()))


def rows_digest(rows: Sequence[Tensor]) -> str:
    """The digest of which rows are whose."""
    if isinstance(rows, ClientRows):
        compact = (rows.starts, rows.stops) if rows.rows is None else (rows.starts, rows.stops, rows.rows)
        return hashlib.sha256(repr([tensor_digest(part) for part in compact]).encode()).hexdigest()
    each = {id(part): tensor_digest(part) for part in {id(part): part for part in rows}.values()}
    found = hashlib.sha256()
    for part in rows:
        found.update(each[id(part)].encode())
    return found.hexdigest()
