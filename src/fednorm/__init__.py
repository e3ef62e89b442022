"""Normalization layers that work in federated learning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednorm.comparison import compare as compare
    from fednorm.config import RunConfig as RunConfig
    from fednorm.data.federation import Federation as Federation
    from fednorm.data.federation import from_clients as from_clients
    from fednorm.errors import ConfigError as ConfigError
    from fednorm.errors import FednormError as FednormError
    from fednorm.loop import load as load
    from fednorm.loop import local_rules as local_rules
    from fednorm.loop import merge as merge
    from fednorm.loop import split as split
    from fednorm.method import Method as Method
    from fednorm.method import Part as Part
    from fednorm.prepared import prepare as prepare
    from fednorm.registry import known_methods as known_methods
    from fednorm.registry import parse as parse
    from fednorm.registry import register as register
    from fednorm.runs import run as run
    from fednorm.server import Update as Update
    from fednorm.state import Kind as Kind
    from fednorm.state import Policy as Policy
    from fednorm.state import entries as entries
    from fednorm.state import kinds as kinds
    from fednorm.state import register_norm as register_norm

__version__ = "0.1.0"

# Names are imported on first use, so that `import fednorm` and `fednorm --help` do not wait for torch.
_HOME = {
    "ConfigError": "errors",
    "Federation": "data.federation",
    "FednormError": "errors",
    "Kind": "state",
    "Method": "method",
    "Part": "method",
    "Policy": "state",
    "RunConfig": "config",
    "Update": "server",
    "compare": "comparison",
    "entries": "state",
    "from_clients": "data.federation",
    "kinds": "state",
    "known_methods": "registry",
    "load": "loop",
    "local_rules": "loop",
    "merge": "loop",
    "parse": "registry",
    "prepare": "prepared",
    "register": "registry",
    "register_norm": "state",
    "run": "runs",
    "split": "loop",
}
__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fednorm' has no attribute '{name}'")
    return getattr(importlib.import_module(f"fednorm.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
