"""Let Triton's interpreter calculate with bfloat16, which by itself it reads, adds and multiplies as bits.

Numbers are then rounded where the kernels round them, so kernels in bf16 are tested without a GPU.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

from fednorm.engines.stack.kernels import ops

_BITS = np.dtype(np.uint16)
_NARROW = np.dtype(ml_dtypes.bfloat16)
_WIDER = interpreter._get_np_dtype
_MEMORY = interpreter._interpreter


def teach() -> None:
    """Until the process ends."""
    interpreter._get_np_dtype = _numpy_type
    interpreter._interpreter = _Memory()
    interpreter.InterpreterBuilder.cast_impl = _cast
    interpreter.InterpreterBuilder.create_fp_to_fp = _cast
    ops._TYPES = (torch.float32, torch.bfloat16)


def _numpy_type(kind: Any) -> np.dtype:
    return _NARROW if getattr(kind, "scalar", kind) == tl.bfloat16 else _WIDER(kind)


def _cast(builder: Any, source: Any, kind: Any, rounding: Any = None) -> Any:
    """To the nearest number, of two as near the even one, as GPUs do."""
    return interpreter.TensorHandle(source.data.astype(_numpy_type(kind)), kind.scalar)


class _Memory:
    """Reads and writes as before, numbers of that type as their bits."""

    def load(self, places: Any, mask: Any, other: Any, kind: np.dtype) -> Any:
        if kind != _NARROW:
            return _MEMORY.load(places, mask, other, kind)
        return _MEMORY.load(places, mask, other.view(_BITS), _BITS).view(_NARROW)

    def store(self, places: Any, value: Any, mask: Any) -> None:
        _MEMORY.store(places, value.view(_BITS) if value.dtype == _NARROW else value, mask)

    def __getattr__(self, name: str) -> Any:
        return getattr(_MEMORY, name)
