"""Readers on small image files in the original folder forms."""

import io

import numpy as np
import pytest
import torch

from fednorm.data import load_dataset, make_federation
from fednorm.data.readers.domains import DOMAINNET_CLASSES, held_out
from fednorm.data.readers.images import read_images
from fednorm.data.registry import DOMAINNET_DOMAINS, OFFICE_DOMAINS, PACS_DOMAINS
from fednorm.data.verify import describe_dataset
from fednorm.errors import ConfigError

Image = pytest.importorskip("PIL.Image")


def paint(path, colour, size=(12, 10), mode="RGB"):
    """One image of a single colour; size is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def colours(x):
    """The colour in the middle of every image."""
    return [tuple(image[:, image.shape[1] // 2, image.shape[2] // 2].tolist()) for image in x]


def test_pacs_folders_are_split_by_domain_and_class(tmp_path):
    for d, domain in enumerate(PACS_DOMAINS):
        for k, name in enumerate(("dog", "horse")):
            for i in range(10):
                paint(tmp_path / "PACS" / domain / name / f"{i}.png", (d * 60, k * 200, i * 20))
    image_set = load_dataset("pacs", tmp_path, size=8, check=False)
    assert image_set.train_x.shape == (64, 3, 8, 8)
    assert image_set.test_x.shape == (16, 3, 8, 8)
    assert image_set.classes == ("dog", "horse")
    assert image_set.domain_names == PACS_DOMAINS
    assert image_set.train_domain is not None
    for x, y, domain in zip(image_set.train_x, image_set.train_y, image_set.train_domain, strict=True):
        assert x[0, 4, 4].item() == int(domain) * 60
        assert x[1, 4, 4].item() == int(y) * 200
    seen = set(colours(image_set.train_x)) | set(colours(image_set.test_x))
    assert len(seen) == 80
    again = load_dataset("pacs", tmp_path, size=8, check=False)
    assert torch.equal(again.test_x, image_set.test_x)
    federation = make_federation(image_set, "domain", 4, seed=0)
    assert [len(rows) for rows in federation.clients] == [16] * 4
    assert describe_dataset("pacs", tmp_path)["form"] == "class folders by domain"


def test_domainnet_follows_its_lists_and_takes_ten_classes(tmp_path):
    root = tmp_path / "DomainNet"
    for domain in DOMAINNET_DOMAINS:
        for split, numbers in (("train", range(3)), ("test", range(3, 5))):
            lines = []
            for name in ("zebra", "bird", "airplane"):
                for i in numbers:
                    paint(root / domain / name / f"{i}.jpg", (i * 40, 0, 0))
                    lines.append(f"{domain}/{name}/{i}.jpg {i}")
            (root / f"{domain}_{split}.txt").write_text("\n".join(lines))
    image_set = load_dataset("domainnet10", tmp_path, size=6)
    assert image_set.classes == DOMAINNET_CLASSES
    assert image_set.train_y.bincount(minlength=10).tolist() == [18, 0, 0, 0, 0, 0, 0, 0, 0, 18]
    assert len(image_set.test_y) == 24
    (root / "real_test.txt").write_text("../../bird/x.jpg 0")
    with pytest.raises(ConfigError, match=r"real_test.txt is damaged: '../../bird/x.jpg' points out of"):
        load_dataset("domainnet10", tmp_path, size=6)


def test_office_without_lists_holds_out_a_fifth_rounded_up(tmp_path):
    for domain in OFFICE_DOMAINS:
        for name in ("bike", "mug"):
            for i in range(4):
                paint(tmp_path / "office_caltech_10" / domain / name / f"{i}.jpg", (i, i, i))
    image_set = load_dataset("office_caltech10", tmp_path, size=5, check=False)
    assert image_set.test_domain is not None
    assert image_set.test_domain.bincount().tolist() == [2, 2, 2, 2]


def test_the_held_out_fifth_has_the_class_mix_of_its_domain():
    y = np.repeat([0, 1, 2], [50, 30, 20])
    test = held_out("x", y, np.zeros(100, dtype=np.int64))
    assert np.bincount(y[test]).tolist() == [10, 6, 4]


def test_tiny_imagenet_takes_validation_labels_from_its_list(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    for k, name in enumerate(("n01", "n02")):
        for i in range(3):
            paint(root / "train" / name / "images" / f"{name}_{i}.JPEG", (k * 255,) * 3, (64, 64))
    for i in range(2):
        paint(root / "val" / "images" / f"val_{i}.JPEG", (i * 255,) * 3, (64, 64))
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\t0\t9\t9\nval_1.JPEG\tn02\t0\t0\t9\t9\n")
    image_set = load_dataset("tiny_imagenet", tmp_path, check=False)
    assert image_set.train_x.shape == (6, 3, 64, 64)
    assert image_set.test_y.tolist() == [0, 1]
    assert [colour[0] for colour in colours(image_set.test_x)] == [0, 255]
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\t0\t0\t9\t9\n")
    with pytest.raises(ConfigError, match="class 'n99' has no folder in"):
        load_dataset("tiny_imagenet", tmp_path)


def test_imagenet_wants_the_same_folders_in_val(tmp_path):
    for split in ("train", "val"):
        for k, name in enumerate(("n01", "n02")):
            paint(tmp_path / "imagenet" / split / name / "a.JPEG", (k * 200,) * 3, (80, 60))
    image_set = load_dataset("imagenet1k", tmp_path, size=16, check=False)
    assert image_set.train_x.shape == (2, 3, 16, 16)
    assert [colour[0] for colour in colours(image_set.test_x)] == [0, 200]
    (tmp_path / "imagenet/val/n02").rename(tmp_path / "imagenet/val/n03")
    with pytest.raises(ConfigError, match=r"does not have the class folders of .*sort the validation images into one"):
        load_dataset("imagenet1k", tmp_path)


def test_cityscapes_maps_label_ids_and_has_a_domain_per_city(tmp_path):
    root = tmp_path / "cityscapes"
    for split, cities in (("train", ("aachen", "bochum")), ("val", ("munster",))):
        for city in cities:
            stem = f"{city}_000000_000019"
            paint(root / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png", (9, 8, 7), (32, 16))
            mask = np.full((16, 32), 7, dtype=np.uint8)  # road
            mask[0], mask[1], mask[2] = 0, 33, 11  # unlabelled, bicycle, building
            path = root / "gtFine" / split / city / f"{stem}_gtFine_labelIds.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(mask).save(path)
    image_set = load_dataset("cityscapes", tmp_path, check=False)
    assert image_set.task == "segmentation"
    assert image_set.train_x.shape == (2, 3, 16, 32)
    assert image_set.train_y[0, :4, 0].tolist() == [255, 18, 2, 0]
    assert image_set.domain_names == ("aachen", "bochum", "munster")
    federation = make_federation(image_set, "domain", 2, seed=0, min_size=1)
    assert [rows.tolist() for rows in federation.clients] == [[0], [1]]
    assert federation.ignore_index == 255
    assert list(federation.domains) == ["munster"]
    assert [rows.tolist() for rows in federation.own_test] == [[0], [0]]
    assert load_dataset("cityscapes", tmp_path, size=8, check=False).train_y.shape == (2, 8, 16)
    (root / "gtFine/val/munster/munster_000000_000019_gtFine_labelIds.png").unlink()
    with pytest.raises(ConfigError, match=r"its mask .* is missing"):
        load_dataset("cityscapes", tmp_path)


@pytest.mark.parametrize("mode", ["L", "P"])
def test_masks_that_are_resized_have_no_classes_in_between(tmp_path, mode):
    """Halves of 0 and 200: a mask has them alone, in a half each, where an image is mixed at the border."""
    halves = np.zeros((9, 9), dtype=np.uint8)
    halves[:, 5:] = 200
    Image.fromarray(halves).convert(mode).save(tmp_path / "mask.png")
    (mask,) = read_images([tmp_path / "mask.png"], (4, 4), "L")
    assert mask.tolist() == [[0, 0, 200, 200]] * 4
    Image.fromarray(halves).save(tmp_path / "image.png")
    (image,) = read_images([tmp_path / "image.png"], (4, 4))
    assert set(image.unique().tolist()) - {0, 200}


def test_packed_cifar10_has_two_parts_to_train_on_and_one_to_test(tmp_path):
    """Each part is WebP images in one long array, their offsets, and labels."""
    (tmp_path / "cifar10").mkdir()
    for name, codes in (("train_0", [1, 2]), ("train_1", [3]), ("test", [4, 5])):
        pieces = []
        for code in codes:
            piece = io.BytesIO()
            Image.new("RGB", (32, 32), (code * 20, 0, 200)).save(piece, "WEBP", lossless=True)
            pieces.append(piece.getvalue())
        offsets = np.cumsum([0, *map(len, pieces)])
        blob = np.frombuffer(b"".join(pieces), np.uint8)
        np.savez(tmp_path / "cifar10" / f"{name}.npz", blob=blob, off=offsets, y=np.array(codes, np.uint8))
    image_set = load_dataset("cifar10", tmp_path, check=False)
    assert (image_set.train_y.tolist(), image_set.test_y.tolist()) == ([1, 2, 3], [4, 5])
    assert colours(image_set.train_x) == [(20, 0, 200), (40, 0, 200), (60, 0, 200)]
    assert colours(image_set.test_x) == [(80, 0, 200), (100, 0, 200)]


def test_camvid_folders_have_a_domain_per_sequence(tmp_path):
    for split in ("train", "test"):
        for i, frame in enumerate(("0001TP_006690", "0006R0_f00930")):
            paint(tmp_path / "CamVid" / split / f"{frame}.png", (i, i, i), (20, 15))
            paint(tmp_path / "CamVid" / f"{split}annot" / f"{frame}.png", 11 - i, (20, 15), "L")
    image_set = load_dataset("camvid", tmp_path, check=False)
    assert image_set.domain_names == ("0001TP", "0006R0")
    assert image_set.train_y.dtype == torch.uint8
    assert image_set.train_y[:, 0, 0].tolist() == [11, 10]
    assert image_set.ignore_index == 11


def test_mnist_m_and_synth_digits_from_images(tmp_path):
    for split in ("train", "test"):
        names = [f"{i:08d}.png" for i in range(4)]
        for i, name in enumerate(names):
            paint(tmp_path / "mnist_m" / f"mnist_m_{split}" / name, (i, 2 * i, 3 * i), (32, 32))
        lines = [f"{name} {i + 3}" for i, name in enumerate(names)]
        (tmp_path / "mnist_m" / f"mnist_m_{split}_labels.txt").write_text("\n".join(lines))
        for digit in range(10):
            paint(tmp_path / "synth_digits" / split / str(digit) / "a.png", (digit,) * 3, (32, 32))
    mnist_m = load_dataset("mnist_m", tmp_path, check=False)
    assert mnist_m.train_x.shape == (4, 3, 28, 28)
    assert mnist_m.test_y.tolist() == [3, 4, 5, 6]
    assert colours(mnist_m.train_x)[3] == (3, 6, 9)
    synth = load_dataset("synth_digits", tmp_path, check=False)
    assert synth.train_y.tolist() == list(range(10))
    assert colours(synth.train_x)[9] == (9, 9, 9)
    (tmp_path / "mnist_m" / "mnist_m_test_labels.txt").write_text("a.png ten\n")
    with pytest.raises(ConfigError, match=r"_labels.txt is damaged: expected lines of a file name and a digit"):
        load_dataset("mnist_m", tmp_path)


def test_a_file_that_is_no_image_is_named(tmp_path):
    for domain in PACS_DOMAINS:
        paint(tmp_path / "PACS" / domain / "dog" / "a.png", (1, 2, 3))
    broken = tmp_path / "PACS" / "photo" / "dog" / "b.png"
    broken.write_bytes(b"no image")
    with pytest.raises(ConfigError, match=f"{broken} is damaged: it is not a readable image"):
        load_dataset("pacs", tmp_path)
