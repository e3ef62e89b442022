"""From defaults, a TOML file, `--set` and flags to one config: later ones win, one validator checks them all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from fednorm.cli.own_files import field_names, with_files
from fednorm.core.expression import literal
from fednorm.errors import ConfigError, unknown
from fednorm.running.config import RunConfig, all_fields, from_dict, updated
from fednorm.running.consent import refuse_code
from fednorm.running.extensions import resolved
from fednorm.running.recipe import Recipe, read_recipe

_MOST_SEEDS = 1000
"""Seeds that a number alone may ask for: one of more digits was meant to be a seed."""
_EXCLUSIVE = (("train.local_steps", "train.local_epochs"), ("clients_per_round", "client_fraction"))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What `run` and `compare` were asked to do."""

    config: RunConfig
    methods: tuple[str, ...]
    """Those of the file's [compare] table."""
    seeds: tuple[int, ...]
    out: Path | None
    jobs: int
    dry_run: bool
    json: bool
    quiet: bool
    tensorboard: bool
    track: tuple[str, ...] = ()
    """trackers to follow the run with, beside that of `--tensorboard`"""
    code_in_file: bool
    """Whether the config names code that only `--allow-code` lets run again."""

    @property
    def trackers(self) -> dict[str, str]:
        """All trackers, each with the flag that asked for it."""
        flags = {name: f"--track {name}" for name in self.track}
        return flags | {"tensorboard": "--tensorboard"} if self.tensorboard else flags

    def with_seed(self) -> Asked:
        """The same for its one seed."""
        return replace(self, config=replace(self.config, seed=self.seeds[0]))


def resolve(
    *,
    file: Path | None,
    assignments: Iterable[str],
    flags: Mapping[str, str],
    use: Sequence[str] = (),
    allow_code: bool,
) -> tuple[RunConfig, Recipe]:
    """The config, and the recipe it started from; what is typed needs no other consent, what the file names does."""
    recipe = read_recipe(file) if file else Recipe()
    config = from_dict(recipe.fields)
    changes = dict(map(read_assignment, assignments)) | {name: read_value(name, text) for name, text in flags.items()}
    typed = resolved(use)
    if file:
        config = replace(config, use=resolved(config.use, file.parent.absolute()))
        replaced = {name: getattr(RunConfig(), name) for name in ("model", "use") if name in changes}
        refuse_code(replace(config, **replaced), file, allow_code, typed)
    for pair in _EXCLUSIVE:
        for mine, other in (pair, pair[::-1]):
            if mine in changes and other not in changes:
                changes[other] = None  # the file's choice gives way to the one on the command line
    config = updated(config, changes)
    config = replace(config, use=resolved((*config.use, *typed)))
    return with_files(config, {*changes, *field_names(recipe.fields)}), recipe


def read_assignment(text: str) -> tuple[str, Any]:
    """The field and value of `--set train.lr=0.1`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text} has no value; write --set FIELD=VALUE, such as --set train.lr=0.1")
    return name.strip(), read_value(name.strip(), value.strip())


def read_value(name: str, text: str) -> Any:
    """A value from the command line as its field wants it; text stays text.

    >>> read_value("train.lr", "1e-3"), read_value("data.dir", "2024"), read_value("init", "none")
    (0.001, '2024', None)
    """
    types = field_types()
    if name not in types:
        raise unknown("config field", name, all_fields())
    options = get_args(types[name]) or (types[name],)
    if type(None) in options and text.lower() in ("none", "null"):
        return None
    takes_text = str in options or any(isinstance(option, str) for option in options)
    return text if takes_text else literal(text)


def field_types(cls: type[Any] = RunConfig, prefix: str = "") -> dict[str, Any]:
    """The type of every field by its dotted name."""
    found: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for item in fields(cls):
        hint = hints[item.name]
        nested = isinstance(hint, type) and is_dataclass(hint)
        found |= field_types(hint, f"{prefix}{item.name}.") if nested else {f"{prefix}{item.name}": hint}
    return found


def read_seeds(text: str | None, first: int) -> tuple[int, ...]:
    """Seeds from `3` (three of them, from the first on) or from a list `0,5,7`.

    >>> read_seeds("3", 0), read_seeds("0,5", 0), read_seeds("7,", 0), read_seeds(None, 4)
    ((0, 1, 2), (0, 5), (7,), (4,))
    """
    if text is None:
        return (first,)
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not pieces or not all(piece.isdecimal() for piece in pieces):
        raise ConfigError(f"--seeds {text} cannot be read; give a number of seeds, or a list such as 0,1,2")
    if "," in text:
        return tuple(map(int, pieces))
    if int(text) < 1:
        raise ConfigError(f"--seeds {text} is out of range; give 1 or more, or with a comma seeds themselves: {text},")
    if int(text) > _MOST_SEEDS:
        raise ConfigError(f"--seeds {text} is out of range; give at most {_MOST_SEEDS:,}, or seeds themselves: {text},")
    return tuple(range(first, first + int(text)))
