"""What must survive a crash: the server's state and each client's own, in one SQLite file, one transaction a round.

Every row has a digest that covers which row it is, so a damaged or exchanged one is noticed and never loaded. Memory
holds the clients of late rounds up to a number of bytes; clients that were never seen cost nothing at all.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import sqlite3
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from fednorm.core.state import Tree, tree_bytes
from fednorm.errors import CheckpointError, DiskError
from fednorm.files import refuse_links, written_whole
from fednorm.halves.mine import ClientState
from fednorm.halves.state_bytes import (
    RecordLayout,
    encode,
    from_record,
    layout_from_text,
    layout_of,
    layout_to_text,
    page_size,
    stack_from_records,
    to_record,
)
from fednorm.running.records import RoundRow, read_row

VERSION = 2
# Clients are appended in the order they are first seen, which fills pages to the end; a tree sorted by their random ids
# would leave a third of every page empty.
_TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL, digest BLOB NOT NULL);
CREATE TABLE server (name TEXT PRIMARY KEY, blob BLOB NOT NULL, digest BLOB NOT NULL);
CREATE TABLE layouts (number INTEGER PRIMARY KEY, layout TEXT NOT NULL, digest BLOB NOT NULL);
CREATE TABLE clients (row INTEGER PRIMARY KEY, id INTEGER NOT NULL UNIQUE, layout INTEGER NOT NULL,
                      digest BLOB NOT NULL, record BLOB NOT NULL);
CREATE TABLE rounds (round INTEGER PRIMARY KEY, row TEXT NOT NULL, digest BLOB NOT NULL);
"""
_PUT_CLIENT = """
INSERT INTO clients (id, layout, digest, record) VALUES (?,?,?,?)
ON CONFLICT (id) DO UPDATE SET layout=excluded.layout, digest=excluded.digest, record=excluded.record
"""
_AT_ONCE = 500
"""Clients in one query."""
_WAL_BYTES = 4 << 20
_TENSOR_BYTES = 600
"""About what a tensor costs beside its numbers."""
_ROW_BYTES = 24
"""About what a client's row holds beside its record: id, layout, digest and the row's own header."""


class Store:
    """Server and client state in a file; changes become lasting together, at `commit`.

    Without a path the file is SQLite's own temporary one, which stays in memory while it is small. `cache_bytes` is the
    memory for states that are in the file already; changed ones are held until they are.
    """

    def __init__(self, path: Path | None = None, cache_bytes: int = 32 << 20) -> None:
        self.path = path
        self.cache_bytes = cache_bytes
        self._name = path or "the run's temporary file"
        self._clients = "clients"
        self._changed: dict[int, ClientState] = {}
        self._cached: OrderedDict[int, ClientState] = OrderedDict()
        self._cached_bytes = 0
        if path:  # SQLite itself would follow links, also of the files that it keeps beside this one
            refuse_links(path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal")))
        with _disk(self._name):
            self._db = sqlite3.connect(path or "", isolation_level=None)
            try:
                if path:
                    path.chmod(0o600)  # a client's statistics are a fingerprint of its data
                self._open()
                self._layouts = self._stored_layouts()
            except BaseException:
                self._db.close()
                raise
        self._numbers = {layout: number for number, layout in self._layouts.items()}

    def _open(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        fresh = version == 0 and self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if not fresh and version != VERSION:
            raise CheckpointError(
                f"{self._name} has state version {version}, this fednorm reads {VERSION}; use the fednorm that wrote it"
            )
        self._set_journal()
        if fresh:
            self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={VERSION}; COMMIT;")

    def _set_journal(self) -> None:
        pages = _WAL_BYTES // self._db.execute("PRAGMA page_size").fetchone()[0]
        self._db.executescript(
            f"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA wal_autocheckpoint={pages};"
            f"PRAGMA journal_size_limit={_WAL_BYTES};"
        )

    def close(self) -> None:
        self._db.close()

    # -- clients --

    def get(self, client: int) -> ClientState:
        """A client's state; empty for one that was never seen."""
        return self.get_many([client])[client]

    def get_many(self, clients: Sequence[int]) -> dict[int, ClientState]:
        """The states of several clients, in the order given."""
        found: dict[int, ClientState] = {}
        for client in clients:
            if client in self._changed:
                found[client] = self._changed[client]
            elif client in self._cached:
                self._cached.move_to_end(client)
                found[client] = self._cached[client]
        for client, (layout, record) in self._read([client for client in clients if client not in found]):
            found[client] = ClientState(*from_record(layout, record))
            self._cache(client, found[client])
        return {client: found.get(client) or ClientState() for client in clients}

    def put(self, client: int, state: ClientState) -> None:
        """Change a client's state; lasting from the next commit on."""
        self._changed[client] = state
        self._forget(client)

    def changed(self) -> dict[int, ClientState]:
        """The states that were put since the last commit."""
        return dict(self._changed)

    def seen(self) -> list[int]:
        """Ids of all clients that have state, ascending."""
        with _readable(self._name):
            stored = {row[0] for row in self._db.execute(f"SELECT id FROM {self._clients}")}  # noqa: S608
        return sorted(stored | self._changed.keys())

    def holding(self, keys: Iterable[str]) -> list[int]:
        """Ids of the clients whose state has all these entries, ascending."""
        wanted = set(keys)
        fitting = [number for number, layout in self._layouts.items() if wanted <= {key for key, _, _ in layout}]
        found: set[int] = set()
        with _readable(self._name):
            for number in fitting:
                query = f"SELECT id FROM {self._clients} WHERE layout=?"  # noqa: S608
                found.update(row[0] for row in self._db.execute(query, (number,)))
        changed = {client for client, state in self._changed.items() if wanted <= state.tree.keys()}
        return sorted((found - self._changed.keys()) | changed)

    def stacks(self, clients: Sequence[int]) -> Iterator[Tree]:
        """The states of many clients in the order given, some at a time, with a leading client axis.

        Memory holds a few hundred of them. Clients that share no layout come in stacks of their own.
        """
        for part in _parts(clients):
            stored = dict(self._read([client for client in part if client not in self._changed]))
            layouts = {client: layout for client, (layout, _) in stored.items()}
            for layout, group in groupby(part, layouts.get):
                if layout is None:
                    yield from ({k: v.unsqueeze(0) for k, v in self.get(client).tree.items()} for client in group)
                else:
                    yield stack_from_records(layout, [stored[client][1] for client in group])

    def _read(self, clients: Sequence[int]) -> Iterator[tuple[int, tuple[RecordLayout, bytes]]]:
        for part in _parts(clients):
            marks = ",".join("?" * len(part))
            with _readable(self._name):
                rows = self._db.execute(
                    f"SELECT id, layout, digest, record FROM {self._clients} WHERE id IN ({marks})",  # noqa: S608
                    part,
                ).fetchall()
            for client, number, digest, record in rows:
                _check(record, digest, _client_row(client, number))
                if number not in self._layouts:
                    raise CheckpointError(
                        f"{self._name} has no layout {number}, which client {client} names; start the run anew"
                    )
                yield client, (self._layouts[number], record)

    def _cache(self, client: int, state: ClientState) -> None:
        self._forget(client)
        self._cached[client] = state
        self._cached_bytes += _cost(state)
        while self._cached_bytes > self.cache_bytes:
            self._forget(next(iter(self._cached)))

    def _forget(self, client: int) -> None:
        if client in self._cached:
            self._cached_bytes -= _cost(self._cached.pop(client))

    def _stored_layouts(self) -> dict[int, RecordLayout]:
        with _readable(self._name):
            rows = self._db.execute("SELECT number, layout, digest FROM layouts").fetchall()
        found = {}
        for number, text, digest in rows:
            _check(text, digest, f"layout {number}")
            found[number] = layout_from_text(text)
        return found

    def of_best(self) -> Store:
        """The same store with the clients as the best round left them; for reading alone."""
        other = copy.copy(self)
        other._clients, other._changed = "best_clients", {}
        other._cached, other._cached_bytes = OrderedDict(), 0
        return other

    # -- rounds --

    def commit(
        self,
        round: int,
        trees: dict[str, Tree],
        facts: dict[str, Any],
        rows: Sequence[Mapping[str, Any]],
        best: bool = False,
    ) -> None:
        """Make a round lasting: server trees, facts, changed clients and the rounds' rows, or none of them.

        The clients of the `best` round so far are put aside, for `of_best`.
        """
        layouts = {client: layout_of(state.tree) for client, state in self._changed.items()}
        records = [(c, layouts[c], to_record(s.steps, s.tree, layouts[c])) for c, s in sorted(self._changed.items())]
        new = dict.fromkeys(layout for _, layout, _ in records if layout not in self._numbers)
        numbers = {**self._numbers, **{layout: len(self._numbers) + index for index, layout in enumerate(new)}}
        with _disk(self._name):
            if records and not self._numbers:
                self._fit_pages(len(records[0][2]) + _ROW_BYTES)
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for name, tree in trees.items():
                    blob = encode(tree)
                    self._db.execute("REPLACE INTO server VALUES (?,?,?)", (name, blob, _digest(blob, name)))
                for layout in new:
                    number, text = numbers[layout], layout_to_text(layout)
                    values = (number, text, _digest(text, f"layout {number}"))
                    self._db.execute("INSERT INTO layouts VALUES (?,?,?)", values)
                self._db.executemany(
                    _PUT_CLIENT,
                    (
                        (client, numbers[layout], _digest(record, _client_row(client, numbers[layout])), record)
                        for client, layout, record in records
                    ),
                )
                for name, value in {**facts, "round": round}.items():
                    text = json.dumps(value)
                    self._db.execute("REPLACE INTO facts VALUES (?,?,?)", (name, text, _digest(text, f"fact {name}")))
                for row in rows:
                    text = json.dumps(row)
                    values = (row["round"], text, _digest(text, f"round {row['round']}"))
                    self._db.execute("REPLACE INTO rounds VALUES (?,?,?)", values)
                if best:
                    self._db.execute("DROP TABLE IF EXISTS best_clients")
                    self._db.execute("CREATE TABLE best_clients AS SELECT * FROM clients")
                    self._db.execute("CREATE INDEX best_ids ON best_clients (id)")
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        self._numbers = numbers
        self._layouts = {number: layout for layout, number in numbers.items()}
        changed, self._changed = self._changed, {}
        for client, state in changed.items():
            self._cache(client, ClientState(state.steps, _owned(state.tree)))

    def _fit_pages(self, row: int) -> None:
        """Choose the file's page size for the first clients that come, while it is small enough to be rewritten."""
        wanted = page_size(row)
        if self._db.execute("PRAGMA page_size").fetchone()[0] == wanted:
            return
        try:
            self._db.executescript(f"PRAGMA journal_mode=DELETE; PRAGMA page_size={wanted}; VACUUM;")
        except sqlite3.OperationalError as error:
            if "full" in str(error) or "disk I/O" in str(error):
                raise
            # Somebody reads the file just now. Every page size is right, this one only saves space.
        self._set_journal()

    def facts(self) -> dict[str, Any]:
        """The facts of the last commit; empty before the first."""
        found = {}
        with _readable(self._name):
            for name, text, digest in self._db.execute("SELECT name, value, digest FROM facts"):
                _check(text, digest, f"fact {name}")
                found[name] = json.loads(text)
        return found

    def tree(self, name: str) -> Tree:
        """A server tree of the last commit."""
        with _readable(self._name):
            row = self._db.execute("SELECT blob, digest FROM server WHERE name=?", (name,)).fetchone()
        if row is None:
            raise CheckpointError(f"{self._name} holds no '{name}'; it is not the state of a run")
        _check(row[0], row[1], name)
        return safetensors.torch.load(row[0])

    def rows(self) -> Iterator[RoundRow]:
        """The rows of all committed rounds, in order."""
        with _readable(self._name):
            for number, text, digest in self._db.execute("SELECT round, row, digest FROM rounds ORDER BY round"):
                _check(text, digest, f"round {number}")
                yield read_row(json.loads(text), f"round {number} in {self._name}")


def _parts(clients: Sequence[int]) -> Iterator[Sequence[int]]:
    return (clients[start : start + _AT_ONCE] for start in range(0, len(clients), _AT_ONCE))


def _client_row(client: int, layout: int) -> str:
    return f"client {client} in layout {layout}"


def _cost(state: ClientState) -> int:
    return tree_bytes(state.tree) + _TENSOR_BYTES * (1 + len(state.tree))


def _owned(tree: Tree) -> Tree:
    """The tree without tensors that are a part of something larger, which they would keep in memory."""
    return {
        key: value.clone() if value.untyped_storage().nbytes() > value.numel() * value.element_size() else value
        for key, value in tree.items()
    }


def _digest(content: bytes | str, row: str) -> bytes:
    data = content.encode() if isinstance(content, str) else content
    return hashlib.blake2b(data + row.encode(), digest_size=8).digest()


def _check(content: Any, digest: Any, row: str) -> None:
    if not isinstance(content, bytes | str) or _digest(content, row) != digest:
        raise CheckpointError(f"the stored state of {row} is damaged (its digest differs); start the run anew")


@contextmanager
def _disk(name: Path | str) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        if "full" in str(error) or "disk I/O" in str(error):
            raise DiskError(f"{name} cannot be written: {error}; free some space and resume") from error
        raise CheckpointError(f"{name} is not usable as the state of a run: {error}") from error


@contextmanager
def _readable(name: Path | str) -> Iterator[None]:
    try:
        yield
    except (sqlite3.DatabaseError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} cannot be read as the state of a run: {error}") from error


def load_tree(path: Path) -> Tree:
    """The tensors of a safetensors file, or an error that says what the file is not."""
    if path.is_dir():
        raise CheckpointError(f"'{path}' is a folder; give a .safetensors file")
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"'{path}' does not exist; give a .safetensors file") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"'{path}' is not a safetensors file ({error}); pickle files are never read") from None


def save_tree(path: Path, tree: Tree, metadata: Mapping[str, str]) -> None:
    """Write tensors as a safetensors file, whole or not at all."""
    with written_whole(path) as draft:
        try:
            safetensors.torch.save_file(tree, draft, metadata=dict(metadata))
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))  # the system's own number is all it keeps of a full disk
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def to_device(tree: Tree, device: torch.device) -> Tree:
    """A tree with every tensor on a device."""
    return {key: value.to(device) for key, value in tree.items()}
