"""The SQLite file of a store: its tables, how it is opened and checked, and what is said when it cannot be used."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from fednorm.errors import CheckpointError, DiskError, first_line
from fednorm.files import free_bytes
from fednorm.halves.state_bytes import page_size
from fednorm.running.seal import BEST, Seal, Total, check_seal, seal_of

VERSION = 3
_UNSEALED = 2
"""The version before, without a seal; it is given one when it is opened."""
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
_SEAL = "CREATE TABLE seal (number INTEGER PRIMARY KEY, text TEXT NOT NULL, digest BLOB NOT NULL);"
_BEST = f"""
CREATE TABLE {BEST} (row INTEGER PRIMARY KEY, id INTEGER NOT NULL, layout INTEGER NOT NULL,
                     digest BLOB NOT NULL, record BLOB NOT NULL);
CREATE INDEX best_ids ON {BEST} (id);
"""
_EMPTY = Seal({"facts": {}, "server": {}, "layouts": {}}, {"clients": Total(), "rounds": Total()})
_WAL_BYTES = 4 << 20


def open_file(path: Path | None, name: object, begun: bool) -> sqlite3.Connection:
    """A file that is whole, of this version, with its journal set; a new one where there is none and none must be.

    One of the version before is given a seal. All of a file is looked at, once.
    """
    db = sqlite3.connect(path or "", isolation_level=None)
    try:
        if path:
            path.chmod(0o600)  # a client's statistics are a fingerprint of its data
        version = db.execute("PRAGMA user_version").fetchone()[0]
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master")]
        if not tables and version == 0:
            if begun:
                raise _lost(name)
            set_journal(db)
            _run(db, _TABLES + _SEAL, _EMPTY)
        else:
            # A version is one byte: a file that has a seal is of no version that had none.
            if version != (VERSION if "seal" in tables else _UNSEALED):
                raise CheckpointError(
                    f"{name} has state version {version}, this fednorm reads {VERSION} and {_UNSEALED}; "
                    "use the fednorm that wrote it"
                )
            set_journal(db)
            _check(db, name, sealed=version == VERSION)
            if version == _UNSEALED:
                _seal(db, tables)
        if begun and db.execute("SELECT count(*) FROM facts").fetchone()[0] == 0:
            raise _lost(name)
    except BaseException:
        db.close()
        raise
    return db


def _lost(name: object) -> CheckpointError:
    return CheckpointError(
        f"{name} is empty, but metrics.jsonl beside it says that the run had begun; put the file back, or start a new "
        "run in another folder"
    )


def _check(db: sqlite3.Connection, name: object, sealed: bool) -> None:
    db.execute("BEGIN")  # one view of the file, whoever writes meanwhile
    try:
        found = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if found != "ok":
            raise CheckpointError(f"{name} is damaged ({found.splitlines()[-1]}); start the run anew")
        if sealed:
            schema = _schema(db)
            if schema not in (_wanted(_TABLES + _SEAL), _wanted(_TABLES + _SEAL + _BEST)):
                raise CheckpointError(f"{name} is damaged (its tables are not those of a run); start the run anew")
            check_seal(db)
    finally:
        db.execute("ROLLBACK")


def _schema(db: sqlite3.Connection) -> list[tuple[str, ...]]:
    return sorted(db.execute("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_master").fetchall())


@cache
def _wanted(script: str) -> list[tuple[str, ...]]:
    """The tables that a script makes, in the words of this SQLite."""
    db = sqlite3.connect(":memory:")
    try:
        db.executescript(script)
        return _schema(db)
    finally:
        db.close()


def _seal(db: sqlite3.Connection, tables: list[str]) -> None:
    """Bring a file of the version before to this one."""
    best = ""
    if BEST in tables:
        best = f"DROP INDEX best_ids; ALTER TABLE {BEST} RENAME TO older; {_BEST} {_copied('older')} DROP TABLE older;"
    _run(db, _SEAL + best)


def _run(db: sqlite3.Connection, script: str, seal: Seal | None = None) -> None:
    """Run a script, seal what comes of it, and make both lasting together."""
    with transaction(db):
        for statement in script.split(";"):
            db.execute(statement)
        (seal or seal_of(db)).write(db)
        db.execute(f"PRAGMA user_version={VERSION}")


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of what is written inside becomes lasting, or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def put_aside(db: sqlite3.Connection) -> None:
    """Keep all clients as they are now, in the place of those that were kept before."""
    db.execute(f"DROP TABLE IF EXISTS {BEST}")
    for statement in (_BEST + _copied("clients")).split(";"):
        db.execute(statement)


def _copied(table: str) -> str:
    return f"INSERT INTO {BEST} SELECT row, id, layout, digest, record FROM {table};"  # noqa: S608


def set_journal(db: sqlite3.Connection) -> None:
    pages = _WAL_BYTES // db.execute("PRAGMA page_size").fetchone()[0]
    db.executescript(
        f"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA wal_autocheckpoint={pages};"
        f"PRAGMA journal_size_limit={_WAL_BYTES};"
    )


def fit_pages(db: sqlite3.Connection, row: int) -> None:
    """Choose the file's page size for the first clients that come, while it is small enough to be rewritten."""
    wanted = page_size(row)
    if db.execute("PRAGMA page_size").fetchone()[0] == wanted:
        return
    try:
        db.executescript(f"PRAGMA journal_mode=DELETE; PRAGMA page_size={wanted}; VACUUM;")
    except sqlite3.OperationalError as error:
        if _is_full(error):
            raise
        # Somebody reads the file just now. Every page size is right, this one only saves space.
    set_journal(db)


def _is_full(error: sqlite3.Error) -> bool:
    return "full" in str(error) or "disk I/O" in str(error)


@contextmanager
def writing(name: object, needed: int = 0) -> Iterator[None]:
    """Turn what SQLite says of a file that is opened or written into one line and an exit code."""
    try:
        yield
    except sqlite3.Error as error:
        if _is_full(error):
            sizes = [f"{needed:,} bytes are to be written"] if needed else []
            sizes += [free_bytes(name)] if isinstance(name, Path) else []
            more = f" ({', '.join(sizes)})" if sizes else ""
            raise DiskError(
                f"{name} cannot be written: {first_line(error)}{more}; free some space and resume"
            ) from error
        raise CheckpointError(f"{name} is not usable as the state of a run: {first_line(error)}") from error


@contextmanager
def reading(name: object) -> Iterator[None]:
    """Likewise of one that is read, whatever is found in the place of what was written."""
    try:
        yield
    except (sqlite3.Error, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{name} cannot be read as the state of a run: {first_line(error)}") from error
