"""When a run changes its stage: counted by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednorm.core.method import Memory, Progress, Switch
from fednorm.core.report import Report
from fednorm.errors import ConfigError
from fednorm.pieces.switches import After, WhenLossesAgree, WhenSettled, last_round_before


def stages(switch: Switch, reports: Sequence[Sequence[Report]]) -> list[int]:
    """The stages of the rounds, when round t + 1 is decided after the reports of round t; memory goes through JSON."""
    memory: Memory = {}
    found = []
    for number in range(1, len(reports) + 2):
        before = reports[number - 2] if number > 1 else []
        memory, stage = switch(json.loads(json.dumps(memory)), Progress(number, len(reports) + 1), before)
        found.append(stage)
    return found


def losses(*values: float) -> list[Report]:
    return [Report(client, 1, {"last_epoch": value}) for client, value in enumerate(values)]


def shifts(**values: float) -> list[Report]:
    return [Report(int(client[1:]), 1, scalars={"shift": value}) for client, value in values.items()]


@given(st.floats(0, 1), st.integers(1, 1000))
def test_a_fraction_is_rounded_down(fraction: float, rounds: int) -> None:
    last = last_round_before(fraction, rounds)
    assert 0 <= last <= rounds
    assert last <= fraction * rounds < last + 1


def test_the_round_itself_still_belongs_to_the_first_stage() -> None:
    assert stages(After(2), [[]] * 4) == [0, 0, 1, 1, 1]
    assert stages(After(0.5), [[]] * 3) == [0, 0, 1, 1]
    assert stages(After(0), [[]] * 2) == [1, 1, 1]
    assert stages(After(1.0), [[]] * 2) == [0, 0, 0]
    assert stages(After(99), [[]] * 2) == [0, 0, 0]


AGREE, DIFFER = losses(1.0, 1.2), losses(1.0, 3.0)  # population deviations 0.1 and 1


def test_losses_must_agree_in_consecutive_rounds() -> None:
    switch = WhenLossesAgree(0.11, 3)
    assert stages(switch, [AGREE] * 4) == [0, 0, 0, 1, 1]
    assert stages(switch, [AGREE, AGREE, DIFFER, AGREE, AGREE]) == [0] * 6
    assert stages(switch, [DIFFER, AGREE, AGREE, AGREE, DIFFER, DIFFER]) == [0, 0, 0, 0, 1, 1, 1]


def test_the_deviation_is_the_population_s_and_may_equal_eps() -> None:
    exact = losses(1.0, 2.0)  # population 0.5, sample 0.707
    assert stages(WhenLossesAgree(0.5, 1), [exact]) == [0, 1]
    assert stages(WhenLossesAgree(0.49, 1), [exact]) == [0, 0]


def test_the_loss_that_decides_is_the_one_asked_for() -> None:
    reports = [Report(0, 1, {"last_epoch": 1.0, "all": 1.0}), Report(1, 1, {"last_epoch": 1.0, "all": 9.0})]
    assert stages(WhenLossesAgree(0.1, 1), [reports]) == [0, 1]
    assert stages(WhenLossesAgree(0.1, 1, "all"), [reports]) == [0, 0]


def test_the_spread_is_around_the_current_value_or_the_mean_of_the_window() -> None:
    falling = [shifts(c0=value) for value in (4.0, 2.0)]  # around 2: (4 + 0) / 2 = 2; around 3: (1 + 1) / 2 = 1
    assert stages(WhenSettled("shift", 2, 2.1, "current", "max"), falling)[-1] == 1
    assert stages(WhenSettled("shift", 2, 1.9, "current", "max"), falling)[-1] == 0
    assert stages(WhenSettled("shift", 2, 1.1, "mean", "max"), falling)[-1] == 1
    assert stages(WhenSettled("shift", 2, 0.9, "mean", "max"), falling)[-1] == 0
    assert stages(WhenSettled("shift", 2, 2.0, "current", "max"), falling)[-1] == 0  # below tau, not at it


def test_the_clients_join_by_maximum_or_mean() -> None:
    restless = [shifts(c0=1.0, c1=1.0), shifts(c0=1.0, c1=3.0)]  # spreads 0 and 2
    assert stages(WhenSettled("shift", 2, 1.5, "current", "max"), restless)[-1] == 0
    assert stages(WhenSettled("shift", 2, 1.5, "current", "mean"), restless)[-1] == 1


def test_the_window_slides_and_must_be_full() -> None:
    switch = WhenSettled("shift", 3, 0.1, "current", "max")
    calm = [shifts(c0=1.0)] * 2
    assert stages(switch, calm) == [0, 0, 0]
    assert stages(switch, [shifts(c0=9.0), *calm, shifts(c0=1.0)]) == [0, 0, 0, 0, 1]


def test_it_latches() -> None:
    reports = [shifts(c0=1.0), shifts(c0=1.0), shifts(c0=50.0), shifts(c0=7.0)]
    assert stages(WhenSettled("shift", 2, 0.1, "current", "max"), reports) == [0, 0, 1, 1, 1]


def test_clients_that_rest_keep_their_window() -> None:
    reports = [shifts(c0=1.0), shifts(c1=5.0), shifts(c0=1.0), shifts(c1=1.0)]
    assert stages(WhenSettled("shift", 2, 0.1, "current", "max"), reports) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: After(1.5), "at=1.5 is not a fraction of the rounds; give 0.0 to 1.0, or a whole number of rounds"),
        (lambda: After(-1), "at=-1 is no round; give a whole number from 0, or a fraction such as 0.5"),
        (
            lambda: WhenLossesAgree(-0.1, 5),
            "eps=-0.1, rounds=5 cannot be a rule; give eps of 0 or more and 1 round or more",
        ),
        (
            lambda: WhenLossesAgree(0.1, 0),
            "eps=0.1, rounds=0 cannot be a rule; give eps of 0 or more and 1 round or more",
        ),
        (
            lambda: WhenSettled("shift", 5, 0.0, "current", "max"),
            "window=5, tau=0.0 cannot be a rule; give a window of 2 or more and tau above 0",
        ),
    ],
)
def test_what_cannot_be_a_rule_is_refused(make, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make()
    assert str(refusal.value) == message
