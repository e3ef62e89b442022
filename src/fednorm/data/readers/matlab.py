"""Arrays of numbers in MATLAB's files of level 5, as SVHN and SynthDigits come: nothing else of them is read.

A reader of our own, since damaged files of this kind can end the process inside scipy's compiled one. The format is
described in "MAT-File Format" (The MathWorks): elements of a type, a length and so many bytes, padded to 8; a matrix is
an element of elements, and may be one inside a compressed element.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

_HEAD = 128
_MATRIX, _COMPRESSED = 14, 15
_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""Types of elements, as numpy calls them."""
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
"""Classes of matrices; their numbers may be stored in a smaller type."""
_COMPLEX = 0x0800


def read_matlab(path: Path, names: Collection[str], most: int) -> dict[str, np.ndarray]:
    """The matrices of these names that a file holds; a `ValueError` where it is not what it says.

    None of its parts may become more than `most` bytes.
    """
    data = memoryview(path.read_bytes())
    order = {b"IM": "<", b"MI": ">"}.get(bytes(data[126:128]))
    if order is None or len(data) < _HEAD:
        raise ValueError("it does not begin like a MATLAB file of level 5")
    found: dict[str, np.ndarray] = {}
    for kind, content in _elements(data[_HEAD:], order):
        if kind == _COMPRESSED:
            kind, content = _inflated(content, order, most)
        if kind == _MATRIX and (matrix := _matrix(content, order, names)) is not None:
            found[matrix[0]] = matrix[1]
    return found


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """(type, content) of the elements that stand in a row."""
    while len(data) >= 8:
        first, length = np.frombuffer(data[:8], f"{order}u4").tolist()
        if first >> 16:  # a small one: its length and its few bytes are in the same eight
            kind, length, start, end, room = first & 0xFFFF, first >> 16, 4, 8, 4
        else:
            padded = length if first == _COMPRESSED else -(-length // 8) * 8
            kind, start, end, room = first, 8, 8 + padded, len(data) - 8
        if length > room:
            raise ValueError(f"an element says it has {length} bytes, and {room} are there")
        yield kind, data[start : start + length]
        data = data[end:]


def _inflated(content: memoryview, order: str, most: int) -> tuple[int, memoryview]:
    """The one element inside a compressed one."""
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(content, most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(data) > most:
        raise ValueError(f"a part of it becomes more than {most:,} bytes")
    if not stream.eof:
        raise ValueError("the end of a compressed part is missing")
    inner = next(_elements(memoryview(data), order), None)
    if inner is None or inner[0] == _COMPRESSED:
        raise ValueError("a compressed part holds no element")
    return inner


def _matrix(content: memoryview, order: str, names: Collection[str]) -> tuple[str, np.ndarray] | None:
    """The name and the numbers of a matrix; None where it is not asked for."""
    parts = list(_elements(content, order))
    if len(parts) < 3:
        raise ValueError("a matrix lacks its name")
    (_, flags), (_, shape), (_, name), *numbers = parts
    text = bytes(name).decode("latin-1")
    if text not in names:
        return None
    if len(flags) != 8 or len(shape) % 4 or not numbers:
        raise ValueError(f"'{text}' lacks its shape or its numbers")
    flag = int(np.frombuffer(flags, f"{order}u4")[0])
    sizes = np.frombuffer(shape, f"{order}i4").tolist()
    kind, raw = numbers[0]
    if flag & 0xFF not in _CLASSES or kind not in _STORED or flag & _COMPLEX:
        raise ValueError(f"'{text}' is no array of plain numbers")
    stored = np.dtype(f"{order}{_STORED[kind]}")
    if min(sizes, default=-1) < 0 or len(raw) != math.prod(sizes) * stored.itemsize or len(sizes) > 8:
        raise ValueError(f"'{text}' says it is {'x'.join(map(str, sizes))} and holds {len(raw)} bytes")
    values = np.frombuffer(raw, stored).reshape(sizes, order="F")
    return text, values.astype(_CLASSES[flag & 0xFF], copy=False)
