"""What a run was given: objects from Python in place of names, and what its folder remembers of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fednorm.core.method import Method
from fednorm.core.task import AnyTask
from fednorm.data.digest import data_digests
from fednorm.data.federation import Federation
from fednorm.data.given import Examples, from_clients
from fednorm.errors import CheckpointError, ConfigError
from fednorm.files import read_json
from fednorm.running import extensions
from fednorm.running.config import RunConfig, differences, from_dict, to_dict, updated
from fednorm.running.consent import named_code, refuse_code
from fednorm.running.folder import RunFolder
from fednorm.running.plan import Plan, make_plan
from fednorm.running.sealed import SHA, is_broken
from fednorm.running.store import Store
from fednorm.running.tasks import targets_of

_BESIDE = ("given", "compare", "given_data", "use_sha256", SHA)
"""What config.json holds beside the fields of the config."""


@dataclass(frozen=True)
class Objects:
    """Objects given in Python in place of names in the config."""

    model: nn.Module | None = None
    federation: Federation | None = None
    method: Method | None = None
    task: AnyTask | None = None
    code: tuple[str, ...] = ()
    """code that may be imported, as `named_code` names it: that of a config which was typed or consented to"""

    @property
    def names(self) -> list[str]:
        return [name for name in _ARGUMENTS if getattr(self, name) is not None]

    def trusting(self, config: RunConfig) -> Objects:
        """The same for whoever wrote this config, or consented to the code that it names."""
        return replace(self, code=tuple(named_code(config)))

    def plan(self, config: RunConfig) -> Plan:
        """The plan of a config with these in the place of its names."""
        return make_plan(
            config, model=self.model, federation=self.federation, method=self.method, task=self.task, code=self.code
        )

    def named(self, config: RunConfig) -> RunConfig:
        """The config with the names of what was given."""
        names: dict[str, Any] = {"method": self.method.name} if self.method else {}
        if self.federation is not None:
            names |= {"data.name": self.federation.name, "data.clients": len(self.federation.clients)}
        return updated(config, names)


def gathered(
    model: nn.Module | str | None,
    clients: Sequence[Examples] | None,
    test: Sequence[Examples] | Examples | None,
    federation: Federation | None,
    method: Method | str | None = None,
    task: AnyTask | str | None = None,
) -> Objects:
    """The objects among what `run`, `compare`, `resume` and `export` take; data may come as clients and tests."""
    if clients is not None:
        if federation is not None:
            raise ConfigError("clients and federation were both given; give one of them")
        if test is None:
            raise ConfigError("clients were given without test data; pass test=(x, y), or a list with one per client")
        federation = from_clients(clients, test, task=targets_of(task))
    elif test is not None:
        raise ConfigError("test data was given without clients; pass clients=[...], one data set each")
    return Objects(
        model if isinstance(model, nn.Module) else None,
        federation,
        method if isinstance(method, Method) else None,
        None if isinstance(task, str) else task,
    )


def stored_config(config: RunConfig, objects: Objects, data: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What config.json holds: the resolved config, which of its parts were objects given in Python, and which files.

    `data` are the digests of data that were given, where they are known already.
    """
    stored: dict[str, Any] = {**to_dict(config), "given": objects.names}
    if objects.federation is not None:
        stored["given_data"] = data or data_digests(objects.federation)
    if digests := extensions.digests(config.use):
        stored["use_sha256"] = digests
    return stored


def read_stored(folder: RunFolder) -> Mapping[str, Any]:
    """config.json of a run or of a comparison."""
    stored = read_json(folder.config)
    if not isinstance(stored, dict) or not stored.keys() & {"given", "compare"}:
        raise CheckpointError(f"'{folder.config}' is not the config of a run; give a folder that fednorm made")
    comparison = stored.get("compare")
    if "compare" in stored and (not isinstance(comparison, dict) or comparison.keys() != {"methods", "seeds"}):
        raise CheckpointError(f"'{folder.config}' is not the config of a comparison; give a folder that fednorm made")
    if is_broken(stored):
        _refuse_changed(folder, stored)
    return stored


def _refuse_changed(folder: RunFolder, stored: Mapping[str, Any]) -> None:
    """Refuse a config.json that is not what was written, with all that the run's state knows of it."""
    if folder.state.exists():
        with closing(Store(folder.state)) as store:
            facts = store.facts()
        if facts:
            refuse_other_config(facts["config"], config_in(stored), f"'{folder.path}'")
    raise CheckpointError(
        f"'{folder.config}' is damaged or was edited (its digest differs); put it back, or start a new run"
    )


def refuse_other_config(stored: Mapping[str, Any], config: RunConfig, run: str = "the run") -> None:
    """Refuse to go on from the state of a run that was started with another config."""
    # A field that is new since the run was started has the value that changes nothing.
    before, now = to_dict(from_dict(stored)), to_dict(config)
    if before != now:
        changed = differences(before, now)
        raise ConfigError(f"{run} was started with another config: {changed}; put it back, or start a new run")


def config_in(stored: Mapping[str, Any]) -> RunConfig:
    """The config itself, of all that config.json holds."""
    return from_dict({key: value for key, value in stored.items() if key not in _BESIDE})


def read_config(
    folder: RunFolder, *, allow_code: bool = False, use: Iterable[str] = ()
) -> tuple[RunConfig, Mapping[str, Any] | None]:
    """The config in a folder, and for a comparison its methods and seeds.

    A file may come from anywhere, so code that it names is refused here, for every caller alike; `use` are the names
    that the caller gave as well.
    """
    stored = read_stored(folder)
    config = config_in(stored)
    refuse_code(config, folder.config, allow_code, extensions.resolved(use))
    extensions.warn_of_changes(stored.get("use_sha256", {}))
    return config, stored.get("compare")


def check_given(
    folder: RunFolder, stored: Mapping[str, Any], objects: Objects, methods: Mapping[str, Method] | None = None
) -> None:
    """Refuse to go on with other objects than a run was started with; `methods` are those of a comparison."""
    given = list(stored.get("given", []))
    now = given_names(objects, methods)
    if given == now:
        if objects.federation is not None:
            refuse_other_data(folder, stored, data_digests(objects.federation))
        return
    if given:
        raise ConfigError(
            f"'{folder.path}' was started from Python with its own {', '.join(given)}; continue it there: "
            f"fednorm.resume('{folder.path}', {', '.join(f'{_ARGUMENTS[name]}=...' for name in given)})"
        )
    names = ", ".join(_ARGUMENTS[name] for name in now)
    raise ConfigError(f"'{folder.path}' was started without objects from Python; continue it without {names}")


def given_names(objects: Objects, methods: Mapping[str, Method] | None = None) -> list[str]:
    """What config.json says was given."""
    return [*objects.names, *(["method"] if methods else [])]


def refuse_other_data(folder: RunFolder, stored: Mapping[str, Any], now: Mapping[str, str]) -> None:
    """Data given in Python have no name that a config could compare, so their digests are compared."""
    before = stored.get("given_data") or {}
    changed = [part for part in now if before.get(part) != now[part]] if before else []
    if changed:
        raise ConfigError(
            f"'{folder.path}' was started with other data: {', '.join(changed)} differ; "
            "give the data it was started with, or another folder"
        )


_ARGUMENTS = {"model": "model", "federation": "clients", "method": "method", "task": "task"}


def check_stored(folder: RunFolder, expected: Mapping[str, Any]) -> None:
    """Refuse a folder whose config.json is not what is expected of it; only files of the user's may have changed."""
    stored = read_stored(folder)
    beside = {key: stored[key] for key in _BESIDE if key in stored}
    told, wanted = {**to_dict(config_in(stored)), **beside}, dict(expected)
    for each in (told, wanted):
        each.pop("use_sha256", None)
        each.pop(SHA, None)
    if told != wanted:
        refuse_other_data(folder, told, wanted.get("given_data", {}))
        raise ConfigError(f"'{folder.path}' was started with another config: {differences(told, wanted)}")
