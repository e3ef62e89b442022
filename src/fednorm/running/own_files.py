"""Users' own files, as a run sees them: they decide what the config left open, and must be found again unchanged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from fednorm.core.expression import parse_term
from fednorm.data.federation import Federation
from fednorm.data.from_files.deal import OWN, deal
from fednorm.data.from_files.file_set import FileOptions, FileSet
from fednorm.data.from_files.read import read
from fednorm.data.from_files.source import NAMES, Source, find_source
from fednorm.engines.clock.schedule_file import absolute
from fednorm.errors import CheckpointError, ConfigError
from fednorm.models.fitting import VECTOR_MODEL
from fednorm.running.config import DataConfig, RunConfig, updated

_OF_TABLES = ("target", "client", "split", "features", "categories", "standardize", "missing")


def settled_by_files(config: RunConfig, given: Collection[str] = ()) -> RunConfig:
    """The config with all that its own files decide: paths, number of clients, partition, model, digest.

    `given` names the fields that were asked for; those that differ from the default are taken to be. What was asked
    for and cannot be is refused. A config with a digest has been settled before and stays as it is.
    """
    config = replace(config, clock=replace(config.clock, times=absolute(config.clock.times)))
    source = find_source(config.data.name)
    changed = _changed(config)
    _check_fields(config.data, source, changed)
    given = {*given, *changed}
    if source is None:
        return config
    if config.data.digest is not None:
        return config
    files = files_of(source, config)
    changes: dict[str, Any] = {"data.name": str(source), "data.digest": files.digest}
    if files.client is not None:
        changes |= _own_clients(files, config, given)
    elif files.task != "classification" and "data.partition" not in given:
        changes["data.partition"] = "iid"
    if "model" not in given:
        changes |= _model_for(files)
    return updated(config, changes)


def build_own(source: Source, config: RunConfig) -> Federation:
    """The federation of the config's own files; they must be those that the run began with."""
    data = config.data
    files = files_of(source, config)
    _check_digest(files, data)
    term = parse_term(data.partition, "partition", "dir_client(alpha=0.1)")
    return deal(
        files,
        partition=term.name,
        options=term.options,
        num_clients=data.clients,
        seed=config.seed,
        unseen=data.unseen,
        min_size=data.min_size,
        train_limit=data.train_limit,
        test_fraction=data.test_fraction,
    )


def files_of(source: Source, config: RunConfig) -> FileSet:
    """What the files hold, read as the config says."""
    data = config.data
    options = {name: getattr(data, name) for name in (*_OF_TABLES, "size")}
    task = None if config.task is None else parse_term(config.task, "task", "regression(loss=l1)").name
    return read(source, FileOptions(**options, task=task))


def _changed(config: RunConfig) -> set[str]:
    """Fields that are not as they are by default, of those that files may decide."""
    plain = RunConfig()
    found = {f"data.{name}" for name in vars(plain.data) if getattr(config.data, name) != getattr(plain.data, name)}
    return found | ({"model"} if config.model != plain.model else set())


def _check_fields(data: DataConfig, source: Source | None, changed: Collection[str]) -> None:
    """Refuse a field that means nothing for these data."""
    for name in _OF_TABLES:
        if f"data.{name}" in changed and (source is None or source.kind != "table"):
            raise ConfigError(
                f"data.{name}={getattr(data, name)!r} is for a table (--data table:FILE), not for '{data.name}'; "
                "leave it out"
            )
    if "data.size" in changed and source is not None and source.kind != "folder":
        raise ConfigError(f"data.size={data.size} is for images in files, not for '{data.name}'; leave it out")
    if "data.dir" in changed and source is not None:
        raise ConfigError(f"--data-dir is for sets known by name, not for '{data.name}'; leave it out")
    for field in ("test_fraction", "digest"):
        if f"data.{field}" in changed and source is None:
            raise ConfigError(f"data.{field} is for your own files ({NAMES}), not for '{data.name}'; leave it out")


def _own_clients(files: FileSet, config: RunConfig, given: Collection[str]) -> Mapping[str, Any]:
    count = len(files.client_names)
    if "data.clients" in given and config.data.clients != count:
        raise ConfigError(
            f"'{files.name}' brings its own {count} clients, not {config.data.clients}; leave out --clients"
        )
    if "data.partition" in given and config.data.partition != OWN:
        raise ConfigError(f"'{files.name}' brings its own {count} clients; leave out --partition")
    return {"data.clients": count, "data.partition": OWN}


def _model_for(files: FileSet) -> Mapping[str, Any]:
    """The model that is taken when none is asked for; the default is one for images."""
    if files.form == "images":
        return {}
    if files.form == "vectors":
        return {"model": VECTOR_MODEL}
    raise ConfigError(
        f"'{files.name}' holds {files.form} of shape {tuple(files.x.shape[1:])}, for which there is no default model; "
        "name one with --model package.module:factory"
    )


def _check_digest(files: FileSet, data: DataConfig) -> None:
    if data.digest is not None and data.digest != files.digest:
        raise CheckpointError(
            f"'{files.name}' is not what it was when the run began (digest {files.digest}, was {data.digest}); "
            "put the old files back, or start a new run"
        )
