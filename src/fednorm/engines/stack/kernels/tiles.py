"""How the kernels cut their work, found by trying cuts on an H200 with layers of ResNets and of the studies' CNNs."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple


class Tile(NamedTuple):
    """Output pixels and channels of a program, terms of the product a turn, warps, and turns in flight."""

    pixels: int
    outs: int
    terms: int
    warps: int
    stages: int

    def gathers(self, channels: int) -> bool:
        """Whether a turn has terms of several taps, each of which has so few channels."""
        return channels < self.terms


def power_of_2(number: int) -> int:
    """The smallest power of 2 that is not below.

    >>> [power_of_2(n) for n in (1, 3, 16, 17)]
    [1, 4, 16, 32]
    """
    return 1 << (number - 1).bit_length()


def words(channels: int) -> tuple[int, int]:
    """How many words a pixel's channels are, and channels of a word: what a kernel must know to read 16 bytes at once.

    >>> words(144), words(10)
    ((18, 8), (5, 2))
    """
    word = gcd(channels, 8)
    return channels // word, word


DEPTH_PIXELS = 128
"""Pixels of a program of a depthwise convolution."""


def depth_rows(height: int) -> int:
    """How many of these lie one below the other: 4 where that divides the height of the images."""
    return 2 if height % 4 else 4


def _fills(channels: int, block: int) -> bool:
    """Whether blocks of so many channels are not much more than there are.

    >>> [_fills(channels, 128) for channels in (64, 150, 250, 384)]
    [True, False, True, True]
    """
    return channels <= block or 4 * -(-channels // block) * block <= 5 * channels


def conv_tile(ins: int, outs: int, taps: int, pixels: int, clients: int, wide: bool) -> Tile:
    """The cut of a convolution by its channels, taps and a client's pixels; `wide` numbers have 4 bytes."""
    block = min(64, max(16, power_of_2(outs)))
    if wide and ins >= 16 and block > 16:
        return Tile(pixels=8192 // block, outs=block, terms=16, warps=256 // block, stages=3)
    # Many pixels of many terms each would not fit into the 99 KB of a consumer's GPU.
    terms = _terms(ins, taps, block)

    def programs(each: int) -> int:
        return clients * -(-pixels // each) * -(-outs // 128)

    if not wide and outs > 64 and _fills(outs, 128):
        # Many channels come with few pixels, which are then cut finer to have enough programs.
        if programs(128) >= 180:
            return Tile(128, 128, terms, 4, 3 if terms == 64 else 4)
        return Tile(64, 128 if programs(64) >= 100 else 64, terms, 4, 4)
    # Large tiles leave few moments, which every program of a batch norm joins; of small images there would be too few.
    large = block == 64 and pixels >= (4096 if taps > 1 else 8192)
    many = block >= 32 and taps > 1 and ins >= 32 and clients * -(-pixels * block // 8192) >= 180
    each = 2 if not wide and (large or many) else 1
    return Tile(each * 4096 // block, block, terms, warps=2 if wide and block == 16 else 4, stages=3)


def _terms(ins: int, taps: int, block: int) -> int:
    """Terms of a turn: those of few channels are gathered, and are fetched while others are multiplied.

    >>> [_terms(*case) for case in ((3, 9, 64), (3, 25, 64), (16, 9, 16), (100, 9, 64), (150, 9, 64), (256, 9, 64))]
    [32, 16, 16, 64, 32, 64]
    """
    if ins < 16:
        return 32 if ins * taps <= 32 else 16
    most = min(64 if block > 16 else 32, power_of_2(ins))
    halves = -(-ins // 32)
    return 32 if most == 64 and halves % 2 and not _fills(ins, 64) else most


class Cut(NamedTuple):
    """How a gradient of weights is cut: each part is the sum of a share of the pixels, and is added up later."""

    parts: int
    turns: int
    """tiles of pixels that a program takes one after the other"""
    blocks: int
    """of the weights themselves"""


def _cut(pixels: int, each: int, blocks: int, clients: int, programs: int, fewest: int) -> Cut:
    """Enough programs to fill the chip, with `each` pixels a turn, and no fewer than some turns for each of them.

    >>> _cut(pixels=20_480, each=64, blocks=5, clients=5, programs=528, fewest=4)
    Cut(parts=20, turns=16, blocks=5)
    """
    tiles = -(-pixels // each)
    turns = max(fewest, -(-tiles // max(1, programs // (blocks * clients))))
    return Cut(-(-tiles // turns), turns, blocks)


def weight_cut(ins: int, outs: int, taps: int, pixels: int, clients: int, wide: bool) -> tuple[Tile, Cut]:
    """How the gradient of a convolution's weights is cut; `pixels` are those of a client's output."""
    tile, programs = weight_tile(ins, outs, taps, wide)
    # The terms of a program are of one tap, unless a tap has very few channels.
    each = -(-taps * ins // tile.terms) if tile.gathers(ins) else taps * -(-ins // tile.terms)
    blocks = each * -(-outs // tile.outs)
    return tile, _cut(pixels, tile.pixels, blocks, clients, programs, fewest=4)


DEPTH_TAPS, FILTER_PIXELS = 9, 32
"""Taps and pixels at a time of a gradient of depthwise filters: few, since each of both has a sum in registers."""


def depth_block(channels: int, taps: int) -> int:
    """Channels of a depthwise program: at most 64 bytes in a narrow type, or half for large filters."""
    return min(32 if taps <= DEPTH_TAPS else 16, power_of_2(channels))


def filter_cut(channels: int, taps: int, pixels: int, clients: int) -> Cut:
    """How the gradient of depthwise filters is cut; `pixels` are those of a client's output."""
    blocks = -(-channels // depth_block(channels, taps))
    return _cut(pixels, FILTER_PIXELS, blocks, clients, programs=1056, fewest=8)


def weight_tile(ins: int, outs: int, taps: int, wide: bool) -> tuple[Tile, int]:
    """The cut of a gradient of weights, and how many programs should share the work; `wide` numbers have 4 bytes."""
    most = min(64, max(16, power_of_2(taps * ins)))
    if not wide and taps > 1 and ins % 128 == outs % 128 == 0:
        return Tile(64, 128, 128, 8, 3), 528
    # Looking for the pixels of several taps again costs more than channels that are not there.
    large = not wide and (taps > 1 or _fills(outs, 128))
    block = min(128 if large else 64, max(16, power_of_2(outs)))
    if block == 16:
        return Tile(64, 16, most, 2 if wide else 1, 2), 1056
    return (Tile(64, block, min(32, most), 4, 3), 1056) if wide else (Tile(64, block, most, 4, 3), 528)


ALONE = 1 << 16
"""Gradients of fewer numbers a client are joined with their neighbours before an update, to be one launch."""
FEW_ROWS = 256
"""Up to this many rows of a batch the gradient of a linear layer's weights is quicker computed again than read."""
