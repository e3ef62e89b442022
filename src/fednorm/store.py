"""What must survive a crash: the server's state and each client's own, in one SQLite file, one transaction a round.

Tensors lie in safetensors blobs, each with a digest that covers its place, so a damaged or exchanged row is noticed
and never loaded. Clients that were never seen cost nothing.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from fednorm.errors import CheckpointError, DiskError
from fednorm.state import Tree

VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS server (name TEXT PRIMARY KEY, blob BLOB NOT NULL, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS clients (id INTEGER PRIMARY KEY, steps INTEGER NOT NULL, blob BLOB NOT NULL, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rounds (round INTEGER PRIMARY KEY, row TEXT NOT NULL);
"""  # noqa: E501


@dataclass(frozen=True)
class ClientState:
    """What a client keeps: how many batches of its life it has used, and its local entries."""

    steps: int = 0
    tree: Tree = field(default_factory=dict)


class Store:
    """Server and client state, in memory or in a file; changes become lasting together, at `commit`."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._clients: dict[int, ClientState] = {}
        self._changed: set[int] = set()
        with _disk(path):
            self._db = sqlite3.connect(path or ":memory:", isolation_level=None)
            if path:
                path.chmod(0o600)  # a client's statistics are a fingerprint of its data
            self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _TABLES)

    def close(self) -> None:
        self._db.close()

    # -- clients --

    def get(self, client: int) -> ClientState:
        """A client's state; empty for one that was never seen."""
        if client not in self._clients:
            with _readable(self.path):
                row = self._db.execute("SELECT steps, blob, digest FROM clients WHERE id=?", (client,)).fetchone()
            if row is None:
                return ClientState()
            self._clients[client] = ClientState(row[0], _decode(row[1], row[2], f"client {client} at step {row[0]}"))
        return self._clients[client]

    def put(self, client: int, state: ClientState) -> None:
        """Change a client's state; lasting from the next commit on."""
        self._clients[client] = state
        self._changed.add(client)

    def seen(self) -> list[int]:
        """Ids of all clients that have state, ascending."""
        with _readable(self.path):
            stored = {row[0] for row in self._db.execute("SELECT id FROM clients")}
        return sorted(stored | self._clients.keys())

    # -- rounds --

    def commit(self, round: int, trees: dict[str, Tree], facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Make a round lasting: server trees, facts, changed clients and the rounds' rows, or none of them."""
        with _disk(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for name, tree in trees.items():
                    blob = encode(tree)
                    self._db.execute("REPLACE INTO server VALUES (?,?,?)", (name, blob, _digest(blob, name)))
                for client in sorted(self._changed):
                    state = self._clients[client]
                    blob = encode(state.tree)
                    place = f"client {client} at step {state.steps}"
                    self._db.execute(
                        "REPLACE INTO clients VALUES (?,?,?,?)", (client, state.steps, blob, _digest(blob, place))
                    )
                for name, value in {**facts, "round": round, "version": VERSION}.items():
                    self._db.execute("REPLACE INTO facts VALUES (?,?)", (name, json.dumps(value)))
                for row in rows:
                    self._db.execute("REPLACE INTO rounds VALUES (?,?)", (row["round"], json.dumps(row)))
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        self._changed.clear()

    def facts(self) -> dict[str, Any]:
        """The facts of the last commit; empty before the first."""
        with _readable(self.path):
            found = {name: json.loads(value) for name, value in self._db.execute("SELECT name, value FROM facts")}
        if found and found.get("version") != VERSION:
            raise CheckpointError(
                f"{self.path} has state version {found.get('version')}, this fednorm reads {VERSION}; "
                "use the fednorm that wrote it"
            )
        return found

    def tree(self, name: str) -> Tree:
        """A server tree of the last commit."""
        with _readable(self.path):
            row = self._db.execute("SELECT blob, digest FROM server WHERE name=?", (name,)).fetchone()
        if row is None:
            raise CheckpointError(f"{self.path} holds no '{name}'; it is not the state of a run")
        return _decode(row[0], row[1], name)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of all committed rounds, in order."""
        with _readable(self.path):
            yield from (json.loads(row[0]) for row in self._db.execute("SELECT row FROM rounds ORDER BY round"))


def encode(tree: Tree) -> bytes:
    """A tree as safetensors bytes."""
    return safetensors.torch.save({key: value.detach().cpu().contiguous() for key, value in tree.items()})


def _digest(blob: bytes, place: str) -> str:
    return hashlib.blake2b(blob + place.encode(), digest_size=16).hexdigest()


def _decode(blob: bytes, digest: str, place: str) -> Tree:
    if not isinstance(blob, bytes) or _digest(blob, place) != digest:
        raise CheckpointError(f"the stored state of {place} is damaged (its digest differs); start the run anew")
    return safetensors.torch.load(blob)


@contextmanager
def _disk(path: Path | None) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        if "full" in str(error) or "disk I/O" in str(error):
            raise DiskError(f"{path} cannot be written: {error}; free some space and resume") from error
        raise CheckpointError(f"{path} is not usable as the state of a run: {error}") from error


@contextmanager
def _readable(path: Path | None) -> Iterator[None]:
    try:
        yield
    except (sqlite3.DatabaseError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as the state of a run: {error}") from error


def load_tree(path: Path) -> Tree:
    """The tensors of a safetensors file, or an error that says what the file is not."""
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"'{path}' does not exist; give a .safetensors file") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"'{path}' is not a safetensors file ({error}); pickle files are never read") from None


def to_device(tree: Tree, device: torch.device) -> Tree:
    """A tree with every tensor on a device."""
    return {key: value.to(device) for key, value in tree.items()}
