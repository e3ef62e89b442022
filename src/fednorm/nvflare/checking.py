"""What `fednorm nvflare check` tells: versions, ports, what a job shares, and what each site must permit for it."""

from __future__ import annotations

import json
import platform
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.app_common.widgets.component_path_authorizer import CLASS_ALLOW_LIST

from fednorm import __version__
from fednorm.core.state import Policy
from fednorm.errors import ConfigError
from fednorm.halves.agreed import Agreed
from fednorm.halves.schema import DOWN, UP
from fednorm.halves.terms import agree
from fednorm.nvflare.permission import ALLOWED, code_paths
from fednorm.nvflare.recipe import Recipe
from fednorm.running.config import RunConfig
from fednorm.running.plan import work_of

LEAST, BELOW = (2, 9), (3,)
"""NVFlare's versions that are supported: 2.8 averages some updates wrongly, 3 does not exist yet"""
PORTS = {8002: "sites and admins of a POC or a provisioned server", 8003: "admins of older projects"}


def examine(config: RunConfig | None, resources: Path | None, server: str = "127.0.0.1") -> dict[str, Any]:
    """All facts, as JSON values; `problems` lists what would keep a job from running."""
    found: dict[str, Any] = {"versions": _versions(), "ports": _ports(server), "problems": []}
    if not LEAST <= _numbers(found["versions"]["nvflare"]) < BELOW:
        found["problems"].append(
            f'nvflare {found["versions"]["nvflare"]} is not supported; pip install "nvflare>=2.9,<3"'
        )
    code = [] if config is None else code_paths(config)
    found["permits"] = permits(resources, code)
    if resources is not None and found["permits"]["missing"]:
        listed = ", ".join(f'"{path}"' for path in found["permits"]["missing"])
        found["problems"].append(f"'{resources}' does not permit {listed}; add to its {CLASS_ALLOW_LIST}")
    if config is not None:
        recipe = Recipe(config=config)
        setup = recipe.setup
        agreed = agree(setup.network(), setup.method, work_of(config), allow_noop=config.allow_noop)
        found["sites"] = list(setup.sites)
        found["phases"] = list(_phases(agreed))
    return found


def permits(resources: Path | None, code: list[str]) -> dict[str, Any]:
    """What a site's list of classes must have, and what of it is not in a resources.json, or in NVFlare's own list."""
    listed: list[str] = list(DEFAULT_CLASS_ALLOW_LIST)
    if resources is not None:
        try:
            said = json.loads(resources.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"'{resources}' cannot be read ({error}); give a site's local/resources.json") from None
        listed = said.get(CLASS_ALLOW_LIST, listed) if isinstance(said, dict) else listed
    needed = [ALLOWED, *code]
    missing = [path for path in needed if not any(_covers(each, path) for each in listed)]
    return {"needed": needed, "missing": missing, "byoc": bool(code)}


def _covers(listed: str, path: str) -> bool:
    """Whether an entry of the list permits a path, by NVFlare's rule."""
    return listed in ("*", path) or path.startswith(listed if listed.endswith(".") else f"{listed}.")


def _versions() -> dict[str, str]:
    return {
        "fednorm": __version__,
        "nvflare": version("nvflare"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _numbers(text: str) -> tuple[int, ...]:
    """The first numbers of a version.

    >>> _numbers("2.9.0rc1")
    (2, 9)
    """
    return tuple(int(part) for part in text.split(".")[:2] if part.isdecimal())


def _ports(server: str) -> dict[str, str]:
    """Which of NVFlare's usual ports are free to listen on."""
    found = {}
    for port, purpose in PORTS.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((server, port))
                found[str(port)] = f"free ({purpose})"
            except OSError as error:
                found[str(port)] = f"taken: {error.strerror} ({purpose})"
    return found


def _phases(agreed: Agreed) -> Iterator[Mapping[str, Any]]:
    """What becomes of entries in every exchange of the method, by kind and policy."""
    for phase in agreed.phases:
        counts: Counter[tuple[str, str]] = Counter()
        size: Counter[tuple[str, str]] = Counter()
        for entry, policy in phase.schema.values():
            if policy not in (Policy.FRESH, Policy.DROPPED):
                counts[entry.kind, policy] += 1
                size[entry.kind, policy] += entry.bytes
        yield {
            "phase": str(phase.id),
            "bytes_up": phase.cost.up,
            "bytes_down": phase.cost.down,
            "entries": [
                {
                    "kind": str(kind),
                    "policy": str(policy),
                    "count": count,
                    "bytes": size[kind, policy],
                    "leaves_site": policy in UP,
                    "comes_down": policy in DOWN,
                }
                for (kind, policy), count in counts.items()
            ],
        }
