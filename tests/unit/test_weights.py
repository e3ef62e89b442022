"""Weights of clients: by loss, by divergence of their statistics; and the pooled variance they go with."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorm.core.merge import Mean
from fednorm.core.report import BySize, Report, Reports, Uniform
from fednorm.engines.base import stack_trees
from fednorm.pieces.merges import Pooled
from fednorm.pieces.weights import ByDivergence, ByLoss

LOSSES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8)


def reports(losses: list[float], which: str = "last_epoch") -> Reports:
    return Reports.of([Report(client, client + 1, {which: loss}) for client, loss in enumerate(losses)])


def of_sizes(*sizes: int) -> Reports:
    return Reports.of([Report(client, size) for client, size in enumerate(sizes)])


@given(LOSSES, st.floats(1e-3, 1e3))
def test_i19_weights_by_loss_are_shares_that_do_not_depend_on_the_scale(losses: list[float], scale: float) -> None:
    weights = ByLoss()(reports(losses), {}).tolist()
    assert all(weight >= 0 for weight in weights)
    assert math.fsum(weights) == pytest.approx(1, abs=1e-14)
    assert ByLoss()(reports([scale * loss for loss in losses]), {}).tolist() == pytest.approx(weights, rel=1e-12)


@given(st.floats(1e-3, 1e3), st.integers(1, 8))
def test_i19_equal_losses_are_uniform(loss: float, count: int) -> None:
    same = reports([loss] * count)
    assert ByLoss()(same, {}).tolist() == pytest.approx(Uniform()(same).tolist(), rel=1e-15)


@given(LOSSES, st.sampled_from([0.0, -1.0, math.nan, math.inf]), st.randoms())
def test_i19_a_loss_that_cannot_weigh_makes_all_uniform(losses: list[float], bad: float, random) -> None:
    spoilt = [*losses]
    spoilt.insert(random.randrange(len(losses) + 1), bad)
    assert torch.equal(ByLoss()(reports(spoilt), {}), Uniform()(reports(spoilt)))


def test_a_larger_loss_weighs_more() -> None:
    assert ByLoss("all")(reports([1.0, 3.0], "all"), {}).tolist() == [0.25, 0.75]


def test_a_loss_that_a_client_does_not_report_cannot_weigh() -> None:
    some = Reports.of([Report(0, 1, {"all": 1.0, "last_epoch": 1.0}), Report(1, 1, {"all": 2.0})])
    assert list(some.losses) == ["all"]
    with pytest.raises(KeyError, match="last_epoch"):
        ByLoss()(some, {})


def layer(*pairs: tuple[float, float], part: str = "running_var") -> dict[str, dict[str, torch.Tensor]]:
    """What clients send of one layer with one channel, from (mean, variance) pairs."""
    root = math.sqrt if part == "running_std" else float
    means, spreads = zip(*((m, root(v)) for m, v in pairs), strict=True)
    return {"bn": {"running_mean": torch.tensor(means)[:, None], part: torch.tensor(spreads)[:, None]}}


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.floats(0, 100)), min_size=1, max_size=6),
    st.floats(0.01, 10),
)
def test_weights_by_divergence_are_shares(pairs: list[tuple[float, float]], tau: float) -> None:
    weights = ByDivergence(tau)(reports([1.0] * len(pairs)), layer(*pairs)).tolist()
    assert all(weight >= 0 for weight in weights)
    assert math.fsum(weights) == pytest.approx(1, abs=1e-12)


def test_clients_far_from_the_pool_weigh_less_the_more_so_the_smaller_tau() -> None:
    three = of_sizes(1, 1, 1)
    sent = layer((0.0, 1.0), (0.1, 1.0), (5.0, 1.0))
    near, alike, far = ByDivergence(1.0)(three, sent).tolist()
    assert min(near, alike) > far
    assert ByDivergence(0.1)(three, sent)[2] < far
    assert ByDivergence(1.0)(three, layer(*[(2.0, 3.0)] * 3)).tolist() == pytest.approx([1 / 3] * 3)


def test_divergence_by_hand() -> None:
    """Clients at -1 (three quarters of the examples) and 1, both of variance 1: the pool is N(-0.5, 1.75)."""
    divergence = [0.5 * (1 / 1.75 + (m + 0.5) ** 2 / 1.75 - 1 + math.log(1.75)) for m in (-1.0, 1.0)]
    a, b = ByDivergence(0.5)(of_sizes(3, 1), layer((-1.0, 1.0), (1.0, 1.0))).tolist()
    assert a / b == pytest.approx(math.exp(-(divergence[0] - divergence[1]) / 0.5), rel=1e-4)


def test_the_divergence_is_the_mean_of_all_channels() -> None:
    """A layer twice, or with each of its channels twice, weighs as it does once."""
    one = layer((-1.0, 1.0), (1.0, 2.0))["bn"]
    wide = {part: torch.cat([value, value], 1) for part, value in one.items()}
    expected = ByDivergence(0.5)(of_sizes(3, 1), {"bn": one})
    for layers in ({"a": one, "b": one}, {"bn": wide}, {"a": one, "b": wide}):
        assert torch.allclose(ByDivergence(0.5)(of_sizes(3, 1), layers), expected, rtol=0, atol=1e-12)


def test_a_layer_that_keeps_a_deviation_counts_with_its_square() -> None:
    two = of_sizes(3, 1)
    pairs = ((0.0, 4.0), (1.0, 9.0))
    std = ByDivergence(1.0)(two, layer(*pairs, part="running_std"))
    assert std.tolist() == pytest.approx(ByDivergence(1.0)(two, layer(*pairs)).tolist())


def test_without_statistics_the_sizes_decide() -> None:
    two = of_sizes(3, 1)
    assert torch.equal(ByDivergence(1.0)(two, {}), BySize()(two))


MOMENTS = st.lists(st.tuples(st.floats(-100, 100), st.floats(0, 100), st.integers(1, 50)), min_size=1, max_size=6)


@given(MOMENTS)
def test_i22_the_pooled_variance_is_at_least_the_mean_of_variances(clients: list[tuple[float, float, int]]) -> None:
    def tree(m: float, v: float) -> dict[str, torch.Tensor]:
        return {"running_mean": torch.tensor([m]).double(), "running_var": torch.tensor([v]).double()}

    sent = stack_trees([tree(m, v) for m, v, _ in clients])
    weights = BySize()(of_sizes(*(size for _, _, size in clients)))
    averaged, _ = Mean()(tree(0, 1), sent, weights, {})
    both, _ = Pooled()(tree(0, 1), sent, weights, {})
    assert torch.equal(both["running_mean"], averaged["running_mean"])
    assert float(both["running_var"]) >= float(averaged["running_var"])
    means = [m for m, _, _ in clients]
    gap = float(both["running_var"] - averaged["running_var"])
    if max(means) == min(means):
        assert gap <= 1e-20 + 1e-13 * max(abs(m) for m in means) ** 2
    elif max(means) - min(means) > 1e-3:
        assert gap > 0


def test_pooled_moments_are_those_of_all_examples() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, generator=generator, dtype=torch.float64) * (1 + n) + n for n in (3, 5, 8)]
    updates = [{"running_mean": x.mean()[None], "running_var": x.var(correction=0)[None]} for x in parts]
    sizes = BySize()(of_sizes(*(len(x) for x in parts)))
    merged, _ = Pooled()(updates[0], stack_trees(updates), sizes, {})
    union = torch.cat(parts)
    assert torch.allclose(merged["running_mean"], union.mean(), rtol=1e-14)
    assert torch.allclose(merged["running_var"], union.var(correction=0), rtol=1e-14)
    deviations = [{"running_mean": u["running_mean"], "running_std": u["running_var"].sqrt()} for u in updates]
    merged, _ = Pooled()(deviations[0], stack_trees(deviations), sizes, {})
    assert torch.allclose(merged["running_std"], union.std(correction=0), rtol=1e-14)
