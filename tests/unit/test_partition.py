"""Partitions: disjoint, complete or exactly as large as stated, reproducible, never below the minimum size."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fednorm.data.partition import PARTITIONS, find_partition, largest_remainder, partition
from fednorm.data.summary import summary, table
from fednorm.errors import ConfigError

BALANCED = np.repeat(np.arange(10), 60)
COMPLETE = ("iid", "dir_client", "dir_class", "shards", "label_shards", "sorted_blocks", "feature_shift")


def labels_of(seed: int, size: int, num_classes: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).integers(num_classes, size=size)
    drawn[:num_classes] = np.arange(num_classes)
    return drawn


@pytest.mark.parametrize("name", COMPLETE)
@given(
    seed=st.integers(0, 2**40), num_clients=st.integers(1, 12), size=st.integers(100, 400), classes=st.integers(2, 10)
)
def test_every_row_is_on_one_client_and_the_draw_repeats(name, seed, num_clients, size, classes):
    labels = labels_of(seed, size, classes)
    clients = partition(name, labels, num_clients, seed)
    assert len(clients) == num_clients
    assert min(map(len, clients)) >= 1
    assert np.array_equal(np.sort(np.concatenate(clients)), np.arange(size))
    assert all(np.all(np.diff(rows) > 0) for rows in clients)
    again = partition(name, labels, num_clients, seed)
    assert all(np.array_equal(a, b) for a, b in zip(clients, again, strict=True))


@given(seed=st.integers(0, 2**40), num_clients=st.integers(1, 12), min_size=st.integers(1, 8))
def test_dirichlet_by_class_redraws_until_every_client_has_the_minimum(seed, num_clients, min_size):
    clients = partition("dir_class", BALANCED, num_clients, seed, alpha=0.5, min_size=min_size)
    assert min(map(len, clients)) >= min_size


@given(seed=st.integers(0, 2**40), num_clients=st.integers(1, 12), alpha=st.sampled_from([1e-3, 0.1, 1.0, 100.0]))
def test_dirichlet_by_client_gives_equal_quotas(seed, num_clients, alpha):
    sizes = [len(rows) for rows in partition("dir_client", BALANCED, num_clients, seed, alpha=alpha)]
    assert max(sizes) - min(sizes) <= 1


@given(seed=st.integers(0, 2**40), num_clients=st.integers(1, 12), size=st.integers(1, 700))
def test_dirichlet_of_a_size_gives_it_to_all_and_repeats_a_row_only_where_its_class_has_no_more(
    seed, num_clients, size
):
    clients = partition("dir_client", BALANCED, num_clients, seed, size=size)
    assert [len(rows) for rows in clients] == [size] * num_clients
    for rows in clients:
        wanted = np.bincount(BALANCED[rows], minlength=10)
        held = np.bincount(BALANCED[np.unique(rows)], minlength=10)
        assert np.array_equal(held, np.minimum(wanted, 60))
    again = partition("dir_client", BALANCED, num_clients, seed, size=size)
    assert all(np.array_equal(a, b) for a, b in zip(clients, again, strict=True))


def test_clients_of_a_size_share_rows_once_there_are_too_few():
    rows = np.concatenate(partition("dir_client", BALANCED, 20, 0, size=100))
    assert len(rows) == 2000
    assert 400 < len(np.unique(rows)) <= 600


def test_a_client_of_one_example_is_no_reason_to_draw_again():
    labels = np.repeat([0, 1], 6)
    least = {min(len(part) for part in partition("dir_class", labels, 4, seed, alpha=0.5)) for seed in range(20)}
    assert min(least) == 1
    assert {min(map(len, partition("dir_class", labels, 4, seed, min_size=2))) for seed in range(20)} <= {2, 3}


@given(seed=st.integers(0, 2**40), num_clients=st.integers(1, 20))
def test_unequal_shards_use_all_whole_shards(seed, num_clients):
    labels = labels_of(seed, 1037, 10)
    clients = partition("shards_unequal", labels, num_clients, seed, shard_size=20)
    rows = np.concatenate(clients)
    assert len(np.unique(rows)) == len(rows) == 1037 // 20 * 20
    assert all(len(part) % 20 == 0 and len(part) >= 20 for part in clients)


def test_unequal_shards_are_drawn_from_low_to_high_both_included():
    labels = labels_of(0, 1000, 10)
    equal = partition("shards_unequal", labels, 10, 0, shard_size=20, low=3, high=3)
    assert [len(part) for part in equal] == [100] * 10
    # Numbers 1 and 2 in the ratio of one to two: 50 shards, one each by right, the others as drawn.
    unequal = [len(part) // 20 for part in partition("shards_unequal", labels, 10, 0, shard_size=20, low=1, high=2)]
    assert sum(unequal) == 50
    few, many = min(unequal) - 1, max(unequal) - 1
    assert many / few == pytest.approx(2, rel=0.4)
    assert len(set(unequal)) <= 4


@given(
    seed=st.integers(0, 2**40),
    domains=st.integers(1, 5),
    per_domain=st.integers(1, 4),
    per_client=st.integers(1, 10) | st.none(),
)
def test_domain_gives_each_client_one_domain_and_the_size_asked_for(seed, domains, per_domain, per_client):
    domain_of = np.random.default_rng(seed).permutation(np.repeat(np.arange(domains), 40))
    labels = np.zeros(len(domain_of), dtype=np.int64)
    clients = partition("domain", labels, domains * per_domain, seed, domains=domain_of, per_client=per_client)
    rows = np.concatenate(clients)
    assert len(np.unique(rows)) == len(rows)
    assert [set(domain_of[part]) for part in clients] == [{c // per_domain} for c in range(domains * per_domain)]
    if per_client is None:
        assert len(rows) == len(domain_of)
    else:
        assert {len(part) for part in clients} == {per_client}


def held_classes(clients, labels):
    return [entry["classes"] for entry in summary(clients, labels, int(labels.max()) + 1)]


def test_five_clients_hold_disjoint_pairs_that_the_seed_draws():
    pairs = {}
    for seed in range(4):
        clients = partition("shards", BALANCED, 5, seed)
        assert [len(rows) for rows in clients] == [120] * 5
        held = held_classes(clients, BALANCED)
        assert sorted(k for classes in held for k in classes) == list(range(10))
        assert all(len(classes) == 2 for classes in held)
        pairs[seed] = tuple(map(tuple, held))
    assert len(set(pairs.values())) == 4


def test_tiny_imagenet_shards_put_every_class_on_two_clients():
    labels = np.repeat(np.arange(200), 10)
    held = held_classes(partition("shards", labels, 10, 0), labels)
    assert [len(classes) for classes in held] == [40] * 10
    assert np.array_equal(np.bincount(np.concatenate(held)), np.full(200, 2))


@given(seed=st.integers(0, 2**40), num_clients=st.integers(2, 30), each=st.integers(1, 10))
def test_shards_hold_exactly_the_classes_asked_for(seed, num_clients, each):
    assume(num_clients * each >= 10)
    held = held_classes(partition("shards", BALANCED, num_clients, seed, classes_per_client=each), BALANCED)
    assert [len(classes) for classes in held] == [each] * num_clients
    holders = np.bincount(np.concatenate(held), minlength=10)
    assert holders.max() - holders.min() <= 1


def test_default_shards_fall_back_to_two_label_sorted_shards_each():
    clients = partition("shards", BALANCED, 7, 3)
    assert all(np.array_equal(a, b) for a, b in zip(clients, partition("label_shards", BALANCED, 7, 3), strict=True))


def test_sorted_blocks_cut_a_stable_sort_whatever_the_seed():
    labels = np.array([1, 0, 1, 0, 2, 2])
    for seed in (0, 1):
        assert [rows.tolist() for rows in partition("sorted_blocks", labels, 3, seed)] == [[1, 3], [0, 2], [4, 5]]


def test_a_small_alpha_skews_and_a_large_one_does_not():
    def largest_share(alpha):
        counts = np.array(
            [e["labels"] for e in summary(partition("dir_client", BALANCED, 5, 0, alpha=alpha), BALANCED, 10)]
        )
        return (counts.max(1) / counts.sum(1)).mean()

    assert largest_share(0.05) > 0.4
    assert largest_share(1000) < 0.2


def test_dashes_and_underscores_name_the_same_partition():
    dashed, plain = (partition(name, BALANCED, 4, 0) for name in ("sorted-blocks", "sorted_blocks"))
    assert all(np.array_equal(a, b) for a, b in zip(dashed, plain, strict=True))


@pytest.mark.parametrize(
    ("name", "clients", "options", "text"),
    [
        ("shard", 5, {}, "partition 'shard' is not known; did you mean 'shards'?"),
        ("dir_class", 5, {"aplha": 1}, "option of partition 'dir_class' 'aplha' is not known; did you mean 'alpha'?"),
        ("iid", 5, {"alpha": 1}, "partition 'iid' has no options; leave out 'alpha'"),
        ("dir_client", 5, {"alpha": "x"}, "partition 'dir_client': alpha must be a number, not 'x'"),
        (
            "shards",
            5,
            {"classes_per_client": 2.5},
            "partition 'shards': classes_per_client must be a whole number, not 2.5",
        ),
        ("dir_client", 5, {"alpha": 0.0}, "partition 'dir_client': alpha must be positive and finite, not 0.0"),
        ("dir_client", 5, {"size": 0}, "partition 'dir_client': size must be positive and finite, not 0"),
        ("dir_client", 5, {"size": 2.5}, "partition 'dir_client': size must be a whole number, not 2.5"),
        (
            "dir_client",
            5,
            {"size": 3, "min_size": 4},
            "partition 'dir_client' leaves client 0 with 3 examples, fewer than min_size 4; use a larger size",
        ),
        ("iid", 0, {}, "the number of clients must be at least 1, not 0"),
        ("iid", 601, {}, "601 clients cannot share 600 examples; use at most 600 clients"),
        (
            "iid",
            100,
            {"min_size": 7},
            "partition 'iid' leaves client 0 with 6 examples, fewer than min_size 7; use fewer clients",
        ),
        (
            "shards",
            5,
            {"classes_per_client": 11},
            "partition 'shards': classes_per_client must be 1 to 10 (the number of classes), not 11",
        ),
        (
            "shards",
            5,
            {"classes_per_client": 1},
            "partition 'shards': 5 clients with 1 classes each cover only 5 of 10 classes; use classes_per_client=2 or "
            "more clients",
        ),
        (
            "shards_unequal",
            20,
            {},
            "partition 'shards_unequal': 600 examples make 12 shards of 50, fewer than 20 clients; use shard_size=30 "
            "or fewer clients",
        ),
        (
            "domain",
            5,
            {},
            "partition 'domain' needs a data set with domains, such as digits_five, office_caltech10 or pacs",
        ),
        (
            "label_shards",
            400,
            {},
            "partition 'label_shards': 800 shards need at least 800 examples, not 600; use fewer clients than 400",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(name, clients, options, text):
    with pytest.raises(ConfigError) as caught:
        partition(name, BALANCED, clients, 0, **options)
    assert str(caught.value) == text


def test_a_dirichlet_that_never_fits_names_client_size_and_fix(monkeypatch):
    monkeypatch.setattr("fednorm.data.partition.MAX_DRAWS", 20)
    text = r"leaves client \d+ with \d+ examples in the best of 20 draws, fewer than min_size 55; use a larger alpha"
    with pytest.raises(ConfigError, match=text):
        partition("dir_class", BALANCED, 10, 0, alpha=0.05, min_size=55)


def test_domains_must_divide_the_clients():
    domains = np.repeat(np.arange(3), 200)
    with pytest.raises(ConfigError, match="4 clients cannot share 3 domains evenly; use a multiple of 3"):
        partition("domain", BALANCED, 4, 0, domains=domains)
    with pytest.raises(
        ConfigError, match="leaves client 0 with 200 examples, fewer than min_size 743; use per_client=200"
    ):
        partition("domain", BALANCED, 3, 0, domains=domains, per_client=743)


def test_label_partitions_refuse_masks():
    with pytest.raises(
        ConfigError, match="partition 'shards' needs one label per example; for masks use 'iid' or 'domain'"
    ):
        partition("shards", np.zeros((10, 4, 4), dtype=np.uint8), 2, 0)


def test_an_inner_partition_gets_the_options_that_feature_shift_does_not_know():
    clients = partition("feature_shift", BALANCED, 5, 1, inner="dir_class", alpha=0.3, severity=0.5)
    expected = partition("dir_class", BALANCED, 5, 1, alpha=0.3)
    assert all(np.array_equal(a, b) for a, b in zip(clients, expected, strict=True))
    with pytest.raises(ConfigError, match="partition 'iid' has no options; leave out 'alpha'"):
        partition("feature_shift", BALANCED, 5, 1, alpha=0.3)


def test_every_listed_option_is_an_argument_with_that_default():
    for info in PARTITIONS.values():
        defaults = info.function.__kwdefaults__
        assert {option: defaults[option] for option in info.options} == dict(info.options)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.integers(0, 1000))
def test_largest_remainder_sums_up_and_stays_within_one(shares, total):
    weights = np.array(shares)
    counts = largest_remainder(weights, total)
    assert counts.sum() == total
    assert np.all(np.abs(counts - weights / weights.sum() * total) < 1 + 1e-6)


def test_long_tables_are_cut_and_say_so():
    text = table(summary(partition("iid", BALANCED, 30, 0), BALANCED, 10), max_rows=3)
    assert len(text.splitlines()) == 5
    assert text.endswith("... 30 clients in all, 20 to 20 examples each")


def test_tables_of_many_classes_count_the_classes_held():
    labels = np.repeat(np.arange(200), 10)
    assert "40 of 200" in table(summary(partition("shards", labels, 10, 0), labels, 200))


def test_options_of_an_inner_partition_are_looked_at_before_there_is_data():
    with pytest.raises(ConfigError) as refusal:
        find_partition("feature_shift", {"inner": "shards", "alpha": 0.1})
    assert str(refusal.value) == "option of partition 'shards' 'alpha' is not known; known: classes_per_client."


def test_clients_of_a_given_size_share_examples():
    labels = labels_of(3, 5000, 10)
    clients = partition("dir_client", labels, 100, 7, alpha=0.5, size=350)
    again = partition("dir_client", labels, 100, 7, alpha=0.5, size=350)
    assert all(np.array_equal(one, other) for one, other in zip(clients, again, strict=True))
    assert {len(rows) for rows in clients} == {350}
    counts = np.bincount(np.concatenate(clients), minlength=5000)
    assert counts.sum() == 35_000, "more than there are, so that some lie at several clients"
    assert counts.max() > 1
    shares = np.stack([np.bincount(labels[rows], minlength=10) for rows in clients]) / 350
    assert (shares.max(axis=1) > 0.3).mean() > 0.5, "classes are skewed"
