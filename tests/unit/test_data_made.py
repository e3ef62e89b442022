"""Sets that are made, and pictures that are drawn."""

import numpy as np
import pytest
import torch

from fednorm.data import load_dataset, made, make_federation, picture
from fednorm.data.given import from_clients
from fednorm.errors import ConfigError

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def small(monkeypatch):
    """Make a few images instead of thousands."""
    monkeypatch.setattr(made, "TRAIN", 130)
    monkeypatch.setattr(made, "TEST", 20)


def test_blending_is_the_distance_between_patch_and_digit():
    digits = np.zeros((5, 28, 28), dtype=np.uint8)
    digits[:, 10:18, 10:18] = 255
    photo = np.full((40, 50, 3), (10, 100, 250), dtype=np.uint8)
    out = made.blend(digits, [photo], np.random.default_rng(0))
    assert out[0, 0, 0].tolist() == [10, 100, 250]
    assert out[4, 12, 12].tolist() == [245, 155, 5]


def test_patches_differ_from_digit_to_digit():
    photo = np.random.default_rng(1).integers(256, size=(80, 90, 3), dtype=np.uint8)
    out = made.blend(np.zeros((2, 28, 28), dtype=np.uint8), [photo], np.random.default_rng(0))
    assert not np.array_equal(out[0], out[1])


def test_rendered_digits_load_as_the_packed_set_and_repeat(small, tmp_path):
    path = made.make_synth_digits(tmp_path, seed=5)
    image_set = load_dataset("synth_digits", tmp_path, check=False)
    assert image_set.train_x.shape == (130, 3, 32, 32)
    assert image_set.test_x.shape == (20, 3, 32, 32)
    assert image_set.train_y.unique().tolist() == list(range(10))
    first = path.read_bytes()
    made.make_synth_digits(tmp_path, seed=5)
    assert torch.equal(load_dataset("synth_digits", tmp_path, check=False).train_x, image_set.train_x)
    made.make_synth_digits(tmp_path, seed=6)
    assert path.read_bytes() != first
    assert [file.name for file in tmp_path.iterdir()] == ["synth_digits.npz"]


def test_every_rendered_digit_stands_out_from_its_background():
    draw = np.random.default_rng(0)
    for label in range(10):
        image = made.render_digit(label, [None], draw).astype(int)
        assert np.abs(image - image[0, 0]).sum(2).max() > 60


def test_symbol_fonts_are_left_out(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    folder = matplotlib.get_data_path() + "/fonts/ttf"
    names = {path.name for path in made.fonts_with_digits(made.Path(folder))}
    assert {"DejaVuSans.ttf", "DejaVuSerif-Bold.ttf", "cmr10.ttf"} <= names
    assert not {"DejaVuSansDisplay.ttf", "cmsy10.ttf", "cmex10.ttf"} & names
    with pytest.raises(ConfigError, match=r"has no .ttf or .otf font with ten digits"):
        made.make_synth_digits(tmp_path, tmp_path)


def test_mnist_m_is_made_of_the_rows_that_mnist_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(made, "MNIST_ROWS", {"train": range(20, 30), "test": range(5, 10)})
    from test_data_readers import write_mnist

    arrays = write_mnist(tmp_path / "MNIST/raw")
    monkeypatch.setattr(made, "load_dataset", lambda name, folder: load_dataset(name, folder, check=False))
    photos = tmp_path / "photos"
    photos.mkdir()
    with pytest.raises(ConfigError, match="photos has no photographs of at least 28x28 pixels"):
        made.make_mnist_m(tmp_path, photos)
    Image.new("RGB", (60, 40), (0, 0, 0)).save(photos / "black.png")
    made.make_mnist_m(tmp_path, photos)
    image_set = load_dataset("mnist_m", tmp_path, check=False)
    assert np.array_equal(image_set.train_x[:, 1].numpy(), arrays["train"][0][20:30])
    assert image_set.test_y.tolist() == [5, 6, 7, 8, 9]


def test_label_picture_is_a_png_of_every_client(tmp_path):
    pytest.importorskip("matplotlib")
    fashion = load_dataset("fashion_mnist_small")
    federation = make_federation(fashion, "shards", 5, seed=0, unseen=1)
    assert picture.label_counts(federation).sum(1).tolist() == [2000] * 5
    path = picture.label_picture(federation, tmp_path / "new" / "labels.png")
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    shades = {tuple(int(value) for value in colour) for colour in np.unique(pixels, axis=0)}
    assert {(0x1F, 0x4E, 0x79), (0x9D, 0xB8, 0xD2)} <= shades  # clients that train, and the pale one that does not
    many = make_federation(fashion, "iid", 60, seed=0)
    with Image.open(picture.label_picture(many, tmp_path / "many.png")) as image:
        assert image.width > image.height


def test_domain_picture_counts_by_domain(tmp_path):
    pytest.importorskip("matplotlib")
    x, y = torch.zeros(6, 1, 2, 2), torch.zeros(6, dtype=torch.int64)
    federation = from_clients([(x, y), (x, y)], (x, y))
    counts = picture.domain_counts(federation, np.array([0] * 6 + [1] * 5 + [0]), 2)
    assert counts.tolist() == [[6, 0], [1, 5]]
    assert picture.domain_picture(counts, ("a", "b"), federation, tmp_path / "d.png").stat().st_size > 1000
