"""Normalization layers that work in federated learning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednorm.config import RunConfig
    from fednorm.method import Method
    from fednorm.registry import parse, register, registry

__version__ = "0.1.0"

# Names are imported on first use, so that `import fednorm` and `fednorm --help` do not wait for torch.
_HOME = {
    "Method": "fednorm.method",
    "RunConfig": "fednorm.config",
    "parse": "fednorm.registry",
    "register": "fednorm.registry",
    "registry": "fednorm.registry",
}

__all__ = ["Method", "RunConfig", "__version__", "parse", "register", "registry"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fednorm' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
