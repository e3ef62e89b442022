"""What must survive a crash: the server's state and each client's own, in one SQLite file, one transaction a round.

Every row has a digest that covers which row it is, so a damaged or exchanged one is noticed and never loaded. Memory
holds the clients of late rounds up to a number of bytes; clients that were never seen cost nothing at all.
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from fednorm.core.state import Tree, tree_bytes
from fednorm.errors import CheckpointError
from fednorm.files import refuse_links
from fednorm.halves.mine import ClientState
from fednorm.halves.state_bytes import (
    RecordLayout,
    encode,
    from_record,
    layout_from_text,
    layout_of,
    layout_to_text,
    stack_from_records,
    to_record,
)
from fednorm.running.records import RoundRow, read_row
from fednorm.running.seal import BEST, check_row, read_seal, row_digest
from fednorm.running.store_file import fit_pages, open_file, put_aside, reading, transaction, writing

_PUT_CLIENT = """
INSERT INTO clients (id, layout, digest, record) VALUES (?,?,?,?)
ON CONFLICT (id) DO UPDATE SET layout=excluded.layout, digest=excluded.digest, record=excluded.record
"""
_AT_ONCE = 500
"""Clients in one query."""
_TENSOR_BYTES = 600
"""About what a tensor costs beside its numbers."""
_ROW_BYTES = 24
"""About what a client's row holds beside its record: id, layout, digest and the row's own header."""


class Store:
    """Server and client state in a file; changes become lasting together, at `commit`.

    Without a path the file is SQLite's own temporary one, which stays in memory while it is small. `cache_bytes` is the
    memory for states that are in the file already; changed ones are held until they are. A file without any commit is
    refused where the run has `begun`.
    """

    def __init__(self, path: Path | None = None, cache_bytes: int = 32 << 20, begun: bool = False) -> None:
        self.path = path
        self.cache_bytes = cache_bytes
        self._name = path or "the run's temporary file"
        self._clients = "clients"
        self._changed: dict[int, ClientState] = {}
        self._cached: OrderedDict[int, ClientState] = OrderedDict()
        self._cached_bytes = 0
        if path:  # SQLite itself would follow links, also of the files that it keeps beside this one
            refuse_links(path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal")))
        with reading(self._name), writing(self._name):
            self._db = open_file(path, self._name, begun)
            try:
                self._layouts = self._stored_layouts()
            except BaseException:
                self._db.close()
                raise
        self._numbers = {layout: number for number, layout in self._layouts.items()}

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
        with reading(self._name):
            stored = {row[0] for row in self._db.execute(f"SELECT id FROM {self._clients}")}  # noqa: S608
        return sorted(stored | self._changed.keys())

    def holding(self, keys: Iterable[str]) -> list[int]:
        """Ids of the clients whose state has all these entries, ascending."""
        wanted = set(keys)
        fitting = [number for number, layout in self._layouts.items() if wanted <= {key for key, _, _ in layout}]
        found: set[int] = set()
        with reading(self._name):
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
            with reading(self._name):
                rows = self._db.execute(
                    f"SELECT id, layout, digest, record FROM {self._clients} WHERE id IN ({marks})",  # noqa: S608
                    part,
                ).fetchall()
            for client, number, digest, record in rows:
                check_row(record, digest, _client_row(client, number), bytes)
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
        with reading(self._name):
            rows = self._db.execute("SELECT number, layout, digest FROM layouts").fetchall()
        found = {}
        for number, text, digest in rows:
            check_row(text, digest, f"layout {number}")
            found[number] = layout_from_text(text)
        return found

    def of_best(self) -> Store:
        """The same store with the clients as the best round left them; for reading alone."""
        other = copy.copy(self)
        other._clients, other._changed = BEST, {}
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
        gone: Collection[str] = (),
    ) -> None:
        """Make a round lasting: server trees, facts, changed clients and the rounds' rows, or none of them.

        Trees that are not given stay as they are, but for those that are `gone`. The clients of the `best` round so far
        are put aside, for `of_best`.
        """
        layouts = {client: layout_of(state.tree) for client, state in self._changed.items()}
        records = [(c, layouts[c], to_record(s.steps, s.tree, layouts[c])) for c, s in sorted(self._changed.items())]
        new = dict.fromkeys(layout for _, layout, _ in records if layout not in self._numbers)
        numbers = {**self._numbers, **{layout: len(self._numbers) + index for index, layout in enumerate(new)}}
        needed = sum(map(tree_bytes, trees.values())) + sum(len(record) for _, _, record in records)
        with writing(self._name, needed):
            if records and not self._numbers:
                fit_pages(self._db, len(records[0][2]) + _ROW_BYTES)
            with transaction(self._db):
                added = {numbers[layout]: layout for layout in new}
                clients = [(client, numbers[layout], record) for client, layout, record in records]
                self._write(trees, {**facts, "round": round}, rows, added, clients, best, gone)
        self._numbers = numbers
        self._layouts = {number: layout for layout, number in numbers.items()}
        changed, self._changed = self._changed, {}
        for client, state in changed.items():
            self._cache(client, ClientState(state.steps, _owned(state.tree)))

    def _write(
        self,
        trees: Mapping[str, Tree],
        facts: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        layouts: Mapping[int, RecordLayout],
        clients: Sequence[tuple[int, int, bytes]],
        best: bool,
        gone: Collection[str],
    ) -> None:
        """Write everything that is new, and the seal that goes with it."""
        seal = read_seal(self._db).without("server", gone)
        self._db.executemany("DELETE FROM server WHERE name=?", ((name,) for name in gone))
        blobs = {name: encode(tree) for name, tree in trees.items()}
        digests = {name: row_digest(blob, name) for name, blob in blobs.items()}
        self._db.executemany("REPLACE INTO server VALUES (?,?,?)", ((n, blobs[n], digests[n]) for n in blobs))
        seal = seal.with_named("server", digests)

        texts = {str(number): layout_to_text(layout) for number, layout in layouts.items()}
        digests = {number: row_digest(text, f"layout {number}") for number, text in texts.items()}
        self._db.executemany("INSERT INTO layouts VALUES (?,?,?)", ((int(n), texts[n], digests[n]) for n in texts))
        seal = seal.with_named("layouts", digests)

        texts = {name: json.dumps(value) for name, value in facts.items()}
        digests = {name: row_digest(text, f"fact {name}") for name, text in texts.items()}
        self._db.executemany("REPLACE INTO facts VALUES (?,?,?)", ((n, texts[n], digests[n]) for n in texts))
        seal = seal.with_named("facts", digests)

        before = self._digests("clients", "id", [client for client, _, _ in clients])
        records = [(c, number, row_digest(record, _client_row(c, number)), record) for c, number, record in clients]
        self._db.executemany(_PUT_CLIENT, records)
        seal = seal.with_rows("clients", before, (digest for _, _, digest, _ in records))

        lines = [(row["round"], json.dumps(row)) for row in rows]
        before = self._digests("rounds", "round", [number for number, _ in lines])
        values = [(number, text, row_digest(text, f"round {number}")) for number, text in lines]
        self._db.executemany("REPLACE INTO rounds VALUES (?,?,?)", values)
        seal = seal.with_rows("rounds", before, (digest for _, _, digest in values))
        if best:
            put_aside(self._db)
            seal = seal.with_best()
        seal.write(self._db)

    def _digests(self, table: str, column: str, keys: Sequence[int]) -> list[bytes]:
        """The digests of those of some rows that are there."""
        found: list[bytes] = []
        for part in _parts(keys):
            query = f"SELECT digest FROM {table} WHERE {column} IN ({','.join('?' * len(part))})"  # noqa: S608
            found += [row[0] for row in self._db.execute(query, part)]
        return found

    @property
    def digest(self) -> str:
        """One number that stands for all that the last commit left."""
        with reading(self._name):
            return read_seal(self._db).digest

    def facts(self) -> dict[str, Any]:
        """The facts of the last commit; empty before the first."""
        found = {}
        with reading(self._name):
            for name, text, digest in self._db.execute("SELECT name, value, digest FROM facts"):
                check_row(text, digest, f"fact {name}")
                found[name] = json.loads(text)
        return found

    def tree(self, name: str) -> Tree:
        """A server tree of the last commit."""
        with reading(self._name):
            row = self._db.execute("SELECT blob, digest FROM server WHERE name=?", (name,)).fetchone()
        if row is None:
            raise CheckpointError(f"{self._name} holds no '{name}'; it is not the state of a run")
        check_row(row[0], row[1], name, bytes)
        return safetensors.torch.load(row[0])

    def tree_names(self) -> list[str]:
        """The names of all server trees of the last commit."""
        with reading(self._name):
            return [row[0] for row in self._db.execute("SELECT name FROM server ORDER BY name")]

    def rows(self) -> Iterator[RoundRow]:
        """The rows of all committed rounds, in order."""
        with reading(self._name):
            for number, text, digest in self._db.execute("SELECT round, row, digest FROM rounds ORDER BY round"):
                check_row(text, digest, f"round {number}")
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


def to_device(tree: Tree, device: torch.device) -> Tree:
    """A tree with every tensor on a device."""
    return {key: value.to(device) for key, value in tree.items()}
