"""Merging rules: worked by hand, invariant where they must be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorm.core import reductions
from fednorm.core.merge import Maximum, Mean
from fednorm.core.reductions import fold, weighted_sum
from fednorm.core.report import BySize, Report, Reports, Uniform, loss_summary, normalised

NUMBERS = st.floats(-1e6, 1e6, width=32)
SIZES = st.lists(st.integers(1, 10**6), min_size=1, max_size=8)


def of_sizes(sizes: Iterable[int]) -> Reports:
    return Reports.of([Report(client, size) for client, size in enumerate(sizes)])


def shares(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_three_clients_worked_by_hand() -> None:
    clients = {"weight": torch.tensor([[value, 1.0] for value in (1.0, 2.0, 7.0)])}
    merged, memory = Mean()({"weight": torch.zeros(2)}, clients, BySize()(of_sizes((1, 2, 1))), {})
    assert merged["weight"].tolist() == [0.25 * 1 + 0.5 * 2 + 0.25 * 7, 1.0]
    assert merged["weight"].dtype == torch.float32
    assert memory == {}


@given(SIZES, st.lists(NUMBERS, min_size=1, max_size=5))
def test_copies_of_one_model_merge_to_it(sizes: list[int], values: list[float]) -> None:
    weights = BySize()(of_sizes(sizes))

    def merged(own: torch.Tensor) -> torch.Tensor:
        return Mean()({"weight": own}, {"weight": own.expand(len(sizes), -1)}, weights, {})[0]["weight"]

    single, double = torch.tensor(values, dtype=torch.float32), torch.tensor(values, dtype=torch.float64)
    assert torch.equal(merged(single), single)
    assert torch.allclose(merged(double), double, rtol=len(sizes) * 2.0**-52, atol=0)


def test_tensors_without_elements_merge_to_what_they_are() -> None:
    assert fold(torch.zeros(3, 0, 2), torch.full((3,), 1 / 3, dtype=torch.float64)).shape == (0, 2)


@given(SIZES)
def test_weights_sum_to_one(sizes: list[int]) -> None:
    for weigh in (BySize(), Uniform()):
        weights = weigh(of_sizes(sizes))
        assert (weights.shape, weights.dtype) == ((len(sizes),), torch.float64)
        assert bool((weights > 0).all())
        assert math.fsum(weights.tolist()) == pytest.approx(1, abs=1e-15 * len(sizes))
    assert torch.equal(BySize()(of_sizes((3, 3))), Uniform()(of_sizes((1, 2))))


@given(st.lists(st.tuples(NUMBERS, st.floats(0.01, 1)), min_size=1, max_size=6))
def test_the_mean_lies_between_the_smallest_and_the_largest(pairs: list[tuple[float, float]]) -> None:
    values, weights = zip(*pairs, strict=True)
    total = weighted_sum(torch.tensor(values)[:, None], normalised(shares(weights)))
    slack = 1e-12 * max(1.0, *map(abs, values))
    assert min(values) - slack <= float(total) <= max(values) + slack


def test_sums_are_kept_in_float64() -> None:
    tiny = torch.tensor([[1.0], [1e-10]])
    assert weighted_sum(tiny, shares([1.0, 1.0])).item() == 1.0 + float(torch.tensor(1e-10))
    assert tiny[0].item() == 1.0


@given(st.lists(NUMBERS, min_size=1, max_size=9), st.integers(1, 70))
def test_sums_go_left_to_right_whatever_the_length(values: list[float], length: int) -> None:
    weights = normalised(shares([1.0 + place for place in range(len(values))]))
    expected = 0.0
    for value, weight in zip(values, weights.tolist(), strict=True):
        expected = expected + value * weight
    total = weighted_sum(torch.tensor(values)[:, None].expand(-1, length), weights)
    assert total.tolist() == [expected] * length


@given(st.lists(NUMBERS, min_size=2, max_size=9), st.data())
def test_a_sum_in_two_parts_has_the_bits_of_one(values: list[float], data: st.DataObject) -> None:
    stack, weights = torch.tensor(values)[:, None], normalised(shares([1.0 + place for place in range(len(values))]))
    cut = data.draw(st.integers(1, len(values) - 1))
    first = fold(stack[:cut], weights[:cut])
    assert torch.equal(fold(stack[cut:], weights[cut:], onto=first), weighted_sum(stack, weights))


@pytest.mark.parametrize("at_a_time", [1, 14, 21])
def test_how_many_clients_are_widened_at_a_time_changes_no_bit(monkeypatch: pytest.MonkeyPatch, at_a_time: int) -> None:
    stack, weights = torch.linspace(-1, 1, 35).reshape(5, 7) ** 3, normalised(shares([3.0, 1.0, 4.0, 1.0, 5.0]))
    at_once = fold(stack, weights)
    monkeypatch.setattr(reductions, "WIDE_NUMBERS", at_a_time)
    assert torch.equal(fold(stack, weights), at_once)


def test_weighted_sums_leave_their_inputs_alone() -> None:
    wide = torch.ones(2, 2, dtype=torch.float64)
    weighted_sum(wide, shares([0.5, 3.0]))
    assert wide.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@given(st.lists(st.integers(0, 2**53 + 5), min_size=1, max_size=5), st.randoms())
def test_counters_merge_by_maximum_and_stay_integers(counts: list[int], random) -> None:
    old = {"num_batches_tracked": torch.tensor(0)}
    for order in (counts, random.sample(counts, len(counts))):
        clients = {"num_batches_tracked": torch.tensor(order)}
        merged = Maximum()(old, clients, Uniform()(of_sizes(counts)), {})[0]["num_batches_tracked"]
        assert (int(merged), merged.dtype) == (max(counts), torch.int64)


def test_a_report_without_losses_has_none() -> None:
    assert math.isnan(Report(0, 1).loss)
    assert Report(0, 1, loss_summary([3.0, 1.0], 1)).loss == 1.0
