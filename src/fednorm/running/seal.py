"""What shows that a store is whole: a digest of every row, and one row, the seal, that tells of all others.

A digest tells a damaged or exchanged row. That a row is lost only the seal can tell: it names the digest of every fact,
tree and layout, and of clients and rounds, which are many, their number and the sum of their digests. Whoever writes on
purpose can write a seal as well: it is against damage and mistakes.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fednorm.errors import CheckpointError

NAMED = {"facts": "name", "server": "name", "layouts": "number"}
"""Tables of few rows, each with the column that names them."""
_WHAT = {"facts": "fact", "server": "tree", "layouts": "layout"}
COUNTED = ("clients", "rounds")
BEST = "best_clients"
"""A table that is there once a best round was kept."""
_BYTES = 8
_AT_ONCE = 10_000
"""Rows that are summed in one go."""


def row_digest(content: bytes | str, row: str) -> bytes:
    """The digest of what is in a row and of which row it is."""
    data = content.encode() if isinstance(content, str) else content
    return hashlib.blake2b(data + row.encode(), digest_size=_BYTES).digest()


def check_row(content: Any, digest: Any, row: str, kind: type[bytes] | type[str] = str) -> None:
    """Refuse a row that is not what was written; one bit in a file tells text from bytes, and none of the content."""
    if not isinstance(content, kind) or row_digest(content, row) != digest:
        raise damaged(row)


def damaged(row: str) -> CheckpointError:
    return CheckpointError(f"the stored state of {row} is damaged (its digest differs); start the run anew")


@dataclass(frozen=True)
class Total:
    """How many rows there are, and the sum of their digests."""

    count: int = 0
    sum: int = 0

    def changed(self, gone: Iterable[bytes], new: Iterable[bytes]) -> Total:
        """The total after some rows went and others came."""
        less, more = _total(gone), _total(new)
        return Total(self.count - less.count + more.count, (self.sum - less.sum + more.sum) % (1 << 8 * _BYTES))


def _total(digests: Iterable[bytes]) -> Total:
    listed = list(digests)
    joined = b"".join(listed)
    if len(joined) != _BYTES * len(listed):
        raise ValueError("a digest of another length")
    return Total(len(listed), int(np.frombuffer(joined, "<u8").sum(dtype=np.uint64)))


@dataclass(frozen=True)
class Seal:
    """What a store holds: digests by name in the small tables, totals of the large ones."""

    named: Mapping[str, Mapping[str, str]]
    totals: Mapping[str, Total]

    def with_named(self, table: str, digests: Mapping[str, bytes]) -> Seal:
        """The same with some rows of a small table written anew."""
        new = {name: digest.hex() for name, digest in digests.items()}
        return replace(self, named={**self.named, table: {**self.named[table], **new}})

    def without(self, table: str, names: Collection[str]) -> Seal:
        """The same without some rows of a small table."""
        left = {name: digest for name, digest in self.named[table].items() if name not in names}
        return replace(self, named={**self.named, table: left})

    def with_rows(self, table: str, gone: Iterable[bytes], new: Iterable[bytes]) -> Seal:
        """The same with some rows of a large table gone and others there."""
        return replace(self, totals={**self.totals, table: self.totals[table].changed(gone, new)})

    def with_best(self) -> Seal:
        """The same with the clients put aside as those of the best round."""
        return replace(self, totals={**self.totals, BEST: self.totals["clients"]})

    @property
    def text(self) -> str:
        totals = {table: [total.count, total.sum] for table, total in self.totals.items()}
        return json.dumps({"named": self.named, "totals": totals}, sort_keys=True)

    @property
    def digest(self) -> str:
        """One number that stands for all that is stored."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def write(self, db: sqlite3.Connection) -> None:
        """Put the seal in the place of the one before, in the transaction that made it true."""
        db.execute("REPLACE INTO seal VALUES (0,?,?)", (self.text, row_digest(self.text, "the seal")))


def read_seal(db: sqlite3.Connection) -> Seal:
    """The seal as the last commit left it."""
    row = db.execute("SELECT text, digest FROM seal WHERE number=0").fetchone()
    if row is None:
        raise damaged("the seal")
    text, digest = row
    check_row(text, digest, "the seal")
    stored = json.loads(text)
    return Seal(stored["named"], {table: Total(*pair) for table, pair in stored["totals"].items()})


def seal_of(db: sqlite3.Connection) -> Seal:
    """The seal that fits what is in the tables now."""
    named = {table: _digests(db, table, column) for table, column in NAMED.items()}
    totals = {table: _scanned(db, table) for table in COUNTED}
    if db.execute("SELECT count(*) FROM sqlite_master WHERE name=?", (BEST,)).fetchone()[0]:
        totals[BEST] = _scanned(db, BEST)
    return Seal(named, totals)


def _digests(db: sqlite3.Connection, table: str, column: str) -> dict[str, str]:
    rows = db.execute(f"SELECT {column}, digest FROM {table} NOT INDEXED ORDER BY rowid")  # noqa: S608
    return dict(sorted((str(name), digest.hex()) for name, digest in rows))


def _scanned(db: sqlite3.Connection, table: str) -> Total:
    total, cursor = Total(), db.execute(f"SELECT digest FROM {table} NOT INDEXED")  # noqa: S608
    while rows := cursor.fetchmany(_AT_ONCE):
        total = total.changed((), (digest for (digest,) in rows))
    return total


def check_seal(db: sqlite3.Connection) -> None:
    """Refuse tables that lost, gained or changed a row since the last commit."""
    told, found = read_seal(db), seal_of(db)
    for table, what in _WHAT.items():
        for name in sorted(told.named[table].keys() | found.named[table].keys()):
            if name not in found.named[table]:
                raise CheckpointError(f"the stored state has lost {what} {name}; start the run anew")
            if told.named[table].get(name) != found.named[table][name]:
                raise damaged(f"{what} {name}".removeprefix("tree "))
    for table in told.totals.keys() | found.totals.keys():
        before, now = told.totals.get(table, Total()), found.totals.get(table, Total())
        if before != now:
            raise CheckpointError(
                f"the stored state of {table.replace('_', ' ')} is damaged: {now.count} of {before.count} rows are "
                "there, and their digests do not add up; start the run anew"
            )
