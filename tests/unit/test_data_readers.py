"""Readers on small files in the original on-disk forms: arrays, records, text, JSON."""

import bz2
import gzip
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from fednorm.data import load_dataset
from fednorm.data.verify import describe_dataset, verify
from fednorm.errors import ConfigError

DRAW = np.random.default_rng(0)


def write_idx(path, array, zipped):
    raw = b"\0\0\x08" + bytes([array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    if zipped:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(raw))
    else:
        path.write_bytes(raw)


def write_mnist(folder, zipped=False):
    arrays = {}
    for split, count in (("train", 30), ("t10k", 20)):
        arrays[split] = DRAW.integers(256, size=(count, 28, 28), dtype=np.uint8), np.arange(count, dtype=np.uint8) % 10
        write_idx(folder / f"{split}-images-idx3-ubyte", arrays[split][0], zipped)
        write_idx(folder / f"{split}-labels-idx1-ubyte", arrays[split][1], zipped)
    return arrays


@pytest.mark.parametrize(
    ("name", "place", "zipped"),
    [
        ("mnist", "MNIST/raw", False),
        ("mnist", ".", True),
        ("fashion_mnist", "FashionMNIST/raw", True),
        ("fashion_mnist", "fashion_mnist", False),
    ],
)
def test_idx_files_are_read_from_where_torchvision_leaves_them(tmp_path, name, place, zipped):
    arrays = write_mnist(tmp_path / place, zipped)
    image_set = load_dataset(name, tmp_path, check=False)
    assert np.array_equal(image_set.train_x[:, 0].numpy(), arrays["train"][0])
    assert np.array_equal(image_set.test_y.numpy(), arrays["t10k"][1])
    assert image_set.train_y.dtype == torch.int64
    assert describe_dataset(name, tmp_path)["form"] == "idx files"


def test_a_short_idx_file_is_refused(tmp_path):
    write_mnist(tmp_path / "MNIST/raw")
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-5])
    text = f"{path} is damaged: it announces 30x28x28 bytes and holds 23515; delete it and get it again"
    with pytest.raises(ConfigError) as caught:
        load_dataset("mnist", tmp_path)
    assert str(caught.value) == text
    path.write_bytes(b"hello world")
    with pytest.raises(ConfigError, match="it does not begin like an idx file of bytes"):
        load_dataset("mnist", tmp_path)
    path.unlink()
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(bytes(100))[:20])
    with pytest.raises(ConfigError, match=r"-ubyte.gz is damaged"):
        load_dataset("mnist", tmp_path)


def test_the_counts_of_the_full_set_are_asked_for(tmp_path):
    write_mnist(tmp_path / "MNIST/raw")
    with pytest.raises(ConfigError) as caught:
        load_dataset("mnist", tmp_path)
    assert str(caught.value) == (
        f"mnist in {tmp_path}/MNIST/raw has 30 training and 20 test examples, expected 60000 and 10000; get it again, "
        "or read it as it is with check=False"
    )
    report = verify("mnist", tmp_path)
    assert report["here"] is True
    assert report["ok"] is False


def write_cifar10(folder):
    folder.mkdir()
    batches = {}
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        batches[name] = DRAW.integers(10, size=4, dtype=np.uint8), DRAW.integers(256, size=(4, 3072), dtype=np.uint8)
        (folder / f"{name}.bin").write_bytes(np.concatenate([batches[name][0][:, None], batches[name][1]], 1).tobytes())
    return batches


def test_cifar10_binary_batches_come_in_order(tmp_path):
    batches = write_cifar10(tmp_path / "cifar-10-batches-bin")
    image_set = load_dataset("cifar10", tmp_path, check=False)
    assert image_set.train_x.shape == (20, 3, 32, 32)
    assert np.array_equal(image_set.train_x[4:8].numpy().reshape(4, -1), batches["data_batch_2"][1])
    assert np.array_equal(image_set.test_y.numpy(), batches["test_batch"][0])
    assert verify("cifar10", tmp_path)["ok"] is False


def test_cifar10_batch_of_odd_length_is_refused(tmp_path):
    write_cifar10(tmp_path / "cifar-10-batches-bin")
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="is damaged: 12291 bytes are not a number of records of 3073"):
        load_dataset("cifar10", tmp_path)


def test_cifar100_takes_the_fine_label(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for split, count in (("train", 6), ("test", 3)):
        records = DRAW.integers(256, size=(count, 3074), dtype=np.uint8)
        records[:, 0], records[:, 1] = 7, np.arange(count) + 90
        (folder / f"{split}.bin").write_bytes(records.tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(f"class_{k}" for k in range(100)))
    image_set = load_dataset("cifar100", tmp_path, check=False)
    assert image_set.train_y.tolist() == [90, 91, 92, 93, 94, 95]
    assert image_set.classes[99] == "class_99"
    assert np.array_equal(image_set.test_x.numpy().reshape(3, -1), records[:, 2:])


@pytest.mark.parametrize(("name", "folder"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")])
def test_pickles_are_refused(tmp_path, name, folder):
    (tmp_path / folder).mkdir()
    with pytest.raises(ConfigError) as caught:
        load_dataset(name, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / folder} holds Python pickles, which can run code when read; take the binary version: "
        f"fednorm data fetch {name} --data-dir {tmp_path}"
    )


def test_missing_data_names_file_and_command(tmp_path, monkeypatch):
    with pytest.raises(ConfigError) as caught:
        load_dataset("cifar10", tmp_path)
    assert str(caught.value) == (
        f"cifar10 was not found in {tmp_path}; expected {tmp_path}/cifar-10-batches-bin/data_batch_1.bin ... (or "
        f"{tmp_path}/cifar10/train_0.npz); get it with: fednorm data fetch cifar10 --data-dir {tmp_path}"
    )
    with pytest.raises(ConfigError, match=r"log in at https://www.cityscapes-dataset.com"):
        load_dataset("cityscapes", tmp_path)
    monkeypatch.delenv("FEDNORM_DATA", raising=False)
    with pytest.raises(ConfigError) as caught:
        load_dataset("mnist")
    assert str(caught.value) == (
        "mnist needs a data folder: give --data-dir DIR or set FEDNORM_DATA; get it with: fednorm data fetch mnist "
        "--data-dir DIR"
    )


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    write_mnist(tmp_path / "MNIST/raw")
    monkeypatch.setenv("FEDNORM_DATA", str(tmp_path))
    assert len(load_dataset("mnist", check=False).train_y) == 30


def test_usps_libsvm_text(tmp_path):
    lines = ["3 1:-1 2:1 256:0.5", "10 1:0", "1 "]
    (tmp_path / "usps.bz2").write_bytes(bz2.compress("\n".join(lines).encode()))
    (tmp_path / "usps.t.bz2").write_bytes(bz2.compress(b"5 17:1\n"))
    image_set = load_dataset("usps", tmp_path, check=False)
    assert image_set.train_y.tolist() == [2, 9, 0]
    assert image_set.train_x[0, 0, 0, :3].tolist() == [0, 255, 0]
    assert image_set.train_x[0, 0, 15, 15].item() == 191
    assert image_set.test_x[0, 0, 1, 0].item() == 255
    (tmp_path / "usps.t.bz2").write_bytes(bz2.compress(b"5 900:1\n"))
    with pytest.raises(ConfigError, match=r"usps.t.bz2 is damaged: not USPS in libsvm form"):
        load_dataset("usps", tmp_path)


def test_svhn_matlab_files_count_ten_as_zero(tmp_path):
    savemat = pytest.importorskip("scipy.io").savemat
    (tmp_path / "svhn").mkdir()
    x = DRAW.integers(256, size=(32, 32, 3, 4), dtype=np.uint8)
    for split in ("train", "test"):
        savemat(tmp_path / "svhn" / f"{split}_32x32.mat", {"X": x, "y": np.array([[1], [10], [9], [10]], np.uint8)})
    image_set = load_dataset("svhn", tmp_path, check=False)
    assert image_set.train_y.tolist() == [1, 0, 9, 0]
    assert np.array_equal(image_set.train_x[2].numpy(), x[:, :, :, 2].transpose(2, 0, 1))
    (tmp_path / "svhn" / "test_32x32.mat").write_bytes(b"not a mat file" * 20)
    with pytest.raises(ConfigError, match=r"test_32x32.mat is damaged: not a MATLAB file with X and y"):
        load_dataset("svhn", tmp_path)


def test_femnist_has_a_domain_for_every_writer(tmp_path):
    users = {"f01": [0, 35, 61], "f00": [9]}
    for split in ("train", "test"):
        folder = tmp_path / "femnist" / split
        folder.mkdir(parents=True)
        data = {user: {"x": [[k / 61] * 784 for k in codes], "y": codes} for user, codes in users.items()}
        content = {"users": [*users], "num_samples": [3, 1], "user_data": data}
        (folder / "all_data_0.json").write_text(json.dumps(content))
    image_set = load_dataset("femnist", tmp_path)
    assert image_set.domain_names == ("f00", "f01")
    assert image_set.train_y.tolist() == [0, 35, 61, 9]
    assert image_set.train_domain is not None
    assert image_set.train_domain.tolist() == [1, 1, 1, 0]
    # 35 / 61 and 9 / 61 of 255 are 146.3 and 37.6; LEAF's numbers are rounded, or most pixels would lose one.
    assert [image.unique().tolist() for image in image_set.train_x] == [[0], [146], [255], [38]]
    assert image_set.classes[35] == "Z"
    (tmp_path / "femnist/test/all_data_0.json").write_text('{"users": ["a"], "user_data": {}}')
    with pytest.raises(ConfigError, match=r"all_data_0.json is damaged: not LEAF's JSON"):
        load_dataset("femnist", tmp_path)


def test_a_broken_archive_is_refused(tmp_path):
    (tmp_path / "usps.npz.xz").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match=r"usps.npz.xz is damaged: .*; delete it and get it again"):
        load_dataset("usps", tmp_path)
    np.savez(tmp_path / "svhn.npz", y=np.array([object()], dtype=object))
    with pytest.raises(ConfigError, match=r"svhn.npz': y holds Python objects, which are never read"):
        load_dataset("svhn", tmp_path)


def test_describe_says_what_is_not_here(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDNORM_DATA", raising=False)
    assert describe_dataset("cifar10")["get"] == "get it with: fednorm data fetch cifar10 --data-dir DIR"
    facts = describe_dataset("digits_five", tmp_path)
    assert facts["here"] is False
    assert facts["get"] == "parts missing: mnist, svhn, usps, synth_digits, mnist_m"
    assert describe_dataset("fashion_mnist_small")["form"] == "embedded"
    with pytest.raises(ConfigError, match="pacs was not found in"):
        verify("pacs", tmp_path)


def test_verify_finds_the_embedded_set_in_order():
    report = verify("fashion_mnist_small")
    assert report["ok"] is True
    assert "10000 training and 2000 test examples" in str(report["checks"])


def test_listing_and_fetching_do_not_import_torch():
    code = "import sys, fednorm.data.fetch, fednorm.data; fednorm.data.DATASETS; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
