"""Merging: which updates are refused, in which words, and how the rest are merged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fednorm.core.method import Phase
from fednorm.core.report import Report
from fednorm.core.state import Kind, Policy, Tree, digest, model_state
from fednorm.errors import ConfigError
from fednorm.halves import merging
from fednorm.halves.guard import flaw, flaws
from fednorm.halves.merging import merge_updates
from fednorm.halves.messages import Update
from fednorm.halves.prepared import prepare
from fednorm.halves.schema import keys_with
from fednorm.methods import parse

NET = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
PREPARED = prepare(NET, parse("fedavg"))
PHASE: Phase = PREPARED.method.phases[0]
SCHEMA = PREPARED.schema(PHASE)


def an_update(client: int = 0, num_examples: int = 4, **changes: torch.Tensor) -> Update:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return Update(Report(client, num_examples), {**PREPARED.initial, **{f"{k[1:]}": v for k, v in named.items()}})


def test_a_good_update_has_no_flaw() -> None:
    assert flaw(an_update(), SCHEMA) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_0__weight": torch.zeros(3, 3)}, "'0.weight' has shape (3, 3), expected (3, 2)"),
        ({"_0__weight": torch.zeros(3, 2).double()}, "'0.weight' has type torch.float64, expected torch.float32"),
        ({"_0__bias": torch.tensor([0.0, torch.nan, 0.0])}, "'0.bias' is not finite"),
        ({"_1__running_mean": torch.tensor([0.0, torch.inf, 0.0])}, "'1.running_mean' is not finite"),
        ({"_1__running_var": torch.tensor([1.0, -1e-9, 1.0])}, "'1.running_var' is negative"),
        ({"_1__num_batches_tracked": torch.tensor(-1)}, "'1.num_batches_tracked' is negative"),
        ({"_2__weight": torch.zeros(1)}, "'2.weight' was not expected"),
    ],
)
def test_flaws_name_the_tensor(changes: dict[str, torch.Tensor], message: str) -> None:
    assert flaw(an_update(**changes), SCHEMA) == message


def test_a_negative_deviation_is_a_flaw_as_a_negative_variance_is() -> None:
    prepared = prepare(NET, parse("brn"))
    schema = prepared.schema(prepared.method.phases[0])
    good = Update(Report(0, 4), dict(prepared.initial))
    bad = Update(Report(0, 4), {**prepared.initial, "1.running_std": torch.tensor([1.0, -1e-9, 1.0])})
    assert flaw(good, schema) is None
    assert flaw(bad, schema) == "'1.running_std' is negative"


def test_among_many_updates_the_bad_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = an_update(1, _0__bias=torch.tensor([0.0, torch.nan, 0.0]))
    misfit = an_update(3, _2__weight=torch.zeros(1))
    expected = [None, "'0.bias' is not finite", None, "'2.weight' was not expected"]
    for at_a_time in (merging.GROUP_SIZE, 1):
        monkeypatch.setattr(merging, "GROUP_SIZE", at_a_time)
        assert flaws([an_update(0), bad, an_update(2), misfit], SCHEMA) == expected


def test_large_numbers_are_no_flaw_though_their_sum_overflows() -> None:
    assert flaw(an_update(_0__bias=torch.full((3,), 3e38)), SCHEMA) is None


def test_a_missing_tensor_is_named() -> None:
    shared = {key: value for key, value in PREPARED.initial.items() if key != "1.bias"}
    assert flaw(Update(Report(0, 1), shared), SCHEMA) == "'1.bias' is missing"


@pytest.mark.parametrize("count", [0, -2, 1.5, 1e30])
def test_an_impossible_number_of_examples_is_refused(count: float) -> None:
    update = an_update(num_examples=count)  # type: ignore[arg-type]
    assert flaw(update, SCHEMA) == f"its number of examples is {count!r}, expected a whole number above 0"


def random_updates(count: int, seed: int) -> list[Update]:
    generator = torch.Generator().manual_seed(seed)

    def noise(value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return torch.randint(0, 100, value.shape, generator=generator)
        return torch.rand(value.shape, generator=generator)

    return [
        Update(Report(client, 1 + client * 7), {key: noise(value) for key, value in PREPARED.initial.items()})
        for client in range(count)
    ]


@given(st.permutations(range(6)), st.integers(0, 5))
def test_the_order_of_arrival_changes_no_bit(order: list[int], seed: int) -> None:
    updates = random_updates(6, seed)
    expected = merge_updates(PHASE, PREPARED.initial, updates, SCHEMA, {})[0]
    assert digest(merge_updates(PHASE, PREPARED.initial, [updates[i] for i in order], SCHEMA, {})[0]) == digest(
        expected
    )


def test_each_kind_is_merged_by_its_rule() -> None:
    updates = random_updates(3, seed=1)
    merged, memory = merge_updates(PHASE, PREPARED.initial, updates, SCHEMA, {})
    shares = [size / 24 for size in (1, 8, 15)]
    by_hand = sum(share * u.shared["1.running_var"].double() for share, u in zip(shares, updates, strict=True))
    assert torch.equal(merged["1.running_var"], torch.as_tensor(by_hand).float())
    counts = [int(u.shared["1.num_batches_tracked"]) for u in updates]
    assert int(merged["1.num_batches_tracked"]) == max(counts)
    assert merged["1.num_batches_tracked"].dtype == torch.int64
    assert memory == {}


def test_entries_that_are_not_shared_keep_the_servers_bits() -> None:
    prepared = prepare(NET, parse("silobn"))
    phase = prepared.method.phases[0]
    schema = prepared.schema(phase)
    sent = keys_with(schema, Policy.SHARED)
    updates = [replace(u, shared={key: u.shared[key] for key in sent}) for u in random_updates(2, seed=2)]
    server = {key: value + 3 for key, value in prepared.initial.items()}
    merged, _ = merge_updates(phase, server, updates, schema, {})
    kept = [key for key in server if key not in sent]
    assert len(kept) == 3
    assert all(torch.equal(merged[key], server[key]) for key in kept)
    assert all(not torch.equal(merged[key], server[key]) for key in sent)


def counting(old: Tree, updates, weights, memory: Tree) -> tuple[Tree, Tree]:
    """A merge that remembers how often it ran in this layer."""
    count = memory.get("count", torch.zeros(())) + 1
    return {key: value + count for key, value in old.items()}, {"count": count}


def test_memory_belongs_to_one_layer_and_kind() -> None:
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    prepared = prepare(net, parse("fedavg"))
    phase = replace(prepared.method.phases[0], merge=dict.fromkeys(Kind, counting))
    schema = prepared.schema(phase)
    server, memory = {key: torch.zeros(1, 1) for key in prepared.initial}, {}
    for _ in range(3):
        server, memory = merge_updates(phase, server, [Update(Report(0, 1), model_state(net))], schema, memory)
    assert {key: value.item() for key, value in server.items()} == {"0.weight": 6.0, "1.weight": 6.0}
    assert [value.item() for value in memory.values()] == [3.0, 3.0]
    assert [key.split("|")[-3:] for key in memory] == [["0", "weight", "count"], ["1", "weight", "count"]]


def test_nothing_to_merge_is_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        merge_updates(PHASE, PREPARED.initial, [], SCHEMA, {})
    assert str(refusal.value) == "there are no updates to merge; at least one client must take part"
