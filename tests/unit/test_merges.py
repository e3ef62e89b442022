"""Merging rules: worked by hand, invariant where they must be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorm.pieces.merges import maximum, mean, weighted_sum
from fednorm.pieces.weights import Report, by_size, loss_summary, normalised, uniform

NUMBERS = st.floats(-1e6, 1e6, width=32)
SIZES = st.lists(st.integers(1, 10**6), min_size=1, max_size=8)


def test_three_clients_worked_by_hand() -> None:
    updates = [{"weight": torch.tensor([value, 1.0])} for value in (1.0, 2.0, 7.0)]
    weights = by_size([Report(client, size) for client, size in enumerate((1, 2, 1))])
    merged, memory = mean({"weight": torch.zeros(2)}, updates, weights, {})
    assert merged["weight"].tolist() == [0.25 * 1 + 0.5 * 2 + 0.25 * 7, 1.0]
    assert merged["weight"].dtype == torch.float32
    assert memory == {}


@given(SIZES, st.lists(NUMBERS, min_size=1, max_size=5))
def test_copies_of_one_model_merge_to_it(sizes: list[int], values: list[float]) -> None:
    weights = by_size([Report(client, size) for client, size in enumerate(sizes)])
    single = {"weight": torch.tensor(values, dtype=torch.float32)}
    assert torch.equal(mean(single, [single] * len(sizes), weights, {})[0]["weight"], single["weight"])
    double = {"weight": torch.tensor(values, dtype=torch.float64)}
    merged = mean(double, [double] * len(sizes), weights, {})[0]["weight"]
    assert torch.allclose(merged, double["weight"], rtol=len(sizes) * 2.0**-52, atol=0)


@given(SIZES)
def test_weights_sum_to_one(sizes: list[int]) -> None:
    reports = [Report(client, size) for client, size in enumerate(sizes)]
    for weigh in (by_size, uniform):
        weights = weigh(reports)
        assert all(weight > 0 for weight in weights)
        assert math.fsum(weights) == pytest.approx(1, abs=1e-15 * len(sizes))
    assert by_size([Report(0, 3), Report(1, 3)]) == uniform([Report(0, 1), Report(1, 2)])


@given(st.lists(st.tuples(NUMBERS, st.floats(0.01, 1)), min_size=1, max_size=6))
def test_the_mean_lies_between_the_smallest_and_the_largest(pairs: list[tuple[float, float]]) -> None:
    values, shares = zip(*pairs, strict=True)
    total = weighted_sum([torch.tensor([v]) for v in values], normalised(shares))
    slack = 1e-12 * max(1.0, *map(abs, values))
    assert min(values) - slack <= float(total) <= max(values) + slack


def test_sums_are_kept_in_float64() -> None:
    tiny = [torch.tensor([1.0]), torch.tensor([1e-10])]
    assert weighted_sum(tiny, [1.0, 1.0]).item() == 1.0 + float(torch.tensor(1e-10))
    assert tiny[0].item() == 1.0


def test_weighted_sums_leave_their_inputs_alone() -> None:
    wide = torch.ones(2, dtype=torch.float64)
    weighted_sum([wide, wide], [0.5, 3.0])
    assert wide.tolist() == [1.0, 1.0]


@given(st.lists(st.integers(0, 2**53 + 5), min_size=1, max_size=5), st.randoms())
def test_counters_merge_by_maximum_and_stay_integers(counts: list[int], random) -> None:
    updates = [{"num_batches_tracked": torch.tensor(count)} for count in counts]
    shuffled = random.sample(updates, len(updates))
    weights: Sequence[float] = uniform([Report(c, 1) for c in range(len(counts))])
    for order in (updates, shuffled):
        merged = maximum(updates[0], order, weights, {})[0]["num_batches_tracked"]
        assert (int(merged), merged.dtype) == (max(counts), torch.int64)


def test_a_report_without_losses_has_none() -> None:
    assert math.isnan(Report(0, 1).loss)
    assert Report(0, 1, loss_summary([3.0, 1.0], 1)).loss == 1.0
