"""What a shell may complete: names of methods, models, data sets, partitions, engines and fields.

They are read from the sources, not from the registries: those import torch, for which a Tab should not wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from fednorm.running.config import EngineConfig, all_fields

Complete = Callable[[str], list[str]]
_SOURCES = Path(__file__).parents[1]
_REGISTERED = {
    "methods": ("methods/*.py", r'^@?register\(\s*"([^"]+)"'),
    "strategies": ("strategies/**/*.py", r'^@register_strategy\(\s*"([^"]+)"'),
    "schedules": ("engines/clock/schedule.py", r'^@SCHEDULES.register\("([^"]+)"'),
    "models": ("models/*.py", r'^@register_model\(\s*"([^"]+)"'),
    "data sets": ("data/registry.py", r'^\s+name="([^"]+)"'),
    "partitions": ("data/partition.py", r'^    "(\w+)": PartitionInfo\('),
}


@cache
def names_of(what: str) -> tuple[str, ...]:
    """All built-in names of a sort, in order.

    >>> names_of("partitions")[:3]
    ('dir_class', 'dir_client', 'domain')
    """
    files, pattern = _REGISTERED[what]
    texts = [path.read_text(encoding="utf-8") for path in sorted(_SOURCES.glob(files))]
    return tuple(sorted(name for text in texts for name in re.findall(pattern, text, re.MULTILINE)))


def starting(with_: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(with_)]


def methods(incomplete: str) -> list[str]:
    """Methods after the last + of an expression; a strategy may be the first.

    >>> methods("fixbn(at=0.5)+glo"), methods("fedb")
    (['fixbn(at=0.5)+global-momentum'], ['fedbn', 'fedbs', 'fedbuff'])
    """
    before, plus, last = incomplete.rpartition("+")
    known = names_of("methods") if plus else sorted(names_of("methods") + names_of("strategies"))
    return [before + plus + name for name in starting(last, known)]


def strategies(incomplete: str) -> list[str]:
    return starting(incomplete, names_of("strategies"))


def models(incomplete: str) -> list[str]:
    return starting(incomplete, (*names_of("models"), "timm:", "torchvision:"))


def datasets(incomplete: str) -> list[str]:
    return starting(incomplete, names_of("data sets"))


def any_data(incomplete: str) -> list[str]:
    return starting(incomplete, (*names_of("data sets"), "folder:", "table:", "npz:"))


def partitions(incomplete: str) -> list[str]:
    return starting(incomplete, names_of("partitions"))


def schedules(incomplete: str) -> list[str]:
    """Schedules of a clock.

    >>> schedules("e")
    ['equal', 'exponential']
    """
    return starting(incomplete, (*names_of("schedules"), "file:"))


def engines(incomplete: str) -> list[str]:
    return starting(incomplete, get_args(get_type_hints(EngineConfig)["name"]))


def trackers(incomplete: str) -> list[str]:
    return starting(incomplete, ("tensorboard", "wandb", "mlflow"))


def fields(incomplete: str) -> list[str]:
    """Fields for `--set`, each with its equals sign."""
    return starting(incomplete, [f"{name}=" for name in all_fields()])


BY_FIELD: dict[str, Any] = {
    "method": methods,
    "model": models,
    "data.name": any_data,
    "data.partition": partitions,
    "engine.name": engines,
    "clock.strategy": strategies,
    "clock.times": schedules,
}
"""How the value of a flag is completed, by the field that it sets."""
