"""How an optimizer's kernels read gradients: as layers leave them, some in parts that are still to be added.

A large gradient has a launch of its own. All small ones share another, in which every program looks up in a list which
numbers are its own and where their gradients lie. So nothing is written again only to be summed or joined, but for the
very small ones that lie whole.
"""
# Triton reads annotations of constants at run time, so this file does without `from __future__ import annotations`.

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fednorm.engines.stack.kernels.tiles import ALONE, power_of_2

BLOCK = 512
"""Numbers of a program."""
_SOURCES = 32
"""Tensors that a launch reads gradients from, at most."""
_AT_ONCE = tl.constexpr(4)
"""Parts of a number that are on their way at once: one after the other, a hundred would take longer than all else."""


class Place(NamedTuple):
    """A program's entry in the list: its numbers, and where their gradients lie."""

    source: int
    """which of the tensors has them"""
    first: int
    """its first number, counted in a client's row"""
    begin: int
    """where the gradient of that one lies, counted in the source's row"""
    left: int
    """how many numbers there are from there on"""
    parts: int
    apart: int
    """from a number's part to the next"""
    stride: int
    """from a client's row to the next, in the source"""


_FIELDS = tl.constexpr(len(Place._fields))


@triton.jit
def gradient_of(sources, place_ptr, row, stride, numbers, parts, LISTED: tl.constexpr, LANES: tl.constexpr):
    """Of a program: which numbers it moves, whether they are there, and their gradients: where, how far, how many."""
    lane = tl.arange(0, LANES)
    grad_ptr = sources[0]
    if LISTED:
        place = place_ptr + tl.program_id(0) * _FIELDS
        source = tl.load(place)
        for other in tl.static_range(1, len(sources)):
            grad_ptr = tl.where(source == other, sources[other], grad_ptr)
        at, begin, left = tl.load(place + 1) + lane, tl.load(place + 2) + lane, tl.load(place + 3)
        parts, numbers, stride = tl.load(place + 4), tl.load(place + 5), tl.load(place + 6)
        inside = lane < left
    else:
        at = tl.program_id(0) * LANES + lane
        begin, inside = at, at < numbers
    return at, inside, grad_ptr + row * stride + begin, numbers, parts


@triton.jit
def summed(grad_ptr, inside, numbers, parts, LANES: tl.constexpr):
    """Gradients that `gradient_of` found, summed over their parts."""
    grad = tl.zeros((LANES,), dtype=tl.float32)
    for first in range(0, parts, _AT_ONCE):
        for part in tl.static_range(_AT_ONCE):
            there = inside & (tl.full((LANES,), first + part, dtype=tl.int32) < parts)
            grad += tl.load(grad_ptr + part * numbers, mask=there, other=0.0)
        grad_ptr += _AT_ONCE * numbers
    return grad


class Share(NamedTuple):
    """What one launch takes: the gradients of numbers side by side, or by a list."""

    numbers: slice
    """of a client's row"""
    sources: tuple[Tensor, ...]
    places: Tensor | None
    blocks: int
    """programs for each client"""

    @property
    def read(self) -> tuple[object, ...]:
        """The arguments of `gradient_of` that a kernel hands on: sources, list, stride, numbers and parts."""
        first = self.sources[0]
        _, parts, numbers = first.shape
        return self.sources, first if self.places is None else self.places, first.stride(0), numbers, parts


def shares(grads: Iterable[tuple[int, Tensor]]) -> Iterator[Share]:
    """The launches for gradients (client, number) or (client, part, number), each with its first number's place."""
    whole: list[tuple[int, Tensor]] = []
    parted: list[tuple[int, Tensor]] = []  # also in no parts at all, which is the gradient 0
    for first, grad in grads:
        each = grad if grad.dim() == 3 else grad.unsqueeze(1)
        each = each if each[0].is_contiguous() else each.contiguous()
        if each.shape[2] < ALONE or not each.shape[1]:
            (whole if each.shape[1] == 1 else parted).append((first, each))
        else:
            yield _alone(first, each)
    if len(small := whole + parted) == 1 and small[0][1].shape[1]:
        yield _alone(*small[0])
        return
    while whole or parted:
        room = _SOURCES - bool(whole)
        yield _listed(whole, parted[:room])
        whole, parted = [], parted[room:]


def _alone(first: int, grad: Tensor) -> Share:
    numbers = grad.shape[2]
    return Share(slice(first, first + numbers), (grad,), None, triton.cdiv(numbers, BLOCK))


def _listed(whole: list[tuple[int, Tensor]], parted: list[tuple[int, Tensor]]) -> Share:
    """Gradients in one launch: those that lie whole are joined to one tensor, the others read where they are."""
    joined = (torch.cat([grad for _, grad in whole], 2),) if len(whole) > 1 else tuple(grad for _, grad in whole)
    sources = (*joined, *(grad for _, grad in parted))
    pieces = [(0, first, grad.shape[2], 1) for first, grad in whole]
    pieces += [(len(joined) + i, first, grad.shape[2], grad.shape[1]) for i, (first, grad) in enumerate(parted)]
    places = _list(tuple(pieces), tuple(each.stride(0) for each in sources), sources[0].device)
    # As many sources as a kernel is there for anyway.
    missing = power_of_2(len(sources)) - len(sources)
    return Share(slice(None), sources + sources[:1] * missing, places, len(places))


@cache  # for ever: a captured program reads it where it lies
def _list(pieces: tuple[tuple[int, int, int, int], ...], strides: tuple[int, ...], device: torch.device) -> Tensor:
    """A row for each program, as `Place` says, of pieces (source, first number, how many, parts)."""
    places: list[Place] = []
    begins = [0] * len(strides)
    for source, first, numbers, parts in _joined(pieces):
        for block in range(0, numbers, BLOCK):
            left = min(BLOCK, numbers - block)
            begin = begins[source] + block
            places.append(Place(source, first + block, begin, left, parts, numbers, strides[source]))
        begins[source] += numbers
    return torch.tensor(places, dtype=torch.int32).to(device)


def _joined(pieces: Iterable[tuple[int, int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Neighbours that lie whole in one source as one piece.

    >>> list(_joined([(0, 4, 2, 1), (0, 6, 3, 1), (0, 20, 1, 1), (1, 9, 5, 2)]))
    [(0, 4, 5, 1), (0, 20, 1, 1), (1, 9, 5, 2)]
    """
    held: tuple[int, int, int, int] | None = None
    for piece in pieces:
        source, first, numbers, parts = piece
        if held and parts == 1 and (source, first) == (held[0], held[1] + held[2]):
            held = source, held[1], held[2] + numbers, 1
            continue
        if held:
            yield held
        held = piece
    if held:
        yield held
