"""What the tools that break things share: how an outcome is told, and where the counts are kept."""

from __future__ import annotations

import json
import platform
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

from fednorm.errors import FednormError

COUNTS = Path(__file__).resolve().parent.parent / "docs" / "reliability_counts.json"


def outcome(read: Callable[[], Any], expected: Any) -> tuple[str, str]:
    """(what became of damaged input, the type of the error): read right, refused, silent or untyped."""
    try:
        found = read()
    except FednormError as error:
        return "refused", type(error).__name__
    except Exception as error:  # whatever else comes is what is looked for
        return "untyped", f"{type(error).__name__}: {error}"[:200]
    return ("read right" if found == expected else "silent"), ""


def record(tool: str, command: str, counts: Mapping[str, Counter[str]]) -> None:
    """Put the counts of some targets of a tool, with what made them, in the place of those before."""
    told = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "sqlite": sqlite3.sqlite_version}
    for target, found in counts.items():
        made = {"command": command, "date": date.today().isoformat(), "versions": versions}
        told.setdefault(tool, {})[target] = {**made, "cases": found.total(), "outcomes": dict(sorted(found.items()))}
    COUNTS.write_text(json.dumps(told, indent=2) + "\n")
