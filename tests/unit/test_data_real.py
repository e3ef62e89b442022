"""Real bytes: the packed sets of the developer's data folder, where there is one."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fednorm.data import DATASETS, load_dataset, make_federation
from fednorm.data.readers.cifar import CIFAR10_MD5
from fednorm.data.readers.idx import TRAIN_LABELS_MD5
from fednorm.data.verify import describe_dataset, verify
from fednorm.errors import ConfigError

REAL = Path(os.environ.get("FEDNORM_DATA") or Path(__file__).parents[3] / "shared" / "data")


def real(name):
    """Load a real set or skip with the reason."""
    if not describe_dataset(name, REAL)["here"]:
        pytest.skip(f"{name} is not in {REAL} (set FEDNORM_DATA to a folder that has it)")
    pytest.importorskip("PIL", reason="reading packed images needs pillow")
    return load_dataset(name, REAL)


def test_cifar10_has_the_bytes_of_the_official_batches():
    image_set = real("cifar10")

    def md5(x, y):
        records = np.concatenate([y.numpy().astype(np.uint8)[:, None], x.numpy().reshape(len(x), -1)], 1)
        return hashlib.md5(records.tobytes(), usedforsecurity=False).hexdigest()

    batches = zip(image_set.train_x.split(10_000), image_set.train_y.split(10_000), strict=True)
    found = [md5(x, y) for x, y in batches] + [md5(image_set.test_x, image_set.test_y)]
    assert found == list(CIFAR10_MD5.values())


PEAK = """
import resource, sys, PIL.WebPImagePlugin, fednorm.data.load
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
image_set = fednorm.data.load.load_dataset("cifar10", sys.argv[1])
print((peak() - before) / (image_set.train_x.nbytes + image_set.test_x.nbytes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is counted in kilobytes on Linux alone")
def test_loading_cifar10_takes_little_more_memory_than_its_bytes():
    real("cifar10")
    done = subprocess.run([sys.executable, "-c", PEAK, str(REAL)], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 1.3


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_grey_sets_have_the_labels_of_the_original_files(name):
    image_set = real(name)
    raw = b"\0\0\x08\x01" + (60_000).to_bytes(4, "big") + image_set.train_y.numpy().astype(np.uint8).tobytes()
    assert hashlib.md5(raw, usedforsecurity=False).hexdigest() == TRAIN_LABELS_MD5[name]
    scaled = image_set.train_x[:10_000].float() / 255
    assert scaled.mean().item() == pytest.approx(image_set.mean[0], abs=0.003)
    assert scaled.std().item() == pytest.approx(image_set.std[0], abs=0.003)


def test_a_flat_folder_of_the_other_set_is_noticed(tmp_path):
    labels = real("mnist").train_y.numpy().astype(np.uint8).tobytes()
    for name in ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + (60_000).to_bytes(4, "big") + labels)
    with pytest.raises(ConfigError, match="holds mnist, not fashion_mnist; give each set its own folder"):
        load_dataset("fashion_mnist", tmp_path)


def test_the_embedded_set_is_a_part_of_the_real_one():
    from fednorm.data.load import EMBEDDED
    from fednorm.data.readers.packed import read_archive

    full, small = real("fashion_mnist"), read_archive(EMBEDDED / "fashion_mnist_small.npz.xz")
    for split, x, y in (("train", full.train_x, full.train_y), ("test", full.test_x, full.test_y)):
        rows = small[f"idx_{split}"]
        assert np.array_equal(small[f"x_{split}"], x[rows][:, 0].numpy())
        assert np.array_equal(small[f"y_{split}"], y[rows].numpy())


@pytest.mark.parametrize("name", ["usps", "svhn", "mnist_m", "synth_digits"])
def test_digit_sets_pass_their_own_check(name):
    real(name)
    report = verify(name, REAL)
    assert report["ok"] is True
    assert "training labels 0 to 9" in str(report["checks"])


def test_digits_five_is_fedbns_set_up():
    five = real("digits_five")
    assert five.train_x.shape == (5 * 7438, 3, 28, 28)
    assert five.train_domain is not None
    assert five.test_domain is not None
    assert five.train_domain.bincount().tolist() == [7438] * 5
    assert five.test_domain.bincount().tolist() == [7000, 3000, 1860, 3000, 3000]
    assert five.domain_names == DATASETS["digits_five"].domains
    federation = make_federation(five, "domain", 50, seed=0, per_client=743)
    assert [len(rows) for rows in federation.clients] == [743] * 50
    assert len(torch.cat(federation.clients).unique()) == 50 * 743
    mnist = load_dataset("mnist", REAL)
    below = {bytes(image.numpy().tobytes()) for image in mnist.train_x[:50_000, 0]}
    assert all(image[0].numpy().tobytes() in below for image in five.train_x[:200])


def test_office_has_the_published_domain_sizes():
    office = real("office_caltech10")
    assert office.train_domain is not None
    assert office.test_domain is not None
    assert office.train_domain.bincount().tolist() == [766, 898, 125, 236]
    assert office.test_domain.bincount().tolist() == [192, 225, 32, 59]
    federation = make_federation(office, "domain", 4, seed=0, per_client=62)
    assert [len(rows) for rows in federation.own_test] == [192, 225, 32, 59]


def test_pacs_has_all_its_images():
    pacs = real("pacs")
    assert pacs.train_domain is not None
    assert pacs.test_domain is not None
    total = pacs.train_domain.bincount() + pacs.test_domain.bincount()
    assert total.tolist() == [2048, 2344, 1670, 3929]
    assert pacs.num_classes == 7


def test_camvid_frames_and_masks_belong_together():
    camvid = real("camvid")
    assert camvid.train_x.shape == (367, 3, 180, 240)
    assert camvid.train_y.shape == (367, 180, 240)
    sky = camvid.train_x.float().mean(1)[camvid.train_y == 0].mean()
    road = camvid.train_x.float().mean(1)[camvid.train_y == 3].mean()
    assert sky > road + 50
    federation = make_federation(camvid, "domain", 3, seed=0)
    assert [len(rows) for rows in federation.clients] == [62, 101, 204]
