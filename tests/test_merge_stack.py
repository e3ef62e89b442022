"""Merging a stack of clients: the same bits as one by one, layer by layer and, mapped over runs, run by run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from fednorm.core.method import Phase
from fednorm.core.report import Report, Reports
from fednorm.core.state import Kind, Tree, digest
from fednorm.engines.base import stack_trees
from fednorm.halves import merging
from fednorm.halves.merging import merge_stack, merge_updates
from fednorm.halves.messages import Update
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.schema import Schema
from fednorm.methods import known_methods
from fednorm.running.plan import Plan

METHODS = tuple(known_methods())
NUM_CLIENTS = 5
NUM_MERGES = 3


def random_updates(made: Plan, prepared: PreparedPhase, seed: int, count: int = NUM_CLIENTS) -> list[Update]:
    """What clients might send: no two alike, counters whole, spreads positive."""
    generator = torch.Generator().manual_seed(seed)
    initial, schema = made.initial(), prepared.schema

    def drawn(key: str) -> torch.Tensor:
        like = initial[key] if key in initial else torch.zeros(schema[key][0].shape, dtype=schema[key][0].dtype)
        if like.is_floating_point():
            return torch.rand(like.shape, generator=generator, dtype=like.dtype) + 0.1
        return torch.randint(0, 100, like.shape, generator=generator)

    def report(client: int) -> Report:
        losses = torch.rand(3, generator=generator).tolist()
        return Report(3 * client, 5 + client, dict(zip(("all", "last_epoch", "last_batch"), losses, strict=True)))

    return [Update(report(client), {key: drawn(key) for key in prepared.shared}) for client in range(count)]


def as_stack(updates: list[Update]) -> tuple[Tree, Reports]:
    return stack_trees([each.shared for each in updates]), Reports.of([each.report for each in updates])


@pytest.mark.parametrize("method", METHODS)
def test_a_stack_merges_to_the_bits_of_the_updates(method: str) -> None:
    made = tiny.plan(method)
    for prepared in made.phases:
        phase, schema = prepared.phase, prepared.schema
        ours, theirs = [(made.initial(), Tree())] * 2
        for number in range(NUM_MERGES):
            updates = random_updates(made, prepared, seed=number)
            shared, reports = as_stack(updates)
            ours = merge_stack(phase, ours[0], shared, reports, schema, ours[1])
            theirs = merge_updates(phase, theirs[0], updates[::-1], schema, theirs[1])
            assert [digest(tree) for tree in ours] == [digest(tree) for tree in theirs]


@pytest.mark.parametrize("method", METHODS)
def test_merges_map_over_runs(method: str) -> None:
    made = tiny.plan(method)
    for prepared in made.phases:
        phase, schema = prepared.phase, prepared.schema

        def merged(
            server: Tree,
            shared: Tree,
            sizes: torch.Tensor,
            losses: Tree,
            memory: Tree,
            phase: Phase = phase,
            schema: Schema = schema,
        ) -> tuple[Tree, Tree]:
            return merge_stack(phase, server, shared, Reports(sizes, losses), schema, memory)

        states: list[tuple[Tree, Tree]] = [(made.initial(), {})] * 3
        mapped = stack_trees([made.initial()] * 3), Tree()
        for number in range(NUM_MERGES):
            sent = [as_stack(random_updates(made, prepared, seed=10 * number + run)) for run in range(3)]
            states = [
                merge_stack(phase, *(state[0], *each), schema, state[1])
                for state, each in zip(states, sent, strict=True)
            ]
            shared = stack_trees([stack for stack, _ in sent]) if sent[0][0] else {}
            sizes = torch.stack([reports.num_examples for _, reports in sent])
            losses = stack_trees([dict(reports.losses) for _, reports in sent])
            mapped = torch.vmap(merged)(mapped[0], shared, sizes, losses, mapped[1])
            for run, alone in enumerate(states):
                for ours, theirs in zip(mapped, alone, strict=True):
                    assert ours.keys() == theirs.keys()
                    for key, value in theirs.items():
                        # Sums over channels, which only weights by divergence take, may go in another order.
                        slack = 1e-13 if method == "feddna" else 0.0
                        assert torch.allclose(ours[key][run], value, rtol=slack, atol=slack), key


@given(
    st.sampled_from(["fedavg", "fedadam+pooled", "fedavgm", "fbn", "feddna+brn", "fedbs", "global-momentum"]),
    st.integers(1, 4),
    st.integers(0, 99),
    st.sampled_from([1, 50, 1 << 20]),
)
def test_layers_merged_together_have_the_bits_of_each_alone(method: str, count: int, seed: int, room: int) -> None:
    made = tiny.plan(method, model=tiny.residual_net(widths=(4, 6)))
    prepared, initial = made.phases[0], made.initial()
    phase, schema = prepared.phase, prepared.schema
    updates = random_updates(made, prepared, seed, count)
    shared, reports = as_stack(updates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "GROUP_SIZE", room)
        merged, memory = merge_stack(phase, initial, shared, reports, schema, {})
        again, _ = merge_stack(phase, merged, shared, reports, schema, memory)
    layers: dict[Kind, dict[str, dict[str, str]]] = {}
    for key in shared:
        entry = schema[key][0]
        layers.setdefault(entry.kind, {}).setdefault(entry.layer, {})[entry.part] = key
    for kind, listed in layers.items():
        sent = {layer: {part: shared[key] for part, key in parts.items()} for layer, parts in listed.items()}
        weights = phase.weigh[kind](reports, sent)
        for layer, parts in listed.items():
            old = {part: initial[key] for part, key in parts.items()}
            first, held = phase.merge[kind](old, sent[layer], weights, {})
            second, _ = phase.merge[kind](first, sent[layer], weights, held)
            for part, key in parts.items():
                assert torch.equal(merged[key], first[part])
                assert torch.equal(again[key], second[part])


def test_what_updates_merge_to_has_storage_of_its_own() -> None:
    made = tiny.plan("fedadam")
    prepared = made.phases[0]
    updates = random_updates(made, prepared, seed=0)
    for tree in merge_updates(prepared.phase, made.initial(), updates, prepared.schema, {}):
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tree.values())


def test_only_what_a_rule_asks_for_is_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights by size read no layer, so a layer is stacked once, with its group."""
    made = tiny.plan("fedavg")
    prepared = made.phases[0]
    stacked: list[int] = []
    stack = torch.stack

    def counted(tensors: list[torch.Tensor]) -> torch.Tensor:
        stacked.append(len(tensors))
        return stack(tensors)

    updates = random_updates(made, prepared, seed=0)
    monkeypatch.setattr(torch, "stack", counted)
    merge_updates(prepared.phase, made.initial(), updates, prepared.schema, {})
    assert stacked == [NUM_CLIENTS] * len(prepared.shared)
