"""Keyed randomness: pure, spread out, and the same for numbers and tensors, singly and mapped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorm.core import rng

WORDS = st.integers(-(2**63), 2**63 - 1)
NAMES = st.text(max_size=8)


@given(st.lists(st.one_of(WORDS, NAMES), min_size=1, max_size=4), st.data())
def test_plain_numbers_and_tensors_give_the_same_key(words: list[int | str], data: st.DataObject) -> None:
    as_tensor = [isinstance(word, int) and data.draw(st.booleans()) for word in words]
    mixed = [torch.tensor(w) if t else w for w, t in zip(words, as_tensor, strict=True)]
    plain, other = rng.key(*words), rng.key(*mixed)
    assert plain.dtype == other.dtype == torch.int64
    assert torch.equal(plain, other)


@given(st.lists(WORDS, min_size=1, max_size=5), NAMES)
def test_an_axis_of_clients_is_keyed_at_once(clients: list[int], name: str) -> None:
    together = rng.key(3, name, torch.tensor(clients), 5)
    assert together.tolist() == [rng.key(3, name, client, 5).item() for client in clients]


def test_keys_are_fixed_for_ever() -> None:
    """Changing the hash would change every published number, so a few keys are pinned."""
    pinned = [rng.key(0).item(), rng.key(0, "batch", 3, 7).item(), rng.key(-1).item()]
    assert pinned == [-6411193824288604561, -6868464397545683317, 6755974106381971767]


def test_order_and_number_of_words_matter() -> None:
    keys = {rng.key(*words).item() for words in [(1, 2), (2, 1), (1,), (2,), (1, 2, 0), (0, 1, 2), ("1", 2), ()]}
    assert len(keys) == 8


@given(WORDS, st.integers(1, 50))
def test_a_permutation_has_everything_once(seed: int, count: int) -> None:
    order = rng.permutation(rng.key(seed), count)
    assert sorted(order.tolist()) == list(range(count))
    assert torch.equal(order, rng.permutation(rng.key(seed), count))


@given(WORDS)
def test_uniform_numbers_are_in_range_and_multiples_of_two_to_the_minus_24(seed: int) -> None:
    drawn = rng.uniform(rng.key(seed), (64,))
    assert drawn.dtype == torch.float32
    assert bool(((drawn >= 0) & (drawn < 1)).all())
    assert torch.equal(drawn * 2**24, (drawn * 2**24).round())


@given(WORDS, st.integers(1, 2**40))
def test_integers_are_in_range(seed: int, high: int) -> None:
    drawn = rng.integers(rng.key(seed), high, (32,))
    assert bool(((drawn >= 0) & (drawn < high)).all())


def test_the_shape_only_arranges_the_draws() -> None:
    key = rng.key(9)
    assert torch.equal(rng.bits(key, (6,)).view(2, 3), rng.bits(key, (2, 3)))
    assert rng.bits(key, ()).shape == ()


def test_draws_are_spread_evenly() -> None:
    drawn = torch.cat([rng.uniform(rng.key(0, "step", client), (500,)) for client in range(40)])
    counts = torch.histc(drawn, bins=20, min=0, max=1)
    # 20,000 draws, 1,000 a bin, standard deviation 31
    assert bool(((counts - 1000).abs() < 150).all())
    first = torch.stack([rng.uniform(rng.key(0, c), (1,))[0] for c in range(2000)])
    assert abs(float(first.mean()) - 0.5) < 0.03
    assert abs(float(torch.corrcoef(torch.stack([first[:-1], first[1:]]))[0, 1])) < 0.08


def test_mapped_over_clients_each_draws_its_own() -> None:
    keys = rng.key(1, torch.arange(4))
    mapped = torch.vmap(lambda key: rng.uniform(key, (5,)))(keys)
    assert torch.equal(mapped, torch.stack([rng.uniform(key, (5,)) for key in keys]))


def test_nothing_is_taken_from_torchs_generator() -> None:
    before = torch.random.get_rng_state()
    rng.permutation(rng.key(3, "x"), 10)
    assert torch.equal(before, torch.random.get_rng_state())


@given(WORDS)
def test_a_seed_for_other_generators_is_not_negative(word: int) -> None:
    assert 0 <= rng.as_seed(rng.key(word)) < 2**63


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_the_gpu_draws_the_same() -> None:
    key = rng.key(5, "x")
    assert torch.equal(rng.bits(key.cuda(), (1000,)).cpu(), rng.bits(key, (1000,)))
    assert torch.equal(rng.permutation(key.cuda(), 1000).cpu(), rng.permutation(key, 1000))
