"""Learning rate by round."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednorm.core.schedule import lr_factor, warmup_factor
from fednorm.errors import ConfigError

SCHEDULES = st.sampled_from(["constant", "step", "cosine", "linear", "step(factor=0.5,at=0.2/0.4/0.9)"])


@given(SCHEDULES, st.integers(1, 300))
def test_it_starts_at_one_and_never_rises_or_reaches_zero(schedule: str, rounds: int) -> None:
    factors = [lr_factor(schedule, round, rounds) for round in range(1, rounds + 1)]
    assert factors[0] == 1
    assert all(0 < later <= earlier for earlier, later in pairwise(factors))


def test_step_drops_after_exactly_half_and_three_quarters() -> None:
    factors = [round(lr_factor("step", number, 40), 6) for number in range(1, 41)]
    assert factors == [1.0] * 20 + [0.1] * 10 + [0.01] * 10


def test_values_worked_by_hand() -> None:
    assert lr_factor("linear", 6, 10) == 0.5
    assert lr_factor("cosine", 6, 10) == pytest.approx(0.5)
    assert lr_factor("constant", 9, 10) == 1


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("steps", "schedule 'steps' is not known; did you mean 'step'?"),
        ("step(gamma=0.1)", "option of schedule 'step' 'gamma' is not known"),
        ("cosine(at=0.5)", "option of schedule 'cosine' 'at' is not known"),
        ("step(at=half)", "schedule 'step(at=half)' needs numbers, as in step(factor=0.1,at=0.5/0.75)"),
        (
            "step(at=2)",
            "schedule 'step(at=2)': at=2 is out of range; give shares of the rounds above 0 and below 1, asc",
        ),
        ("step(at=0)", "schedule 'step(at=0)': at=0 is out of range; give shares"),
        ("step(at=1)", "schedule 'step(at=1)': at=1 is out of range; give shares"),
        ("step(at=-0.5)", "schedule 'step(at=-0.5)': at=-0.5 is out of range; give shares"),
        ("step(at=nan)", "schedule 'step(at=nan)': at=nan is out of range; give shares"),
        ("step(at=0.5/0.2)", "schedule 'step(at=0.5/0.2)': at=0.5/0.2 is out of range; give shares"),
        ("step(at=0.5/0.5)", "schedule 'step(at=0.5/0.5)': at=0.5/0.5 is out of range; give shares"),
        ("step(factor=0)", "schedule 'step(factor=0)': factor=0 is out of range; give a number above 0"),
        ("step(factor=-1)", "schedule 'step(factor=-1)': factor=-1 is out of range; give a number above 0"),
        ("step(factor=inf)", "schedule 'step(factor=inf)': factor=inf is out of range; give a number above 0"),
        ("a+b", "schedule 'a+b' names more than one; expected something like step(factor=0.1,at=0.5/0.75)"),
    ],
)
def test_mistakes_are_named(schedule: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        lr_factor(schedule, 1, 10)
    assert str(refusal.value).startswith(message)


def test_a_warm_up_by_a_share_ends_where_the_share_does() -> None:
    assert [warmup_factor(0.29, number, 100) for number in (28, 29)] == [28 / 29, 1.0]
    assert [warmup_factor(0.3, number, 9) for number in (1, 2)] == [0.5, 1.0]  # 2.7 rounds
    assert warmup_factor(0.1, 1, 5) == 1.0  # at least one round
