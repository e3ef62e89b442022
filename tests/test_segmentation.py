"""Segmentation is a task like classification: the same engines, methods and protocols, another loss and score."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fednorm.data.federation import Federation
from fednorm.running.config import RunConfig, updated
from fednorm.running.plan import Plan, make_plan
from fednorm.running.run import Run
from fednorm.running.store import Store
from fednorm.scoring.tasks import Segmentation

IGNORED = 255


def scenes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Bright squares on dark ground: class 1 where it is bright, 0 elsewhere, and a border without label."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 60, (count, 3, 12, 12), generator=draw, dtype=torch.uint8)
    y = torch.zeros(count, 12, 12, dtype=torch.uint8)
    for image in range(count):
        top, left = torch.randint(1, 7, (2,), generator=draw).tolist()
        x[image, :, top : top + 4, left : left + 4] += 150
        y[image, top : top + 4, left : left + 4] = 1
    y[:, 0] = IGNORED
    return x, y


def federation() -> Federation:
    x, y = scenes(24, 0)
    test_x, test_y = scenes(8, 1)
    rows = torch.arange(24)
    return Federation(
        name="squares",
        x=x,
        y=y,
        clients=(rows[:12], rows[12:]),
        test_x=test_x,
        test_y=test_y,
        own_test=(torch.arange(4), torch.arange(4, 8)),
        num_classes=2,
        task="segmentation",
        ignore_index=IGNORED,
    )


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))


def plan(method: str = "fedavg", **changes: object) -> Plan:
    base = {"method": method, "rounds": 6, "train.local_steps": 6, "train.batch_size": 6, "train.lr": 0.1}
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return make_plan(updated(RunConfig(), {**base, **named}), model=network(), federation=federation())


def final(made: Plan) -> dict:
    return list(Run(made, Store()).rounds())[-1]["eval"]


@pytest.mark.parametrize("method", ["fedavg", "fixbn(at=4)", "fedbn", "gn"])
def test_every_kind_of_method_learns_to_segment(method: str) -> None:
    scores = final(plan(method))
    assert scores["own_client"]["miou"] > 90
    assert set(scores["pooled"]) >= {"miou", "pixel_accuracy", "loss", "per_class"}


def test_images_and_masks_are_augmented_alike_and_padding_is_ignored() -> None:
    made = plan(train__augment="crop(3)+flip")
    x, y, _ = made.batches.batch(0, 0)
    assert y.shape == (6, 12, 12)
    bright = x.mean(1) > 0.4
    labelled = y != IGNORED
    assert torch.equal(bright & labelled, (y == 1))  # where the square went, its label went too
    assert (y == IGNORED).float().mean() > 1 / 12  # rows shifted in from outside carry no label


def test_engines_agree_on_segmentation() -> None:
    left, right = (Run(plan(engine__name=name, rounds=2, train__dtype="float64"), Store()) for name in ENGINES)
    rows = [list(run.rounds()) for run in (left, right)]
    assert rows[0][-1]["eval"]["pooled"]["miou"] == pytest.approx(rows[1][-1]["eval"]["pooled"]["miou"])
    assert all(torch.allclose(left.server.tree[key], right.server.tree[key], atol=1e-10) for key in left.server.tree)


ENGINES = ("sequential", "stacked")


def test_mean_iou_and_pixel_accuracy_by_hand() -> None:
    task = Segmentation(num_classes=3, ignore_index=IGNORED)
    truth = torch.tensor([[[0, 0, 1, IGNORED]]], dtype=torch.uint8)
    guess = nn.functional.one_hot(torch.tensor([[[0, 1, 1, 2]]]), 3).permute(0, 3, 1, 2).float()
    summary = task.summary(task.score(guess, truth))
    assert summary["per_class"] == [50.0, 50.0, None]  # class 2 occurs neither in truth nor, where labelled, in guess
    assert summary["miou"] == 50.0
    assert summary["pixel_accuracy"] == pytest.approx(200 / 3)


def test_the_loss_skips_what_has_no_label() -> None:
    task = Segmentation(num_classes=2, ignore_index=IGNORED)
    output = torch.zeros(1, 2, 1, 3)
    output[0, 0, 0, 2] = 100.0  # a confident answer where nobody asked
    y = torch.tensor([[[0, 1, IGNORED]]], dtype=torch.uint8)
    assert task.loss(output, y).item() == pytest.approx(math.log(2))


def test_domains_are_scored_in_the_mean_of_ious() -> None:
    data = replace(federation(), domains={"north": torch.arange(4), "south": torch.arange(4, 8)})
    made = make_plan(updated(RunConfig(), {"rounds": 1, "train.local_steps": 1}), model=network(), federation=data)
    scores = final(made)["domains"]
    assert scores["miou"] == pytest.approx(sum(scores["per_domain"].values()) / 2)
