"""When a run changes its stage: counted by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednorm.core.method import Memory, Progress, Switch
from fednorm.core.report import Report
from fednorm.core.schedule import lr_factor
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
    assert last <= fraction * rounds + 1e-9 < last + 1


@given(st.integers(1, 99), st.integers(1, 300))
def test_a_freeze_and_a_drop_of_the_rate_at_the_same_share_come_together(percent: int, rounds: int) -> None:
    last = last_round_before(percent / 100, rounds)
    assert last == percent * rounds // 100
    number = max(1, last)  # a run always begins with the whole rate
    drop = f"step(factor=0.5,at={percent / 100})"
    assert [lr_factor(drop, each, rounds) for each in (number, number + 1)] == [1.0, 0.5]


@pytest.mark.parametrize(("share", "rounds", "last"), [(0.5, 25, 12), (0.29, 100, 29), (0.57, 100, 57), (0.1, 30, 3)])
def test_shares_of_rounds_worked_by_hand(share: float, rounds: int, last: int) -> None:
    assert stages(After(share), [[]] * (rounds - 1)) == [0] * last + [1] * (rounds - last)
    factors = [lr_factor(f"step(factor=0.5,at={share})", number, rounds) for number in range(1, rounds + 1)]
    assert factors == [1.0] * last + [0.5] * (rounds - last)


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


def test_the_window_slides_and_must_be_over_once() -> None:
    switch = WhenSettled("shift", 3, 0.1, "current", "max")
    calm = [shifts(c0=1.0)] * 2
    assert stages(switch, calm) == [0, 0, 0]
    assert stages(switch, [shifts(c0=9.0), *calm, shifts(c0=1.0)]) == [0, 0, 0, 0, 1]


def test_it_latches() -> None:
    reports = [shifts(c0=1.0), shifts(c0=1.0), shifts(c0=50.0), shifts(c0=7.0)]
    assert stages(WhenSettled("shift", 2, 0.1, "current", "max"), reports) == [0, 0, 1, 1, 1]


def test_a_rarely_drawn_client_that_still_moves_holds_the_freeze_back() -> None:
    """Client 1 reports in two of four rounds: V_1 = ((5 - 2)^2 + 0) / 2 = 4.5 over its two reports."""
    reports = [shifts(c0=1.0, c1=5.0), shifts(c0=1.0), shifts(c0=1.0), shifts(c0=1.0, c1=2.0)]
    assert stages(WhenSettled("shift", 4, 4.4, "current", "max"), reports)[-1] == 0
    assert stages(WhenSettled("shift", 4, 4.6, "current", "max"), reports)[-1] == 1
    assert stages(WhenSettled("shift", 4, 2.2, "mean", "max"), reports)[-1] == 0  # around 3.5: 1.5^2
    assert stages(WhenSettled("shift", 4, 2.3, "mean", "max"), reports)[-1] == 1
    assert stages(WhenSettled("shift", 4, 2.2, "current", "mean"), reports)[-1] == 0  # (0 + 4.5) / 2
    assert stages(WhenSettled("shift", 4, 2.3, "current", "mean"), reports)[-1] == 1


def test_reports_leave_the_window_by_round_and_a_single_one_does_not_count() -> None:
    switch = WhenSettled("shift", 2, 0.1, "current", "max")
    assert stages(switch, [shifts(c0=1.0), shifts(c1=5.0), shifts(c0=1.0), shifts(c1=1.0)]) == [0] * 5
    moving_once = [shifts(c0=1.0, c1=5.0), shifts(c0=1.0), shifts(c0=1.0)]
    assert stages(switch, moving_once) == [0, 0, 1, 1]


def test_what_is_remembered_is_the_window_alone_and_nothing_after_the_switch() -> None:
    switch = WhenSettled("shift", 2, 0.1, "current", "max")
    memory: Memory = {}
    for number, reports in enumerate([[], shifts(c0=1.0), shifts(c1=2.0), shifts(c1=9.0)], start=1):
        memory, _ = switch(memory, Progress(number, 9), reports)
    assert memory == {"told": {"1": [[2, 2.0], [3, 9.0]]}}
    assert switch(memory, Progress(5, 9), shifts(c1=9.0)) == ({"switched": True}, 1)


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
