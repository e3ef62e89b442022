"""Batches are a pure function of (seed, client, k), and validation rows are never trained on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from fednorm.core import rng
from fednorm.data.augment import augment
from fednorm.data.batches import UNION, Batches
from fednorm.data.federation import Federation
from fednorm.errors import ConfigError


def make(data: Federation | None = None, **changes) -> Batches:
    chosen = {"seed": 0, "batch_size": 4, "union_batch_size": 12, "dtype": torch.float64} | changes
    return Batches(pool=(data or tiny.federation()).pool, **chosen)


@given(st.integers(0, 2), st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_the_history_of_requests_does_not_matter(client: int, requests: list[int]) -> None:
    used = make()
    for k in requests:
        x, y, key = used.batch(client, k)
        fresh_x, fresh_y, fresh_key = make().batch(client, k)
        assert torch.equal(x, fresh_x)
        assert torch.equal(y, fresh_y)
        assert torch.equal(key, fresh_key)


SPANS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 30), min_size=3, max_size=3)), max_size=5)


@given(st.integers(1, 9), SPANS)
def test_batches_drawn_for_many_at_once_are_those_drawn_one_by_one(steps: int, asked: list) -> None:
    """Over several epochs, of clients at other places in theirs, whatever was drawn before."""
    batches = make(tiny.federation((8, 12, 8)), batch_size=4)
    for single, firsts in asked:
        batches.batch(single, firsts[0])
        rows, keys = batches.span((0, 1, 2), firsts, steps)
        for step in range(steps):
            alone = make(tiny.federation((8, 12, 8)), batch_size=4)
            wanted = alone.rows_and_keys((0, 1, 2), [first + step for first in firsts])
            assert torch.equal(rows[step], wanted[0])
            assert torch.equal(keys[step], wanted[1])


def test_seed_client_and_place_all_matter() -> None:
    data = tiny.federation((40, 40))
    keys = {int(make(data, seed=seed).batch(client, k)[2]) for seed in (0, 1) for client in (0, 1) for k in (0, 1)}
    assert len(keys) == 8
    rows = {tuple(make(data, seed=seed).stream(0).batch(k).tolist()) for seed in (0, 1) for k in range(12)}
    assert len(rows) == 24


@given(st.integers(2, 30), st.integers(2, 9), st.integers(0, 3))
def test_no_example_comes_twice_in_an_epoch(size: int, batch_size: int, epoch: int) -> None:
    batches = make(tiny.federation((size,)), batch_size=batch_size)
    per_epoch = batches.per_epoch(0)
    rows = torch.cat([batches.stream(0).batch(epoch * per_epoch + k) for k in range(per_epoch)]).tolist()
    assert len(rows) == len(set(rows)) >= size - 1


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5])
def test_training_and_validation_rows_part_the_data(fraction: float) -> None:
    batches = make(val_fraction=fraction)
    for client, rows in enumerate(batches.pool.rows):
        train, held = batches.split(client)
        assert sorted(train.tolist() + held.tolist()) == rows.tolist()
        assert len(held) == round(len(rows) * fraction)
        drawn = torch.cat([batches.stream(client).batch(k) for k in range(batches.per_epoch(client))])
        assert not set(drawn.tolist()) & set(held.tolist())
        assert batches.num_examples(client) == len(train)


def test_which_rows_validate_hangs_on_client_and_seed() -> None:
    data = tiny.federation((40, 40))
    held = {
        (client, seed): tuple((make(data, seed=seed, val_fraction=0.25).split(client)[1] - 40 * client).tolist())
        for client in (0, 1)
        for seed in (0, 1)
    }
    assert len(set(held.values())) == 4
    assert all(len(rows) == 10 and list(rows) == sorted(rows) for rows in held.values())


def test_the_union_has_everybodys_training_rows() -> None:
    batches = make(val_fraction=0.25)
    expected = [row for client in range(3) for row in batches.split(client)[0].tolist()]
    assert batches.rows(UNION).tolist() == expected
    assert len(batches.batch(UNION, 0)[0]) == 12


def test_a_batch_is_augmented_by_a_key_of_its_own_key() -> None:
    """So a layer that draws from the batch's key draws something else than the augmentation did."""
    spec = "crop(2)+flip"
    batches = make(augmentation=spec)
    x, _, key = batches.batch(1, 5)
    raw = batches.pool.x[batches.stream(1).batch(5)]
    assert torch.equal(x, batches.inputs(augment(raw, rng.key(key, "augment"), spec)))
    assert not torch.equal(x, batches.inputs(raw))
    stacked, _, _ = batches.stack((0, 1), (5, 5))
    assert torch.equal(stacked[1], x)


def test_images_become_the_models_numbers_and_tokens_stay() -> None:
    batches = make()
    assert batches.inputs(torch.zeros(1, 1, 2, 2, dtype=torch.uint8)).dtype == torch.float64
    assert batches.inputs(torch.zeros(1, 3, dtype=torch.int64)).dtype == torch.int64


def test_a_validation_share_that_sets_nothing_aside_is_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        tiny.plan("fedavg", data__val_fraction=0.01)
    assert str(refusal.value) == "data.val_fraction=0.01 sets no example of any client aside; give a larger share"


def test_a_validation_share_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        tiny.plan("fedavg", data=tiny.federation((8, 2)), data__val_fraction=0.9)
    assert str(refusal.value) == "client 1 has no training examples left; lower data.val_fraction"


@pytest.mark.parametrize(("cohort", "size"), [(None, 12), (2, 8)])
def test_centralized_batches_are_as_large_as_a_round_s_clients_together_and_drawn_from_all_data(
    cohort: int | None, size: int
) -> None:
    made = tiny.plan("centralized", data=tiny.federation((12, 12, 12)), clients_per_round=cohort)
    stream = made.batches.stream(UNION)
    assert stream.batch_size == size
    owners = [(stream.batch(k) // 12).bincount(minlength=3).tolist() for k in range(3)]
    assert any(len(set(counts)) > 1 for counts in owners)  # not so many of each client
