"""A client's state as bytes: its entries end to end, without names, which are stored once for all clients.

A small state would otherwise cost less than the text that describes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil

import safetensors.torch
import torch
from torch import Tensor

from fednorm.core.state import Tree
from fednorm.errors import CheckpointError, ConfigError
from fednorm.halves.mine import ClientState

RecordLayout = tuple[tuple[str, str, tuple[int, ...]], ...]
"""(key, type, shape) of the entries, in the order of their bytes."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEAD = 8
"""Bytes before the entries: the number of batches used, as a fixed width, so that a record never grows."""


def layout_of(tree: Mapping[str, Tensor]) -> RecordLayout:
    """How a tree lies in its record: wide types first, so that every entry is aligned.

    >>> layout_of({"count": torch.tensor(1, dtype=torch.int32), "mean": torch.zeros(2, dtype=torch.float64)})
    (('mean', 'float64', (2,)), ('count', 'int32', ()))
    """
    for key, tensor in tree.items():
        if tensor.dtype not in _NAMES:
            raise ConfigError(
                f"'{key}' has type {tensor.dtype}, which cannot be stored; use one of {', '.join(_DTYPES)}"
            )
    keys = sorted(tree, key=lambda key: -tree[key].element_size())
    return tuple((key, _NAMES[tree[key].dtype], tuple(tree[key].shape)) for key in keys)


def to_record(steps: int, tree: Mapping[str, Tensor], layout: RecordLayout) -> bytes:
    """A client's record. On a device the entries are joined there, for one transfer in place of many."""
    head = steps.to_bytes(_HEAD, "little", signed=True)
    if not layout:
        return head
    device = tree[layout[0][0]].device
    parts = [tree[key].detach().to(device).reshape(-1).contiguous().view(torch.uint8) for key, _, _ in layout]
    return head + torch.cat(parts).cpu().numpy().tobytes()


def from_record(layout: RecordLayout, record: bytes) -> tuple[int, Tree]:
    """(steps, tree) of a record; the tree's tensors share one piece of memory."""
    data = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    sizes = _sizes(layout)
    _check_length(len(data), sizes)
    steps = int.from_bytes(record[:_HEAD], "little", signed=True)
    _, *parts = data.split_with_sizes((_HEAD, *sizes))
    return steps, {
        key: part.view(_DTYPES[dtype]).view(shape) for (key, dtype, shape), part in zip(layout, parts, strict=True)
    }


def stack_from_records(layout: RecordLayout, records: Sequence[bytes]) -> Tree:
    """The trees of several records of one layout, with a leading client axis."""
    sizes = _sizes(layout)
    for record in records:
        _check_length(len(record), sizes)
    data = torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8).view(len(records), -1)
    _, *parts = data.split_with_sizes((_HEAD, *sizes), dim=1)
    return {
        key: part.reshape(-1).view(_DTYPES[dtype]).view(len(records), *shape)
        for (key, dtype, shape), part in zip(layout, parts, strict=True)
    }


@lru_cache(64)
def _sizes(layout: RecordLayout) -> tuple[int, ...]:
    return tuple(torch.Size(shape).numel() * _DTYPES[dtype].itemsize for _, dtype, shape in layout)


def _check_length(length: int, sizes: Sequence[int]) -> None:
    if length != _HEAD + sum(sizes):
        raise CheckpointError("a stored client state does not have the length of its layout; start the run anew")


def layout_to_text(layout: RecordLayout) -> str:
    return json.dumps(layout, separators=(",", ":"))


def layout_from_text(text: str) -> RecordLayout:
    return tuple((key, dtype, tuple(shape)) for key, dtype, shape in json.loads(text))


def page_size(row: int, default: int = 4096, slack: float = 1.05) -> int:
    """The page size of an SQLite file whose rows have this many bytes: the first that wastes little, or the least.

    A page that holds one row and most of a second costs nearly twice the data. What a row takes follows from the file
    format: rows up to a page lie side by side, of longer ones all but a first part is in pages of its own.

    >>> [page_size(row) for row in (300, 1100, 3000, 8240, 75000)]
    [16384, 1024, 2048, 2048, 4096]
    """
    sizes = sorted((2**power for power in range(10, 17)), key=lambda size: abs(size - default))
    costs = {size: _bytes_in_file(row, size) / row for size in sizes}
    return next((size for size in sizes if costs[size] <= slack), min(sizes, key=costs.__getitem__))


def _bytes_in_file(row: int, page: int) -> float:
    """https://www.sqlite.org/fileformat2.html#b_tree_pages: "Table B-Tree Leaf Cell", for rows that are appended."""
    most, least, chained = page - 35, (page - 12) * 32 // 255 - 23, page - 4
    first, pages = row, 0
    if row > most:
        surplus = least + (row - least) % chained
        first = surplus if surplus <= most else least
        pages = ceil((row - first) / chained)
    cell = first + 8 + 4 * (pages > 0)
    return pages * page + page / max(1, (page - 8) // cell)


_CONTENTS = 8
"""Bytes that say how long the list of contents is."""


def pack_states(states: Mapping[int, ClientState]) -> bytes:
    """Some clients' states: a list of contents, then the records end to end.

    >>> unpack_states(pack_states({3: ClientState(7)}))
    {3: ClientState(steps=7, tree={})}
    """
    layouts = {client: layout_of(state.tree) for client, state in states.items()}
    known = {layout: number for number, layout in enumerate(dict.fromkeys(layouts.values()))}
    records = [to_record(state.steps, state.tree, layouts[client]) for client, state in states.items()]
    contents = {
        "layouts": [layout_to_text(layout) for layout in known],
        "clients": [
            [client, known[layouts[client]], len(record)] for client, record in zip(states, records, strict=True)
        ],
    }
    text = json.dumps(contents).encode()
    return b"".join([len(text).to_bytes(_CONTENTS, "little"), text, *records])


def unpack_states(data: bytes) -> dict[int, ClientState]:
    """The states again, in the order they were packed."""
    start = _CONTENTS + int.from_bytes(data[:_CONTENTS], "little")
    contents = json.loads(data[_CONTENTS:start])
    layouts = [layout_from_text(text) for text in contents["layouts"]]
    states: dict[int, ClientState] = {}
    listed: list[tuple[int, int, int]] = contents["clients"]
    for client, layout, size in listed:
        states[client] = ClientState(*from_record(layouts[layout], data[start : start + size]))
        start += size
    return states


def encode(tree: Tree) -> bytes:
    """A tree as safetensors bytes; entries that share memory are written each for itself."""
    return safetensors.torch.save(
        {key: value.detach().to("cpu", copy=True).contiguous() for key, value in tree.items()}
    )
