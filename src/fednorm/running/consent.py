"""Code that a file names runs only if the user says so: what a config would import, and the refusal."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fednorm.core.expression import parse_term
from fednorm.errors import ConfigError
from fednorm.running.config import RunConfig
from fednorm.running.extensions import resolved

_LIBRARIES = ("timm", "torchvision")


def named_code(config: RunConfig, trusted: Iterable[str] = ()) -> list[str]:
    """What a config would import that is the user's own, without files and modules of `use` that are trusted.

    >>> named_code(RunConfig(model="package.module:factory", use=("mine.py",)), trusted=["mine.py"])
    ["model 'package.module:factory'"]
    """
    source, colon, _ = parse_term(config.model, "model", "resnet20(shortcut=B)").name.partition(":")
    trusted = set(resolved(trusted))
    found = [f"model '{config.model}'"] if colon and source not in _LIBRARIES else []
    return found + [f"use '{name}'" for name in resolved(config.use) if name not in trusted]


def refuse_code(config: RunConfig, where: object, allowed: bool, trusted: Iterable[str] = ()) -> None:
    """Refuse a config that was read from a file and names code, unless the user allowed that or typed the names."""
    found = named_code(config, trusted)
    if found and not allowed:
        raise ConfigError(f"'{where}' names code to run, {', '.join(found)}; if you trust it, add --allow-code")


def refuse_unasked(config: RunConfig, consented: Collection[str]) -> None:
    """Refuse a config that names code which is not among what its user consented to, as `named_code` names it."""
    unasked = [name for name in named_code(config) if name not in consented]
    if unasked:
        raise ConfigError(
            f"the config names code to run, {', '.join(unasked)}, and nobody consented; "
            "if you trust it, pass code=named_code(config)"
        )
