"""A share of what `tools/fuzz.py` feeds to all that reads foreign files: every failure is a typed one."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def fuzz() -> dict[str, object]:
    """The tool, which is no part of a package."""
    before = list(sys.path)
    try:
        return runpy.run_path(str(TOOLS / "fuzz.py"))
    finally:
        sys.path[:] = before


@pytest.mark.parametrize("target", sorted(runpy.run_path(str(TOOLS / "fuzz.py"))["SHARES"]))
def test_what_is_damaged_is_refused_by_type(fuzz: dict[str, object], target: str) -> None:
    cases = {"grammar": 2000, "store": 40}.get(target, 150)
    (found,) = fuzz["fuzz_all"]({target: cases}, seed=3).values()  # type: ignore[operator]
    assert (found.total(), found["untyped"]) == (cases, 0), found
