"""How far a client may move the model, by values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fednorm.core.state import Entry, Kind
from fednorm.halves.norm_bound import Length, Moved, distances, length_of, may_be_off, too_far
from fednorm.halves.stacks import Stacks

WEIGHT = Entry("w", Kind.WEIGHT, "", "weight", True, (2,), torch.float32)
MEAN = replace(WEIGHT, key="m", kind=Kind.STATISTIC, part="running_mean", trainable=False)
ENTRIES = {"w": WEIGHT, "m": MEAN, "n": replace(MEAN, key="n", kind=Kind.COUNTER, dtype=torch.int64, shape=())}
SERVER = {"w": torch.tensor([3.0, 4.0]), "m": torch.zeros(2), "n": torch.tensor(0)}


def tree(weight: list[float], mean: list[float]) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(weight), "m": torch.tensor(mean), "n": torch.tensor(5)}


def test_distances_are_norms_of_updates_by_group() -> None:
    stacks = Stacks([tree([3.0, 4.0], [0.0, 2.0]), tree([6.0, 8.0], [3.0, 4.0])])
    assert length_of(SERVER, ENTRIES) == Length(5.0, 0.0)
    assert distances(stacks, SERVER, ENTRIES) == [
        Moved(Length(0.0, 2.0), ("w", "m")),
        Moved(Length(5.0, 5.0), ("w", "m")),
    ]


@pytest.mark.parametrize(
    ("lengths", "refused"),
    [
        ([1.0, 1.0, 10.0], []),
        ([1.0, 1.0, 10.1], [2]),
        ([1.0, 10.1], [1]),
        ([10.1], []),
        ([0.0, 0.0, 0.4], []),  # the median counts as 1/250 of the model's norm, which is 10
        ([0.0, 0.0, 0.41], [2]),
        ([1.0, 1.0, float("inf")], [2]),
        ([1.0, 2.0, 3.0, 10.0, 20.1], []),
    ],
)
def test_the_bound_is_a_factor_on_the_median(lengths: list[float], refused: list[int]) -> None:
    moved = {client: Moved(Length(length, 0.0)) for client, length in enumerate(lengths)}
    assert list(too_far(moved, Length(10.0, 0.0), 10.0)) == refused
    assert too_far(moved, Length(10.0, 0.0), 0.0) == too_far(moved, Length(10.0, 0.0), None) == {}


def test_what_is_not_trained_has_the_factor_squared() -> None:
    moved = {client: Moved(Length(0.0, length)) for client, length in enumerate((1.0, 1.0, 101.0))}
    assert too_far(moved, Length(1.0, 1.0), 10.0) == {
        2: "what it sends beside weights moved 101 times as far as the median client; norm_factor=10 allows less"
    }
    assert too_far(moved, Length(1.0, 1.0), 11.0) == {}


def test_nobody_is_measured_by_clients_that_do_not_move_a_model_of_zeros() -> None:
    moved = {client: Moved(Length(length, 0.0)) for client, length in enumerate((0.0, 0.0, 5.0))}
    assert too_far(moved, Length(0.0, 0.0), 10.0) == {}


@pytest.mark.parametrize(("weight", "looks"), [([14.0, 0.0], False), ([15.1, 0.0], True), ([0.0, 2e9], True)])
def test_a_second_look_is_taken_only_where_norms_are_large(weight: list[float], looks: bool) -> None:
    """With the factor 1000, who is too far moved by 4 times the model's norm 5, and sends 3 times 5 at least."""
    entries = {"w": WEIGHT}
    assert may_be_off(Stacks([tree(weight, [0.0, 0.0])]), entries, Length(5.0, 0.0), 1000.0) is looks
    assert may_be_off(Stacks([tree([3.0, 4.0], [0.0, 0.0])]), entries, Length(5.0, 0.0), 100.0), "too tight to tell"
