"""From data set and partition to federation: own test rows, limits, unseen clients, domains, feature shift."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fednorm.data import DATASETS, ImageSet, load_dataset, make_federation
from fednorm.data.shift import CHANGES, client_change
from fednorm.errors import ConfigError


@pytest.fixture(scope="module")
def fashion():
    return load_dataset("fashion_mnist_small")


@pytest.fixture(scope="module")
def domains():
    """Three domains of four classes, 8x8 colour; rows of domains and classes are mixed."""
    draw = torch.Generator().manual_seed(0)
    return ImageSet(
        name="made",
        train_x=torch.randint(0, 256, (240, 3, 8, 8), dtype=torch.uint8, generator=draw),
        train_y=torch.arange(240) % 4,
        test_x=torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8, generator=draw),
        test_y=torch.arange(60) % 4,
        num_classes=4,
        train_domain=torch.arange(240) // 4 % 3,
        test_domain=torch.arange(60) // 4 % 3,
        domain_names=("red", "green", "blue"),
    )


def test_the_embedded_set_is_balanced_and_small(fashion):
    assert fashion.train_x.shape == (10_000, 1, 28, 28)
    assert fashion.train_x.dtype == torch.uint8
    assert fashion.train_y.bincount().tolist() == [1000] * 10
    assert fashion.test_y.bincount().tolist() == [200] * 10
    scaled = fashion.train_x.float() / 255
    assert scaled.mean().item() == pytest.approx(fashion.mean[0], abs=0.01)
    assert scaled.std().item() == pytest.approx(fashion.std[0], abs=0.01)
    info = DATASETS["fashion_mnist_small"]
    assert info.embedded
    assert info.counts == (len(fashion.train_y), len(fashion.test_y))


@pytest.mark.parametrize("name", ["iid", "shards", "dir_client", "dir_class", "sorted_blocks", "shards_unequal"])
def test_each_test_row_belongs_to_one_client_in_proportion_to_its_classes(fashion, name):
    federation = make_federation(fashion, name, 5, seed=0)
    assert torch.equal(torch.cat(federation.own_test).sort().values, torch.arange(2000))
    train = torch.stack([fashion.train_y[rows].bincount(minlength=10) for rows in federation.clients])
    test = torch.stack([fashion.test_y[rows].bincount(minlength=10) for rows in federation.own_test])
    assert bool(((test - 200 * train / train.sum(0)).abs() < 1 + 1e-6).all())


def test_under_shards_a_client_is_tested_on_its_own_classes(fashion):
    federation = make_federation(fashion, "shards", 5, seed=0)
    for rows, own in zip(federation.clients, federation.own_test, strict=True):
        assert fashion.train_y[rows].unique().tolist() == fashion.test_y[own].unique().tolist()
        assert len(own) == 400


def test_train_limit_keeps_a_balanced_draw_of_the_seed(fashion):
    first, again, other = (make_federation(fashion, "iid", 5, seed=s, train_limit=503) for s in (0, 0, 1))
    counts = first.y.bincount()
    assert len(first.y) == 503
    assert counts.max() - counts.min() <= 1
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)


def test_the_last_clients_are_unseen(fashion):
    federation = make_federation(fashion, "iid", 6, seed=0, unseen=2)
    assert federation.unseen == {4, 5}
    assert federation.training_clients == (0, 1, 2, 3)
    with pytest.raises(ConfigError, match="unseen must leave a client to train: 0 to 5, not 6"):
        make_federation(fashion, "iid", 6, seed=0, unseen=6)


def test_clients_below_the_minimum_are_refused(fashion):
    with pytest.raises(ConfigError, match="leaves client 0 with 2 examples, fewer than min_size 20; use fewer clients"):
        make_federation(fashion, "iid", 5000, seed=0, min_size=20)


def test_a_domain_client_is_tested_on_all_of_its_domain(domains):
    federation = make_federation(domains, "domain", 6, seed=0, per_client=10)
    assert [len(rows) for rows in federation.clients] == [10] * 6
    for client, (rows, own) in enumerate(zip(federation.clients, federation.own_test, strict=True)):
        assert set(domains.train_domain[rows].tolist()) == {client // 2}
        assert torch.equal(own, torch.nonzero(domains.test_domain == client // 2)[:, 0])
    assert list(federation.domains) == ["red", "green", "blue"]
    assert torch.equal(torch.cat([*federation.domains.values()]).sort().values, torch.arange(60))


def test_a_domain_without_test_rows_is_tested_on_all(domains):
    part = domains.keep(torch.arange(240), torch.nonzero(domains.test_domain > 0)[:, 0])
    federation = make_federation(part, "domain", 3, seed=0)
    assert len(federation.own_test[0]) == 40
    assert list(federation.domains) == ["green", "blue"]


def test_other_partitions_share_test_rows_by_domain_and_class(domains):
    federation = make_federation(domains, "iid", 4, seed=0)
    assert torch.equal(torch.cat(federation.own_test).sort().values, torch.arange(60))


def test_domains_can_be_chosen_by_name_or_number(domains):
    two = make_federation(domains, "domain", 2, seed=0, keep_domains=["blue", "red"])
    assert list(two.domains) == ["blue", "red"]
    assert len(two.y) == 160
    blue = domains.train_x[domains.train_domain == 2]
    assert torch.equal(two.x[two.clients[0]], blue)
    drawn = {tuple(make_federation(domains, "domain", 2, seed=s, keep_domains=2).domains) for s in range(12)}
    assert drawn == {("red", "green"), ("red", "blue"), ("green", "blue")}
    with pytest.raises(ConfigError, match="domain of made 'blu' is not known; did you mean 'blue'"):
        make_federation(domains, "domain", 2, seed=0, keep_domains=["blu"])
    with pytest.raises(ConfigError, match="keep_domains must be 1 to 3 for made, not 4"):
        make_federation(domains, "domain", 2, seed=0, keep_domains=4)


def test_only_sets_with_domains_can_choose(fashion):
    with pytest.raises(ConfigError, match="fashion_mnist_small has no domains to choose from; leave out keep_domains"):
        make_federation(fashion, "iid", 2, seed=0, keep_domains=["x"])


def test_feature_shift_changes_each_client_its_own_way_and_leaves_the_set_alone(fashion):
    before = fashion.train_x.clone()
    plain = make_federation(fashion, "iid", 7, seed=3, train_limit=700)
    shifted = make_federation(fashion, "feature-shift", 7, seed=3, train_limit=700)
    assert torch.equal(fashion.train_x, before)
    assert torch.equal(shifted.y, plain.y)
    for mine, theirs in zip(shifted.clients, plain.clients, strict=True):
        assert torch.equal(mine, theirs)
        assert not torch.equal(shifted.x[mine], plain.x[theirs])
    kinds = [client_change(3, client, 1.0)[0] for client in range(7)]
    assert set(kinds[:6]) == set(CHANGES)
    assert kinds[6] == kinds[0]
    assert set(shifted.domains) == set(CHANGES)
    assert torch.equal(torch.cat(shifted.own_test), torch.arange(2000))
    assert torch.equal(shifted.test_y[shifted.own_test[2]], plain.test_y[plain.own_test[2]])
    again = make_federation(fashion, "feature-shift", 7, seed=3, train_limit=700)
    assert torch.equal(shifted.x, again.x)
    assert torch.equal(shifted.test_x, again.test_x)


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("shape", [(4, 1, 28, 28), (4, 3, 20, 30)])
def test_every_change_keeps_the_shape_and_grows_with_strength(kind, shape):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(4)
    weak, strong = (CHANGES[kind](x, torch.tensor(5), keys, s) for s in (0.4, 1.0))
    assert weak.shape == strong.shape == x.shape
    assert bool(torch.isfinite(strong).all())
    assert 0 < (weak - x).abs().mean() < (strong - x).abs().mean()


def test_feature_shift_over_domains_copies_shared_tests(domains):
    federation = make_federation(domains, "feature_shift", 6, seed=0, inner="domain", severity=0.5)
    assert [len(rows) for rows in federation.own_test] == [20] * 6
    assert len(federation.test_y) == 120
    assert not torch.equal(federation.test_x[federation.own_test[0]], federation.test_x[federation.own_test[1]])


def test_bad_severity_is_refused(domains):
    with pytest.raises(ConfigError, match="severity must be above 0 and at most 2, not 3"):
        make_federation(domains, "feature_shift", 3, seed=0, severity=3)
    with pytest.raises(ConfigError, match="partition 'feature_shift': severity must be a number, not 'high'"):
        make_federation(domains, "feature_shift", 3, seed=0, severity="high")


def test_images_and_labels_must_match(domains):
    with pytest.raises(ConfigError, match="x: 3 training images but 2 labels; the files do not belong"):
        ImageSet(
            name="x",
            train_x=torch.zeros(3, 1, 2, 2),
            train_y=torch.zeros(2),
            test_x=torch.zeros(0, 1, 2, 2),
            test_y=torch.zeros(0),
            num_classes=2,
        )


def test_resized_keeps_means_and_mask_values(domains):
    large = domains.resized(16)
    assert large.train_x.shape == (240, 3, 16, 16)
    assert large.train_x.dtype == torch.uint8
    difference = large.train_x.float().mean((2, 3)) - domains.train_x.float().mean((2, 3))
    assert difference.abs().max() < 12
    assert domains.resized(8) is domains


def test_resized_masks_keep_their_values_and_the_shape_of_the_image():
    masks = torch.tensor([[0, 255], [3, 7]], dtype=torch.uint8).repeat_interleave(6, 0).repeat_interleave(12, 1)[None]
    images = torch.zeros(1, 3, 12, 24, dtype=torch.uint8)
    scenes = ImageSet(
        name="scenes",
        train_x=images,
        train_y=masks,
        test_x=images,
        test_y=masks,
        num_classes=8,
        task="segmentation",
        ignore_index=255,
    )
    small = scenes.resized(4)
    assert small.train_x.shape == (1, 3, 4, 8)
    assert small.train_y.dtype == torch.uint8
    assert small.test_y[0, ::3, ::7].tolist() == [[0, 255], [3, 7]]
    # The middle of a pixel at a third of the size is the middle of the nine it stands for.
    ramp = torch.arange(12, dtype=torch.uint8).expand(1, 12, 12)
    ramps = replace(scenes, train_x=images[..., :12], train_y=ramp, test_x=images[..., :12], test_y=ramp)
    assert ramps.resized(4).train_y[0, 0].tolist() == [1, 4, 7, 10]


def test_unknown_names_get_the_nearest(fashion):
    with pytest.raises(ConfigError, match="data set 'cifar' is not known; did you mean 'cifar10'"):
        load_dataset("cifar")
    assert np.array_equal(load_dataset("fashion-mnist-small").train_y.numpy(), fashion.train_y.numpy())


def test_feature_shift_refuses_rows_that_several_clients_have(fashion):
    text = (
        r"^partition 'feature_shift' changes each client's images its own way, but row \d+ is dealt more than once; "
        "leave out size$"
    )
    with pytest.raises(ConfigError, match=text):
        make_federation(fashion, "feature_shift", 4, seed=0, inner="dir_client", size=400)
