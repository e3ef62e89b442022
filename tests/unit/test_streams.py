"""Batch streams: pure functions of (seed, client, k), without replacement within an epoch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednorm.data.streams import Stream, batch_rows, batches_per_epoch
from fednorm.errors import ConfigError


@given(st.integers(0, 2**40), st.integers(0, 99), st.integers(1, 60), st.integers(1, 25), st.integers(0, 3))
def test_an_epoch_uses_no_row_twice_and_leaves_out_at_most_one(seed, client, count, batch_size, epoch):
    rows = torch.arange(1000, 1000 + count)
    stream = Stream(seed, client, rows, batch_size)
    first = epoch * stream.batches_per_epoch
    batches = [stream.batch(first + i) for i in range(stream.batches_per_epoch)]
    seen = torch.cat(batches)
    assert len(seen.unique()) == len(seen)
    lonely = count % batch_size == 1 and count > 1 and batch_size > 1
    assert len(seen) == count - lonely
    assert set(seen.tolist()) <= set(rows.tolist())
    assert all(len(batch) == batch_size for batch in batches[:-1])
    if count > 1 and batch_size > 1:
        assert all(len(batch) > 1 for batch in batches)


@given(st.integers(0, 2**40), st.integers(0, 99), st.lists(st.integers(0, 40), min_size=1, max_size=12))
def test_the_cache_changes_nothing_in_any_order_of_asking(seed, client, asked):
    rows = torch.arange(23)
    stream = Stream(seed, client, rows, 4)
    for k in asked:
        assert torch.equal(stream.batch(k), batch_rows(seed, client, rows, 4, k))


def test_sizes_are_those_of_the_batches_in_every_epoch():
    stream = Stream(0, 0, torch.arange(10), 4)
    assert [stream.size(k) for k in range(7)] == [4, 4, 2, 4, 4, 2, 4]
    assert [len(stream.batch(k)) for k in range(7)] == [stream.size(k) for k in range(7)]
    assert [stream.sizes(first, 2) for first in range(4)] == [{4}, {4, 2}, {2, 4}, {4}]


def test_seed_client_and_epoch_each_change_the_order():
    rows = torch.arange(100)
    base = batch_rows(0, 0, rows, 50, 0)
    others = [batch_rows(1, 0, rows, 50, 0), batch_rows(0, 1, rows, 50, 0), batch_rows(0, 0, rows, 50, 2)]
    assert not any(torch.equal(base, other) for other in others)


def test_orders_do_not_depend_on_which_rows_a_client_has():
    first = batch_rows(5, 2, torch.arange(30), 10, 1)
    second = batch_rows(5, 2, torch.arange(30) + 500, 10, 1)
    assert torch.equal(first + 500, second)


def test_single_examples_are_kept_where_there_is_nothing_else():
    assert [batches_per_epoch(n, b) for n, b in ((1, 20), (41, 20), (42, 20), (3, 1), (3, 2))] == [1, 2, 3, 3, 1]
    assert batch_rows(0, 0, torch.tensor([7]), 20, 3).tolist() == [7]


@pytest.mark.parametrize(
    ("count", "size", "k", "text"),
    [
        (0, 4, 0, "a client without examples has no batches; leave it out or use a larger min_size"),
        (5, 0, 0, "the batch size must be at least 1, not 0"),
        (5, 4, -1, "batches are counted from 0, not -1"),
    ],
)
def test_bad_streams_are_refused(count, size, k, text):
    with pytest.raises(ConfigError) as caught:
        batch_rows(0, 0, torch.arange(count), size, k)
    assert str(caught.value) == text
