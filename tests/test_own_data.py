"""Users' own data from Python: every form it comes in means the same, and what cannot be used is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import fednorm
import noisy
import tiny
from fednorm.data.digest import data_digest
from fednorm.data.given import from_clients, from_pool
from fednorm.errors import ConfigError

X = torch.arange(24.0).reshape(4, 6)
Y = torch.tensor([0, 1, 2, 1])
IMAGES = torch.arange(4 * 3 * 5 * 6).reshape(4, 3, 5, 6).to(torch.uint8)


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        from_clients(*args, **options)
    return str(refused.value)


class Named:
    """Items with named columns, as data sets of other libraries have them."""

    column_names = ("image", "label")

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": Image.fromarray(IMAGES[index].movedim(0, 2).numpy()), "label": int(Y[index]), "id": index}


class Stream(IterableDataset[Any]):
    """Items that come one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return zip(X, Y, strict=True)


PAIRS = {
    "tensors": (X, Y),
    "arrays": (X.numpy(), Y.numpy()),
    "a list of two arrays": [X.numpy(), Y.numpy()],
    "lists": (X.tolist(), Y.tolist()),
    "named columns": {"x": X, "label": Y},
    "a Dataset": TensorDataset(X, Y),
    "a list of items": list(zip(X, Y.tolist(), strict=True)),
    "a list of dicts": [{"features": x.numpy(), "target": np.int64(y)} for x, y in zip(X, Y, strict=True)],
    "a subset": Subset(TensorDataset(X, Y), [0, 1, 2, 3]),
}


@pytest.mark.parametrize("form", PAIRS)
def test_every_form_of_the_same_data_is_the_same_federation(form: str) -> None:
    made = from_clients([PAIRS[form], (X, Y)], PAIRS[form])
    assert torch.equal(made.x, torch.cat([X, X]))
    assert torch.equal(made.test_y, Y)
    assert data_digest(made) == data_digest(from_clients([(X, Y), (X, Y)], (X, Y)))
    assert (made.num_classes, made.task, made.live) == (3, "classification", None)


@pytest.mark.parametrize(
    "images",
    [(IMAGES, Y), (IMAGES.movedim(1, 3).numpy(), Y.numpy()), Named()],
    ids=["tensors", "arrays with channels last", "pictures"],
)
def test_images_are_bytes_with_channels_first(images: Any) -> None:
    made = from_clients([images], images)
    assert torch.equal(made.x, IMAGES)
    assert made.in_channels == 3


def test_grey_pictures_have_one_channel() -> None:
    grey = IMAGES[:, 0]
    items = [(Image.fromarray(image.numpy()), int(y)) for image, y in zip(grey, Y, strict=True)]
    made = from_clients([items], (grey.numpy(), Y))
    assert torch.equal(made.x, grey[:, None])
    assert torch.equal(made.test_x, grey[:, None])


def test_clients_may_have_names() -> None:
    made = from_clients({"north": (X, Y), "south": (X, Y)}, {"south": (X + 1, Y), "north": (X, Y)})
    assert made.client_names == ("north", "south")
    assert made.test_x[made.own_test[1]].tolist() == (X + 1).tolist()
    assert refusal({"north": (X, Y), "south": (X, Y[:3])}, (X, Y)) == (
        "client 1 ('south') has 4 inputs and 3 labels; each input needs one label"
    )


def test_targets_follow_the_task() -> None:
    numbers = Y.float()
    assert from_clients([(X, numbers)], (X, numbers), task="regression").num_classes == 1
    assert from_clients([(X, Y)], (X, Y), task="regression").y.dtype == torch.float32
    many = torch.eye(4)[:, :2].long()
    made = from_clients([(X, many)], (X, many), task="multilabel")
    assert (made.y.dtype, made.num_classes) == (torch.float32, 2)
    masks = torch.zeros(4, 5, 6, dtype=torch.uint8)
    masks[0, 0, :2] = torch.tensor([2, 255])
    made = from_clients([(IMAGES, masks)], (IMAGES, masks), task="segmentation")
    assert (made.num_classes, made.ignore_index, made.y.dtype) == (3, 255, torch.uint8)


def test_the_last_clients_may_be_newcomers() -> None:
    assert from_clients([(X, Y)] * 3, (X, Y), unseen=1).training_clients == (0, 1)


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "float labels": (
        [(X, Y), (X, Y + 0.5)],
        (X, Y),
        {},
        "client 1: labels are float32 numbers, such as 0.5; give y.long() if they are class numbers, "
        "or task='regression' if they are measurements",
    ),
    "one-hot labels": (
        [(X, torch.eye(4))],
        (X, Y),
        {},
        "client 0: labels have shape (4, 4), but a class is one number; for one-hot labels give y.argmax(1), "
        "for several labels at once task='multilabel'",
    ),
    "a column of labels": (
        [(X, Y[:, None])],
        (X, Y),
        {},
        "client 0: labels have shape (4, 1), but a class is one number; give y[:, 0]",
    ),
    "masks": (
        [(IMAGES, IMAGES[:, 0])],
        (IMAGES, Y),
        {},
        "client 0: labels have shape (4, 5, 6), but a class is one number; for masks give task='segmentation'",
    ),
    "bytes and floats": (
        [(IMAGES, Y), (IMAGES / 255, Y)],
        (IMAGES, Y),
        {},
        "client 0 has uint8 numbers but client 1 float32; bring all to one type: bytes are scaled from 0-255 to 0-1, "
        "other numbers are taken as they are",
    ),
    "bytes and floats in tests": (
        [(IMAGES, Y)],
        (IMAGES / 255, Y),
        {},
        "client 0 has uint8 numbers but the test set float32; bring all to one type: bytes are scaled from 0-255 to "
        "0-1, other numbers are taken as they are",
    ),
    "shapes": (
        [(X, Y), (X[:, :5], Y)],
        (X, Y),
        {},
        "client 0 has examples of shape (6,) but client 1 (5,); bring all to one shape",
    ),
    "shapes of items": (
        [[(X[0], 0), (X[1], 1), (X[2, :5], 2)]],
        (X, Y),
        {},
        "client 0, item 2: the input has shape (5,), but (6,) at client 0; bring all to one shape",
    ),
    "labels beyond num_classes": (
        [(X, Y)],
        (X, Y),
        {"num_classes": 2},
        "client 0, example 2: label 2 is not one of the 2 classes; number the classes 0 to 1, or give num_classes=3",
    ),
    "a client without data": (
        [(X, Y), (X[:0], Y[:0])],
        (X, Y),
        {},
        "client 1 has no examples; leave it out or give it data",
    ),
    "a test set without data": (
        [(X, Y)],
        (X[:0], Y[:0]),
        {},
        "the test set has no examples; leave it out or give it data",
    ),
    "no clients": ([], (X, Y), {}, "no client data was given; pass a list with one data set per client"),
    "one set for all": (
        (X, Y),
        (X, Y),
        {},
        "clients are a list with one data set each; to deal one data set to clients use from_pool",
    ),
    "too few test sets": (
        [(X, Y), (X, Y)],
        [(X, Y)],
        {},
        "2 clients but 1 test sets; give one per client, or one for all",
    ),
    "too few names": ([(X, Y), (X, Y)], (X, Y), {"names": ["a"]}, "2 clients but 1 names; give one for each"),
    "text": (
        [[("a good film", 1)]],
        (X, Y),
        {},
        "client 0, item 0: the input is text ('a good film'); turn text into token numbers first, such as "
        "tokenizer(text)['input_ids']",
    ),
    "labels as text": (
        [[(X[0], "cat")]],
        (X, Y),
        {},
        "client 0, item 0: the label is text ('cat'); number the classes from 0, such as names.index(label)",
    ),
    "columns that are not clear": (
        [[{"image": X[0], "features": X[0], "label": 1}]],
        (X, Y),
        {},
        "client 0, item 0: which of the columns 'image', 'features', 'label' are input and target is not clear; "
        "give columns=(input, target), such as columns=('image', 'label')",
    ),
    "columns that are not there": (
        [[{"image": X[0], "label": 1}]],
        (X, Y),
        {"columns": ("img", "label")},
        "client 0, item 0: there is no column 'img', only 'image', 'label'; give columns=(input, target)",
    ),
    "items of three": (
        [[(X[0], 1, 2)]],
        (X, Y),
        {},
        "client 0, item 0: it is a tuple of 3; expected an (x, y) pair, or a dict with named columns",
    ),
    "a DataLoader": (
        [DataLoader(TensorDataset(X, Y))],
        (X, Y),
        {},
        "client 0 is a DataLoader, which makes batches of its own; give its dataset, loader.dataset",
    ),
    "inputs alone": ([X], (X, Y), {}, "client 0 is an array alone; give inputs and labels as a pair (x, y)"),
    "a stream": (
        [Stream()],
        (X, Y),
        {},
        "client 0 is Stream, whose items cannot be read by number; give a data set with __getitem__ and "
        "__len__, or list(...) of its items, or a pair (x, y) of arrays",
    ),
    "an item that cannot be read": (
        noisy.clients(noisy.Broken),
        (X, Y),
        {"read": "once"},
        "client 0, item 5: reading it failed with OSError: no such file: image_5.png",
    ),
    "a mode that is none": (
        [(X, Y)],
        (X, Y),
        {"read": "never"},
        "read 'never' is not known; known: anew, auto, once.",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_used_is_refused_by_name(what: str) -> None:
    train, test, options, text = REFUSED[what]
    if what == "an item that cannot be read":
        test = (train[0].x, train[0].y)
    assert refusal(train, test, **options) == text


# -- one data set, dealt to clients --


def test_one_data_set_is_dealt_by_a_partition() -> None:
    x, y = tiny.examples(60, 0.0, 1)
    made = from_pool((x, y), (x, y), partition="dir_client(alpha=0.1)", num_clients=4, seed=3)
    assert made.sizes.tolist() == [15, 15, 15, 15]
    assert sorted(torch.cat(list(made.clients)).tolist()) == list(range(60))
    again = from_pool(noisy.Plain(x, y), (x, y), partition="dir_client(alpha=0.1)", num_clients=4, seed=3)
    assert data_digest(made) == data_digest(again)


def test_numbers_cannot_be_dealt_by_class() -> None:
    x, y = X.repeat(4, 1), torch.rand(16)
    assert from_pool((x, y), (x, y), num_clients=2, task="regression").sizes.tolist() == [8, 8]
    with pytest.raises(ConfigError) as refused:
        from_pool((x, y), (x, y), partition="dir_client", num_clients=2, task="regression")
    assert str(refused.value) == "partition 'dir_client' needs one label per example; for masks use 'iid' or 'domain'"


# -- runs --


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    def run(train: Any, resume: bool) -> Any:
        return fednorm.run(
            model=tiny.conv_net(),
            clients=train,
            test=tiny.examples(6, 0.0, 9),
            out=tmp_path / "run",
            resume=resume,
            rounds=1,
            local_steps=1,
            dtype="float64",
            device="cpu",
        )

    train = [tiny.examples(8, 0.0, 1), tiny.examples(8, 1.0, 2)]
    before = run(train, False)
    assert run(train, True).runs == before.runs
    with pytest.raises(ConfigError) as refused:
        run([train[0], (train[1][0] + 1, train[1][1])], True)
    assert str(refused.value) == (
        f"'{tmp_path / 'run'}' was started with other data: training inputs differ; "
        "give the data it was started with, or another folder"
    )
