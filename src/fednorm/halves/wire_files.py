"""The wire's bytes as files, for what must survive a restart: written whole or not at all, and checked when read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fednorm.core.state import Tree
from fednorm.errors import CheckpointError, WireError
from fednorm.files import written_whole
from fednorm.halves.mine import ClientState, Mine
from fednorm.halves.wire_format import Limits, as_object, pack, seal, unpack, unseal

_OWN = Limits(max_bytes=sys.maxsize, max_entries=sys.maxsize, max_header=sys.maxsize)
"""A file is no stranger: it may be as large as it is."""


def save(path: Path, header: Mapping[str, Any], trees: Mapping[str, Tree]) -> None:
    """Write a header of JSON values (NaN and infinities too) and some trees, so that a kill leaves old or new.

    Only its owner may read the file: what a client keeps tells of its data.
    """
    # The header goes as a text: strict JSON, which the wire asks for, has no NaN.
    data = pack(*seal("file", {"header": json.dumps(dict(header), sort_keys=True)}, trees))
    with written_whole(path) as draft:
        draft.unlink(missing_ok=True)  # one that a kill left behind may be open to others
        draft.touch(0o600)
        draft.write_bytes(data)
    _sync_folder(path.parent)


def load(path: Path) -> tuple[dict[str, Any], dict[str, Tree]]:
    """What was saved; a `FileNotFoundError` where nothing was, a `CheckpointError` where the file cannot be trusted."""
    try:
        kind, fields, trees, _ = unseal(*unpack(path.read_bytes(), _OWN))
        header = as_object(json.loads(fields["header"])) if kind == "file" and fields.keys() == {"header"} else None
    except WireError as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}; bring back a good copy, or start anew") from None
    except (TypeError, ValueError, RecursionError):
        header, trees = None, {}
    if header is None:
        raise CheckpointError(f"'{path}' is a message of fednorm's, not a saved state; choose another file")
    return header, trees


def save_mine(path: Path, mine: Mine, *, terms: str | None = None) -> None:
    """Save what a client keeps, with the digest of the terms it was made under."""
    pending = mine.pending or ClientState()
    header = {
        "terms": terms,
        "exchange": mine.exchange,
        "steps": mine.accepted.steps,
        "pending_exchange": mine.pending_exchange,
        "pending_steps": None if mine.pending is None else pending.steps,
    }
    save(path, header, {"accepted": mine.accepted.tree, "pending": pending.tree})


def load_mine(path: Path, *, terms: str | None = None) -> Mine:
    """What a client kept, nothing where there is no file; with `terms`, an error where it was kept under others.

    A client whose file was lost so begins as a new one, which the server's next request notices (`Mine.as_of`).
    """
    try:
        header, trees = load(path)
    except FileNotFoundError:
        return Mine()
    whole = {"exchange", "steps", "pending_exchange"}
    numbers = [header.get(name) for name in whole] + [header.get("pending_steps") or 0]
    fits = header.keys() == whole | {"pending_steps", "terms"} and trees.keys() == {"accepted", "pending"}
    if not fits or not all(type(number) is int for number in numbers):
        raise CheckpointError(f"'{path}' is not the state of a client; choose another file")
    if terms is not None and header["terms"] != terms:
        raise CheckpointError(f"'{path}' is a client's state of another run; choose another file for this one")
    ahead: int | None = header["pending_steps"]
    return Mine(
        accepted=ClientState(header["steps"], trees["accepted"]),
        exchange=header["exchange"],
        pending=None if ahead is None else ClientState(ahead, trees["pending"]),
        pending_exchange=header["pending_exchange"],
    )


def _sync_folder(folder: Path) -> None:
    """A new name is on the disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
