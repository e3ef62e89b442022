"""How the package's Triton kernels are compiled and started."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton


class Kernel:
    """A Triton kernel, started by `kernel[grid](...)`.

    A product and the sum it goes into may be one operation, whatever this release of Triton does by default: results
    round alike in all of them, and nothing is slower in a newer one.
    """

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self._jitted[grid], enable_fp_fusion=True)


def kernel(*numbers: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a function a kernel that is compiled once for all values of these numbers among its arguments."""

    def make(function: Callable[..., Any]) -> Kernel:
        return Kernel(triton.jit(function, do_not_specialize=list(numbers)))

    return make
