"""The mistakes that `tools/mutants.py` makes: which, where, and that each is a file Python can read."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("mutations", ROOT / "tools" / "mutations.py")
assert SPEC is not None
assert SPEC.loader is not None
mutations = importlib.util.module_from_spec(SPEC)
sys.modules["mutations"] = mutations  # dataclasses look themselves up
SPEC.loader.exec_module(mutations)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = a + b", {"(a - b)"}),
        ("x = a < b", {"(a <= b)", "(a >= b)"}),
        ("x = a is None", {"(a is not None)"}),
        ("x = a and b", {"(a or b)"}),
        ("x = not a", {"(a)"}),
        ("x = 3", {"4", "0"}),
        ("x = 0", {"1"}),
        ("x = 0.5", {"1.5", "1.0"}),
        ("x = True", {"False"}),
        ("x = a if b else c", {"(c if b else a)"}),
        ("f(a, b)", {"pass", "(f(b, a))"}),
        ("x.y = a", {"pass"}),
        ("x += a", {"x -= a", "pass"}),
        ("x = min(a, b)", {"(max(a, b))"}),
        ("x = a.sum(b)", {"(a.mean(b))"}),
        ("if a:\n    x = b", {"(not (a))"}),
        ("def f():\n    return a", {"return None"}),
        # What is for people, for type checkers, or would be no program is left alone.
        ("def f(a: int | None = b) -> int | None: ...", set()),
        ("raise ValueError('a' + b)", set()),
        ("x = 'a' + b", set()),
        ("x = f'{a + b}'", set()),
        ("x = isinstance(a, A | B)", set()),
    ],
)
def test_mistakes_by_hand(text: str, expected: set[str]) -> None:
    found = mutations.mutants("f.py", text.encode())
    assert {each.new for each in found} == expected
    for each in found:
        compile(each.applied(text.encode()), "f.py", "exec")


def test_a_mutant_is_named_by_its_function_wherever_that_lies() -> None:
    text = "class Ä:\n    def f(self):\n        def g():\n            return 'ü', a + b, a + b\n        return g\n"
    (first, second) = (each for each in mutations.mutants("f.py", text.encode()) if each.kind == "operator")
    assert (first.id, second.id) == ("f.py::Ä.f: a + b -> (a - b) #1", "f.py::Ä.f: a + b -> (a - b) #2")
    assert second.applied(text.encode()).decode() == text[::-1].replace("b + a", ")b - a(", 1)[::-1]
    moved = mutations.mutants("f.py", b"import os\n\n\n" + text.encode())
    assert [each.id for each in moved if each.kind == "operator"] == [first.id, second.id]
