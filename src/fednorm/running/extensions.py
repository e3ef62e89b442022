"""`use`: files and modules of the user's own that register methods, models, data sets and whatever else has a name.

Only who types a file's name, or calls from Python, has it run; a config that was read from a file asks first (see
`consent`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from fednorm.errors import ConfigError, UserCodeError, first_line, visible
from fednorm.running.config import RunConfig

_loaded: dict[str, str] = {}
"""Digests of the files, and names of the modules, that were imported in this process."""


def resolved(use: Iterable[str], folder: Path | None = None) -> tuple[str, ...]:
    """The same with whole paths, each once; paths are of the folder given, or of the one the user is in."""
    return tuple(dict.fromkeys(str((folder or Path.cwd()) / name) if is_file(name) else name for name in use))


def is_file(name: str) -> bool:
    """Whether a name means a file; else it is a module.

    >>> is_file("mine.py"), is_file("package.module")
    (True, False)
    """
    return name.endswith(".py") or os.sep in name


def with_extensions(config: RunConfig) -> RunConfig:
    """The config with whole paths in `use`, all of which is imported; what was imported already is left as it is."""
    if not config.use:
        return config
    config = replace(config, use=resolved(config.use))
    load(config.use)
    return config


def load(use: Sequence[str]) -> None:
    """Import files and modules, which register what they bring; a file that changed is imported again."""
    if use:
        # A name of the user's must meet the built-in ones, whoever is imported first.
        importlib.import_module("fednorm.methods")
        importlib.import_module("fednorm.models")
    for name in resolved(use):
        wanted = sha256(name) if is_file(name) else name
        if _loaded.get(name) != wanted:
            with contextlib.redirect_stdout(sys.stderr):  # what is printed there is no part of a command's answer
                _load_file(Path(name)) if is_file(name) else _load_module(name)
            _loaded[name] = wanted


def sha256(path: str) -> str:
    """The digest of a file's bytes."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"--use '{path}' cannot be read: {error.strerror}; give a Python file or a module") from None


def digests(use: Iterable[str]) -> dict[str, str]:
    """The digests of the files among what is used; modules have their package's version for that."""
    return {name: sha256(name) for name in use if is_file(name)}


def warn_of_changes(stored: Mapping[str, str]) -> None:
    """Say which files are not those that a run was started with: what it trains from now on may differ."""
    for path, digest in stored.items():
        if sha256(path) != digest:
            print(
                visible(f"warning: '{path}' has changed since the run was started; from here on the new one is used"),
                file=sys.stderr,
            )


def _load_file(path: Path) -> None:
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--use '{path}' is not a Python file; give FILE.py or a module")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for what it imports from beside it, also in worker processes
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file raises
        _put_back(name, before)
        raise UserCodeError(f"--use {_where(error, path)}") from error


def _module_name(path: Path) -> str:
    """The file's own name where nothing else has it, so that worker processes find what is in it; else one made up."""
    stem = path.stem
    known = sys.modules.get(stem)
    if stem.isidentifier():
        if known is not None and getattr(known, "__file__", None) == str(path):
            return stem
        if known is None and importlib.util.find_spec(stem) is None:
            return stem
        if known is None and getattr(importlib.util.find_spec(stem), "origin", None) == str(path):
            return stem
    return f"fednorm_use_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _put_back(name: str, before: ModuleType | None) -> None:
    if before is None:
        sys.modules.pop(name, None)
    else:
        sys.modules[name] = before


def _load_module(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"--use '{name}' is neither a file nor a module; give FILE.py or package.module")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as `python -m` has it
    importlib.invalidate_caches()
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"--use '{name}': there is no module of that name; give FILE.py, run in its folder, or install it"
            ) from None
        raise ConfigError(f"--use '{name}' needs '{error.name}'; install it") from error
    except Exception as error:  # whatever a user's module raises
        raise UserCodeError(f"--use {_where(error, None, name)}") from error


def _where(error: Exception, path: Path | None, name: str = "") -> str:
    """The line of the user's code that an error comes from, and what it says."""
    said = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, SyntaxError):
        return f"'{error.filename}', line {error.lineno}: SyntaxError: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    own = [f for f in frames if f.filename == str(path)] if path else []
    own = own or [f for f in frames if not f.filename.startswith((ours, "<frozen"))]
    return f"'{own[-1].filename}', line {own[-1].lineno}: {said}" if own else f"'{path or name}': {said}"
