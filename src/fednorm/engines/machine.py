"""How many processes play this run, as torchrun tells each of them; torch itself is not needed to know."""

from __future__ import annotations

import os

from fednorm.errors import ConfigError


def world_size() -> int:
    """Processes that torchrun started together; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    return world_size() == 1 or int(os.environ.get("RANK", "0")) == 0


def refuse_ranks(what: str) -> None:
    """Refuse what one process does alone."""
    if world_size() > 1:
        raise ConfigError(f"{what} cannot be split over {world_size()} ranks; give torchrun one run at a time")
