"""Tables and paragraphs as lines of text, laid out for a width: words stay whole, and columns give way in order."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len

GAP = 2
# Where a line may end without a space: after a + of a method, and before a name in the key of a tensor.
_JOINT = re.compile(r"(?<=\+)|(?<=\.)(?=[A-Za-z_])")


@dataclass(frozen=True)
class Table:
    """Headings and rows of cells."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()
    """columns that are aligned to the right and never broken"""
    spare: Sequence[str] = ()
    """columns that may be left out where there is no room for them, the first one first"""
    readable: int = 20
    """characters that a column of text keeps as long as there is another that may be left out"""

    def cells(self, column: str) -> list[str]:
        at = self.columns.index(column)
        return [column, *(row[at] for row in self.rows)]

    def without(self, column: str) -> Table:
        kept = [at for at, name in enumerate(self.columns) if name != column]
        rows = [[row[at] for at in kept] for row in self.rows]
        spare = [name for name in self.spare if name != column]
        return replace(self, columns=[self.columns[at] for at in kept], rows=rows, spare=spare)


@dataclass(frozen=True)
class Lines:
    """A table as text."""

    heading: list[str]
    body: list[str]
    left_out: list[str]
    """columns for which there was no room"""


def fitted(table: Table, width: int | None) -> Lines:
    """A table laid out for a width; without one, everything fits.

    >>> lines = fitted(Table(["method", "what it does"], [["gn", "no batch statistics"]]), 22)
    >>> print("\\n".join(lines.heading + lines.body))
    method  what it does
    gn      no batch
            statistics
    """
    widths, left_out = _widths(table, width, table.readable), list[str]()
    for name in table.spare:
        if widths is None:
            table, left_out = table.without(name), [*left_out, name]
            widths = _widths(table, width, table.readable)
    widths = widths or _widths(table, width, 0) or [_word(table, name) for name in table.columns]
    heading = _row([wrapped(name, size) for name, size in zip(table.columns, widths, strict=True)], table, widths)
    rows = [
        [
            [text] if name in table.numbers else wrapped(text, size)
            for name, text, size in zip(table.columns, row, widths, strict=True)
        ]
        for row in table.rows
    ]
    return Lines(heading, [line for row in rows for line in _row(row, table, widths)], left_out)


def _row(cells: Sequence[list[str]], table: Table, widths: Sequence[int]) -> list[str]:
    """A row of wrapped cells as lines."""
    lines: list[str] = []
    for number in range(max(map(len, cells))):
        texts = [cell[number] if number < len(cell) else "" for cell in cells]
        padded = [
            " " * (width - cell_len(text)) + text if name in table.numbers else text + " " * (width - cell_len(text))
            for name, text, width in zip(table.columns, texts, widths, strict=True)
        ]
        lines.append((" " * GAP).join(padded).rstrip())
    return lines


def _widths(table: Table, width: int | None, readable: int) -> list[int] | None:
    """A width for each column, or None where their shortest forms do not fit; the widest column gives way first."""
    natural = [max(map(cell_len, table.cells(name))) for name in table.columns]
    if width is None:
        return natural
    least = [max(_word(table, name), min(size, readable)) for name, size in zip(table.columns, natural, strict=True)]
    room = width - GAP * (len(natural) - 1)
    if sum(least) > room:
        return None
    while sum(natural) > room:
        widest = max((at for at, size in enumerate(natural) if size > least[at]), key=lambda at: natural[at])
        natural[widest] -= 1
    return natural


def _word(table: Table, column: str) -> int:
    """Characters of a column's longest piece that stays whole."""
    heading, *cells = table.cells(column)
    whole = cells if column in table.numbers else [piece for cell in cells for piece in _all_pieces(cell)]
    return max(map(cell_len, (*heading.split(), *whole)), default=0)


def _all_pieces(text: str) -> list[str]:
    return [piece for word in text.split() for piece in _pieces(word)]


def _pieces(word: str) -> list[str]:
    """What stays whole of a word that is too long for a line; a path is of use in one piece only.

    >>> _pieces("fixbn(at=0.5)+gn"), _pieces("layer1.0.conv1.weight")
    (['fixbn(at=0.5)+', 'gn'], ['layer1.0.', 'conv1.', 'weight'])
    """
    return [word] if "/" in word else [piece for piece in _JOINT.split(word) if piece]


def wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    """A text as lines of at most this width, all but the first indented; what cannot be broken has its own line.

    >>> wrapped("fixbn(at=0.5)+local-momentum", 20)
    ['fixbn(at=0.5)+', 'local-momentum']
    """
    if width is None or cell_len(text) <= width:
        return [text]
    start = text[: len(text) - len(text.lstrip())]
    room = width - cell_len(start + indent)
    lines, empty = [start], True
    for word in text.split():
        for number, piece in enumerate(_pieces(word) if cell_len(word) > room else [word]):
            glue = " " if number == 0 else ""
            if not empty and cell_len(lines[-1] + glue + piece) > width:
                lines.append(start + indent)
                empty = True
            lines[-1] += piece if empty else glue + piece
            empty = False
    return lines
