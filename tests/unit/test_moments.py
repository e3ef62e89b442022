"""Statistics taken anew: what each rule computes, and what the order of batches does to it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import tiny
from fednorm.core.state import Tree, digest
from fednorm.core.step import Batch, Carry, training_mode
from fednorm.layers.batch_stats import moments
from fednorm.pieces.moments import Mode, TakeMoments, inputs_of_norms
from fednorm.running.plan import Plan

Examples = tuple[torch.Tensor, torch.Tensor]


def plan_of(method: str = "fedavg", *layers: nn.Module) -> Plan:
    """A net whose first layer is a batch norm, so that its inputs are the data themselves."""
    torch.manual_seed(0)
    first = layers or (nn.BatchNorm2d(1),)
    return tiny.plan(method, model=nn.Sequential(*first, nn.Flatten(), nn.Linear(36, 3)).double(), rounds=1)


def retaken(mode: Mode, batches: Sequence[Examples], made: Plan | None = None) -> Tree:
    """The state after a pass over some batches."""
    made = made or plan_of()
    spec = made.step_spec(made.phases[0].passes[0])
    step = TakeMoments(mode)(spec)
    params, buffers = {"weights": torch.zeros(())}, {"momentum:weights": torch.zeros(())}
    start = {key: value + 3 for key, value in made.initial().items()}  # what was there must not matter
    carry = Carry(params=params, state=start, optimizer=buffers, extras={}, anchor={})
    with training_mode(spec.model, frozenset()):
        for x, y in batches:
            carry, _ = step(carry, Batch(x, y, torch.zeros((), dtype=torch.int64)), {})
            assert carry.params is params
            assert carry.optimizer is buffers
    return carry.state


CLIENTS = [tiny.examples(4 + 2 * client, shift=3.0 * client, seed=client) for client in range(4)]
ALL = torch.cat([x for x, _ in CLIENTS])


def test_pooled_is_the_moments_of_all_examples_in_any_order() -> None:
    mean, var = moments(ALL)
    for batches in (CLIENTS, CLIENTS[::-1], [(ALL, torch.cat([y for _, y in CLIENTS]))]):
        state = retaken("pooled", batches)
        assert torch.allclose(state["0.running_mean"], mean, rtol=0, atol=1e-12)
        assert torch.allclose(state["0.running_var"], var, rtol=0, atol=1e-12)
        assert int(state["0.num_batches_tracked"]) == len(batches)


def test_ema_is_what_torch_does_from_a_reset_layer() -> None:
    state = retaken("ema", CLIENTS)
    theirs = nn.BatchNorm2d(1).double().train()
    for x, _ in CLIENTS:
        theirs(x)
    for part in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.allclose(state[f"0.{part}"], getattr(theirs, part), rtol=1e-14, atol=0)


def test_cumulative_is_what_torch_s_update_bn_does() -> None:
    state = retaken("cumulative", CLIENTS)
    net = nn.Sequential(nn.BatchNorm2d(1)).double()
    torch.optim.swa_utils.update_bn([x for x, _ in CLIENTS], net)
    for part in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.allclose(state[f"0.{part}"], net.state_dict()[f"0.{part}"], rtol=1e-14, atol=0)


def test_ema_over_clients_depends_on_their_order_and_forgets_the_first() -> None:
    rounds = CLIENTS * 12
    forward = retaken("ema", rounds)["0.running_mean"]
    sorted_by_client = [batch for batch in CLIENTS for _ in range(12)]
    grouped = retaken("ema", sorted_by_client)["0.running_mean"]
    backward = retaken("ema", sorted_by_client[::-1])["0.running_mean"]
    truth = float(ALL.mean())
    assert float(grouped) > truth + 1 > truth - 1 > float(backward)
    assert abs(float(forward) - truth) < min(abs(float(grouped) - truth), abs(float(backward) - truth))


def test_cumulative_over_clients_loses_the_variance_between_them() -> None:
    within = retaken("cumulative", CLIENTS)["0.running_var"]
    between = moments(torch.stack([x.mean() for x, _ in CLIENTS])[:, None])[1]
    assert float(within) < float(moments(ALL)[1]) - 0.5 * float(between)


@pytest.mark.parametrize("mode", ["pooled", "ema", "cumulative"])
def test_nothing_but_statistics_and_counters_moves(mode: Mode) -> None:
    made = plan_of("fedavg", nn.BatchNorm2d(1), nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))
    state = retaken(mode, CLIENTS, made)
    start = {key: value + 3 for key, value in made.initial().items()}
    moved = {key.rpartition(".")[2] for key in state if not torch.equal(state[key], start[key])}
    assert moved == {"running_mean", "running_var", "num_batches_tracked"}


def test_a_layer_that_keeps_a_deviation_gets_one_with_its_eps() -> None:
    made = plan_of("brn(momentum=0.1)")
    mean, var = moments(ALL)
    state = retaken("pooled", CLIENTS, made)
    assert torch.allclose(state["0.running_mean"], mean, rtol=0, atol=1e-12)
    assert torch.allclose(state["0.running_std"], (var + 1e-5).sqrt(), rtol=0, atol=1e-12)
    constant = [(torch.ones(4, 1, 6, 6, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))]
    assert float(retaken("pooled", constant, made)["0.running_std"]) > 0  # evaluation divides by it


def test_one_example_is_enough() -> None:
    alone = [(torch.ones(1, 1, 6, 6, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))]
    for mode in ("pooled", "ema", "cumulative"):
        assert all(bool(value.isfinite().all()) for value in retaken(mode, alone).values())


def test_the_inputs_of_norms_are_collected_and_the_hooks_removed() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.GroupNorm(1, 2))
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    with inputs_of_norms(model) as seen:
        model(x)
    assert list(seen) == ["0"]
    assert digest(seen) == digest({"0": x})
    model(x + 1)
    assert digest(seen) == digest({"0": x})
