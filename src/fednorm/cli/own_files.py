"""Data in users' own files on the command line: what was asked for beside them, and what is to be said of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fednorm.cli.output import echo
from fednorm.data.from_files.source import find_source
from fednorm.running.config import RunConfig

if TYPE_CHECKING:
    from fednorm.cli.settings import Asked


def field_names(fields: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted names of the fields that a file has.

    >>> field_names({"rounds": 3, "data": {"clients": 5}})
    ['rounds', 'data.clients']
    """
    nested = {key: value for key, value in fields.items() if isinstance(value, Mapping)}
    plain = [f"{prefix}{key}" for key in fields if key not in nested]
    return plain + [name for key, value in nested.items() for name in field_names(value, f"{prefix}{key}.")]


def with_files(config: RunConfig, given: set[str]) -> RunConfig:
    """The config with what own files decide; they are read for it, which needs torch."""
    from fednorm.running.own_files import settled_by_files

    return settled_by_files(config, given)


def tell_of_files(asked: Asked) -> None:
    """Say how own files were read, and which model was taken for them, before anything is trained."""
    if asked.quiet or find_source(asked.config.data.name) is None:
        return
    from fednorm.running.plan import build_federation

    federation = build_federation(asked.config)
    stream = sys.stderr if asked.json else sys.stdout
    for line in data_lines(asked.config, len(federation.clients), federation.notes):
        echo(line, file=stream)


def data_lines(config: RunConfig, clients: int, notes: tuple[str, ...]) -> list[str]:
    """What a user should know about own data, a line each."""
    return [f"data: {config.data.name}, {clients} clients; model: {config.model}", *(f"data: {note}" for note in notes)]
