"""The grammar of names with options."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednorm.core.expression import Term, literal, parse_term, parse_terms
from fednorm.errors import ConfigError

EXAMPLE = "a(x=1)+b"
WORDS = st.from_regex(r"[a-z][a-z0-9_-]{0,6}", fullmatch=True).filter(
    lambda word: word not in ("true", "false", "none", "null")
)
VALUES = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none(), WORDS)
TERMS = st.builds(Term, WORDS, st.dictionaries(WORDS, VALUES, max_size=3))


def refusal_of(text: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        parse_terms(text, "method", EXAMPLE)
    return str(refusal.value)


@given(st.lists(TERMS, min_size=1, max_size=4))
def test_what_is_printed_is_read_back(terms: list[Term]) -> None:
    assert parse_terms("+".join(map(str, terms)), "method", EXAMPLE) == terms


@given(st.lists(TERMS, min_size=1, max_size=3), st.sampled_from(["", " ", "  "]))
def test_spaces_do_not_matter(terms: list[Term], space: str) -> None:
    spread = f"{space}+{space}".join(str(t).replace("=", f"{space}={space}").replace(",", f",{space}") for t in terms)
    assert parse_terms(space + spread + space, "method", EXAMPLE) == terms


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        assert parse_terms(text, "method", EXAMPLE)
    except ConfigError as refusal:
        assert str(refusal).count("\n") <= text.count("\n")  # noqa: PT017


@given(st.text(alphabet="([{)]}:'\"-1,a=", max_size=12))
def test_any_value_is_a_literal_or_a_word(raw: str) -> None:
    literal(raw)


def test_hostile_values_stay_words() -> None:
    for raw in ("__import__('os')", "{[]: 1}", "[" * 5000, "-" * 100_000 + "1", "open"):
        assert literal(raw) == raw


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "method '' cannot be read; expected something like a(x=1)+b"),
        ("+a", "method '+a' cannot be read; expected something like a(x=1)+b"),
        ("a+", "method 'a+' cannot be read; expected something like a(x=1)+b"),
        ("a b", "method 'a b' cannot be read at 'b'; expected something like a(x=1)+b"),
        ("a(x=1", "method 'a(x=1' cannot be read at '(x=1'; expected something like a(x=1)+b"),
        ("a(1)", "'a(1)' has '1' where NAME=VALUE was expected, as in a(x=1)+b"),
        ("a(x=1,x=2)", "'a(x=1,x=2)' gives 'x' twice; keep one"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    assert refusal_of(text) == message


def test_one_name_means_one() -> None:
    assert parse_term("iid", "partition", "iid") == Term("iid", {})
    with pytest.raises(ConfigError) as refusal:
        parse_term("a+b", "partition", "iid")
    assert str(refusal.value) == "partition 'a+b' names more than one; expected something like iid"
