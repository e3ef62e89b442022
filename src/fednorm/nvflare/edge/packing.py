"""What devices are sent and what they send, as bytes inside NVFlare and as text in the JSON that devices speak.

An update travels as its difference from the model that its device was sent: entry by entry the exclusive or of both
bit patterns, in which most high bits are zero, laid out byte plane by byte plane and deflated. So it is smaller than
the update, and the server gets the very bits that the device had: a difference of floats, added up again, would not be.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fednorm.core.state import Tree
from fednorm.errors import WireError
from fednorm.halves import wire
from fednorm.halves.messages import Message
from fednorm.halves.wire_format import DTYPES, Limits, as_object, pack, unpack

_QUICK = 1
"""level of deflating: higher ones save next to nothing of weights"""


def to_text(data: bytes) -> str:
    """Bytes for JSON.

    >>> to_text(b"fednorm")
    'ZmVkbm9ybQ=='
    """
    return base64.b64encode(data).decode("ascii")


def from_text(text: object, limits: Limits = Limits()) -> bytes:  # noqa: B008 (frozen)
    """The bytes that a device's text stands for, or a `WireError`."""
    if not isinstance(text, str):
        raise WireError(f"a {type(text).__name__} came where base64 text was expected")
    if len(text) > limits.max_bytes // 3 * 4 + 4:
        raise WireError(f"its text has {len(text)} characters, which no message of this run has")
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise WireError("its text is no base64; it was cut or altered on the way") from None


def encode(answer: Message, base: Tree | None = None) -> bytes:
    """An answer as bytes, its entries as differences from those of `base` where these are alike."""
    header, tree = wire.to_parts(answer)
    planes = {flat: _planes(flat, tensor, base) for flat, tensor in tree.items()}
    return zlib.compress(pack(header, planes), _QUICK)


def decode(data: bytes, base: Tree | None = None, *, limits: Limits = Limits()) -> Message:  # noqa: B008 (frozen)
    """The answer again, to the bit; whatever is wrong with the bytes ends in a `WireError`."""
    header, planes = unpack(_inflated(data, limits.max_bytes), limits)
    entries = as_object(header.get("entries")) or {}
    tree = {flat: _entry(flat, entries.get(flat), tensor, base) for flat, tensor in planes.items()}
    return wire.from_parts(header, tree)


def _inflated(data: bytes, most: int) -> bytes:
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(data, most)
    except zlib.error:
        raise WireError("it is no answer of a device's; it was cut or altered on the way") from None
    if not reader.eof:
        why = f"it becomes more than {most} bytes" if reader.unconsumed_tail else "it was cut on the way"
        raise WireError(why)
    return found


def _alike(flat: str, shape: Sequence[int], dtype: torch.dtype, base: Tree | None) -> Tensor | None:
    """The entry of the base that an entry of this form differs from, if there is one."""
    found = (base or {}).get(flat.partition("/")[2])
    return found if found is not None and (list(found.shape), found.dtype) == (list(shape), dtype) else None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _planes(flat: str, tensor: Tensor, base: Tree | None) -> Tensor:
    """All first bytes, then all second ones: where a difference is small the highest are a row of zeros."""
    like = _alike(flat, tensor.shape, tensor.dtype, base)
    found = _bytes(tensor) if like is None else _bytes(tensor) ^ _bytes(like)
    return found.reshape(tensor.numel(), tensor.element_size()).t().contiguous()


def _entry(flat: str, spec: Any, planes: Tensor, base: Tree | None) -> Tensor:
    """The tensor that a header describes; that it is the right one, its digest says afterwards."""
    said = as_object(spec) or {}
    dtype, shape = DTYPES.get(str(said.get("dtype"))), said.get("shape")
    sizes = cast(list[Any], shape) if isinstance(shape, list) else [-1]
    whole = all(type(size) is int and 0 <= size < 1 << 31 for size in sizes)
    length = math.prod(sizes) if whole else -1
    if dtype is None or planes.dtype is not torch.uint8 or planes.numel() != length * dtype.itemsize:
        raise WireError("has other bytes than its header says", entry=flat.partition("/")[2][:200])
    found = planes.reshape(dtype.itemsize, length).t().contiguous().reshape(-1)
    like = _alike(flat, sizes, dtype, base)
    return (found if like is None else found ^ _bytes(like)).view(dtype).reshape(sizes)
