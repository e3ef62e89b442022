"""fednorm's methods on NVIDIA FLARE: the two halves over its tasks, with state where its processes live and die."""

from __future__ import annotations

import importlib
from typing import Any

from fednorm.errors import require

_WHERE = {"EdgeRecipe": "edge.recipe", "Recipe": "recipe", "SharingFilter": "filter", "join": "script"}
__all__ = ["EdgeRecipe", "Recipe", "SharingFilter", "join"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: the package itself must import where NVFlare is not installed."""
    if name not in _WHERE:
        raise AttributeError(f"module 'fednorm.nvflare' has no attribute '{name}'")
    require("nvflare", "nvflare", "a federation on NVIDIA FLARE")
    return getattr(importlib.import_module(f"fednorm.nvflare.{_WHERE[name]}"), name)
