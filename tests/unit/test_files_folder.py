"""Images in folders: what is found, what becomes of it, and every refusal by its exact words."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from fednorm.data.from_files.deal import deal
from fednorm.data.from_files.file_set import OPEN, TEST, TRAIN, FileOptions, FileSet
from fednorm.data.from_files.problems import DataError
from fednorm.data.from_files.read import read
from fednorm.data.from_files.scaling import channel_scale
from fednorm.data.from_files.source import find_source
from fednorm.errors import ConfigError
from own_files import CLASSES, CLIENTS, image_folder, save_image

LAYOUT = "CLIENT/CLASS/image, or CLIENT/{train,test}/CLASS/image"


def folder(path: Path, size: int | None = None) -> FileSet:
    source = find_source(f"folder:{path}")
    assert source is not None
    return read(source, FileOptions(size=size))


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        folder(path)
    return str(refused.value)


def test_clients_and_classes_are_folders_in_the_order_of_their_names(tmp_path: Path) -> None:
    files = folder(image_folder(tmp_path))
    assert (files.client_names, files.classes, files.num_classes, files.form) == (CLIENTS, CLASSES, 2, "images")
    assert (files.x.shape, files.x.dtype) == ((36, 1, 16, 16), torch.uint8)
    assert files.y.tolist() == [0] * 6 + [1] * 6 + [0] * 6 + [1] * 6 + [0] * 6 + [1] * 6
    assert files.client is not None
    assert files.client.tolist() == [0] * 12 + [1] * 12 + [2] * 12
    assert set(files.split.tolist()) == {OPEN}
    assert files.x[:, 0, 0, 0].tolist() == [30 * c + 90 * k + i for c in range(3) for k in range(2) for i in range(6)]


def test_folders_called_train_and_test_say_what_is_for_tests(tmp_path: Path) -> None:
    files = folder(image_folder(tmp_path, split=True))
    assert [int((files.split == part).sum()) for part in (TRAIN, TEST, OPEN)] == [24, 12, 0]
    data = deal(files, partition="own", options={}, num_clients=3, seed=0)
    assert [len(rows) for rows in data.clients] == [8, 8, 8]
    assert [len(rows) for rows in data.own_test] == [4, 4, 4]
    assert data.client_names == CLIENTS
    own = data.test_x[data.own_test[1], 0, 0, 0]
    assert own.tolist() == [30 + 90 * k + i for k in range(2) for i in (0, 3)]


def test_a_client_may_lack_tests_or_a_class_and_may_leave_the_split_open(tmp_path: Path) -> None:
    image_folder(tmp_path, CLIENTS[:1], split=True)
    image_folder(tmp_path, ["flat"], each=10)
    save_image(tmp_path / "lone" / "train" / "owl" / "1.png", 3)
    save_image(tmp_path / "lone" / "train" / "owl" / "2.png", 4)
    data = deal(folder(tmp_path), partition="own", options={}, num_clients=3, seed=0)
    assert data.classes == ("cat", "dog", "owl")
    assert [(len(rows), len(own)) for rows, own in zip(data.clients, data.own_test, strict=True)] == [
        (8, 4),
        (16, 4),
        (2, 0),
    ]
    assert data.notes[0] == (
        "20 % of each client's examples, drawn by the seed with the mix of classes, are set aside for tests where "
        "nothing says what is for tests"
    )


def test_the_share_for_tests_follows_seed_and_classes(tmp_path: Path) -> None:
    files = folder(image_folder(tmp_path, each=10))
    one, other = (deal(files, partition="own", options={}, num_clients=3, seed=seed) for seed in (0, 1))
    for rows in one.own_test:
        assert one.test_y[rows].bincount().tolist() == [2, 2]
    again = deal(files, partition="own", options={}, num_clients=3, seed=0)
    assert torch.equal(one.test_x, again.test_x)
    assert not torch.equal(one.test_x, other.test_x)


def test_mean_and_deviation_are_those_of_the_training_images_of_training_clients(tmp_path: Path) -> None:
    files = folder(image_folder(tmp_path, split=True))
    data = deal(files, partition="own", options={}, num_clients=3, seed=0, unseen=1)
    used = data.x[torch.cat([data.clients[0], data.clients[1]])].double() / 255
    assert data.mean == pytest.approx((used.mean().item(),), abs=1e-12)
    assert data.std == pytest.approx((used.std(correction=0).item(),), abs=1e-12)
    assert data.unseen == {2}
    assert data.notes[-1] == (
        f"images 16x16 grey; mean and deviation {data.mean[0]:.3f} and {data.std[0]:.3f}, computed over the 16 "
        "training images of all clients that train"
    )


def test_a_channel_without_contrast_is_left_in_its_scale() -> None:
    assert channel_scale(torch.full((2, 1, 2, 2), 51, dtype=torch.uint8), torch.arange(2)) == ((0.2,), (1.0,))


def test_one_colour_image_makes_all_of_them_colour(tmp_path: Path) -> None:
    image_folder(tmp_path)
    save_image(tmp_path / "amber" / "cat" / "colour.png", 9, mode="RGB")
    assert folder(tmp_path).x.shape == (37, 3, 16, 16)


def test_transparent_and_palette_images_are_read_as_they_look(tmp_path: Path) -> None:
    for mode in ("RGBA", "P", "LA"):
        save_image(tmp_path / "a" / "cat" / f"{mode}.png", 7, mode=mode)
    x = folder(tmp_path).x
    assert x[:, :, 0, 0].tolist() == [[7, 7, 7]] * 3


def test_images_of_several_sizes_are_brought_to_the_one_that_is_asked_for(tmp_path: Path) -> None:
    image_folder(tmp_path)
    save_image(tmp_path / "birch" / "dog" / "large.png", 9, size=(24, 18))
    assert refusal(tmp_path) == (
        f"the images of 'folder:{tmp_path}' differ in size: 16x16 (36), 24x18 (1); give --image-size N to bring them "
        "to N x N"
    )
    assert folder(tmp_path, size=8).x.shape == (37, 1, 8, 8)


def test_hidden_files_and_other_files_are_left_out_and_the_latter_told(tmp_path: Path) -> None:
    image_folder(tmp_path)
    for hidden in (".DS_Store", "amber/.DS_Store", "amber/cat/.hidden.png", ".git/objects/a.png"):
        (tmp_path / hidden).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / hidden).write_text("no image")
    (tmp_path / "birch" / "dog" / "notes.txt").write_text("mine")
    files = folder(tmp_path)
    assert len(files.x) == 36
    assert files.notes == ("1 file that are no images ignored: notes.txt",)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ([], "'{0}' has no folders; expected " + LAYOUT + " below it"),
        (
            ["a/"],
            "client 'a' has no class folders in '{0}/a'; expected " + LAYOUT + " (images end in .bmp, "
            ".gif, .jpeg, .jpg and 6 more)",
        ),
        (
            ["a/cat/"],
            "client 'a' has class folders without images: cat in '{0}/a'; expected " + LAYOUT + " "
            "(images end in .bmp, .gif, .jpeg, .jpg and 6 more)",
        ),
        (
            ["a/1.png"],
            "'{0}/a' holds images itself, such as 1.png; expected " + LAYOUT + " below '{0}'",
        ),
        (
            ["a/cat/more/1.png"],
            "'{0}/a/cat' holds folders (more) where images were expected: " + LAYOUT + " below '{0}'",
        ),
        (
            ["a/train/cat/1.png", "a/test/"],
            "client 'a' has no class folders in '{0}/a/test'; expected " + LAYOUT + " (images end in "
            ".bmp, .gif, .jpeg, .jpg and 6 more)",
        ),
    ],
)
def test_a_folder_in_another_form_is_refused(made: list[str], problem: str, tmp_path: Path) -> None:
    for name in made:
        if name.endswith("/"):
            (tmp_path / name).mkdir(parents=True)
        else:
            save_image(tmp_path / name, 1)
    assert refusal(tmp_path).split(" (1 more problem")[0].split(" (2 more problems")[0] == problem.replace(
        "{0}", str(tmp_path)
    )


def test_no_folder_at_all(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == f"'{tmp_path}/none' does not exist; expected a folder with {LAYOUT}"
    (tmp_path / "file").write_text("x")
    assert refusal(tmp_path / "file") == f"'{tmp_path}/file' is a file; expected a folder with {LAYOUT}"


def test_broken_images_are_refused_by_path_all_of_them(tmp_path: Path) -> None:
    image_folder(tmp_path)
    (tmp_path / "amber" / "cat" / "bad.png").write_text("no image")
    cut = tmp_path / "birch" / "dog" / "0.png"
    cut.write_bytes(cut.read_bytes()[:48])
    shutil.copy(Path(__file__), tmp_path / "cedar" / "dog" / "code.jpg")
    with pytest.raises(DataError) as refused:
        folder(tmp_path)
    formats = "(none of JPEG, PNG, BMP, WEBP, PPM, GIF, TIFF)"
    assert refused.value.problems == (
        f"'{tmp_path}/amber/cat/bad.png' is not a readable image {formats}; remove it",
        f"'{tmp_path}/cedar/dog/code.jpg' is not a readable image {formats}; remove it",
    )
    assert str(refused.value).endswith(f"(1 more problem; `fednorm data check folder:{tmp_path}` lists all)")
    for bad in ("amber/cat/bad.png", "cedar/dog/code.jpg"):
        (tmp_path / bad).unlink()
    assert refusal(tmp_path).startswith(f"'{cut}' is not a readable image (")


def test_deep_images_are_not_cut(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "cat" / "1.png", 1, mode="I;16")
    assert refusal(tmp_path) == (
        f"'{tmp_path}/a/cat/1.png' has more than 8 bits a pixel (mode I;16), which would be cut; save it with 8, or "
        "use npz:FILE"
    )


def test_links_inside_are_followed_and_links_out_refused(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "data")
    (root / "amber" / "cat" / "again.png").symlink_to(root / "amber" / "cat" / "0.png")
    assert len(folder(root).x) == 37
    save_image(tmp_path / "elsewhere.png", 1)
    (root / "amber" / "cat" / "out.png").symlink_to(tmp_path / "elsewhere.png")
    assert refusal(root) == (
        f"'{root}/amber/cat/out.png' is a link to a place outside of '{root}'; put the files themselves"
    )


def test_clients_too_small_are_refused_by_name(tmp_path: Path) -> None:
    image_folder(tmp_path, split=True)
    save_image(tmp_path / "dill" / "test" / "cat" / "1.png", 1)
    save_image(tmp_path / "elm" / "train" / "cat" / "1.png", 1)
    with pytest.raises(DataError) as refused:
        deal(folder(tmp_path), partition="own", options={}, num_clients=5, seed=0)
    assert refused.value.problems == (
        "client 'dill' has no training examples (all are for tests); give it some, or leave it out",
        "client 'elm' has 1 training example, fewer than data.min_size=2; give it more, or leave it out",
    )


def test_a_limit_keeps_the_mix_of_clients_and_classes(tmp_path: Path) -> None:
    files = folder(image_folder(tmp_path, each=9, split=True))
    data = deal(files, partition="own", options={}, num_clients=3, seed=0, train_limit=18)
    for rows in data.clients:
        assert data.y[rows].bincount().tolist() == [3, 3]


def test_what_was_read_is_kept_until_a_file_changes(tmp_path: Path) -> None:
    image_folder(tmp_path)
    first = folder(tmp_path)
    assert folder(tmp_path) is first
    save_image(tmp_path / "amber" / "cat" / "0.png", 200)
    second = folder(tmp_path)
    assert second.x[0, 0, 0, 0] == 200
    assert second.digest != first.digest
