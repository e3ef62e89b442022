"""Data that a run could only misunderstand are refused, with the client that is concerned; the texts are exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from fednorm.data.checks import check, problems, unlike
from fednorm.data.client_rows import ClientRows
from fednorm.data.federation import Federation
from fednorm.errors import ConfigError

NAN = float("nan")


def federation(**changes: Any) -> Federation:
    """Two clients of two examples with three columns each, and a test set of two for both."""
    rows = torch.arange(2)
    return Federation(
        **{
            "name": "own",
            "x": torch.zeros(4, 3),
            "y": torch.tensor([0, 1, 0, 1]),
            "clients": (rows, rows + 2),
            "test_x": torch.zeros(2, 3),
            "test_y": torch.tensor([0, 1]),
            "own_test": (rows, rows),
            "num_classes": 2,
            **changes,
        }
    )


def with_value(tensor: Tensor, place: tuple[int, ...], value: float) -> Tensor:
    changed = tensor.clone()
    changed[place] = value
    return changed


MASKS = {
    "task": "segmentation",
    "ignore_index": 255,
    "x": torch.zeros(4, 1, 2, 2),
    "y": torch.zeros(4, 2, 2, dtype=torch.uint8),
    "test_x": torch.zeros(2, 1, 2, 2),
    "test_y": torch.zeros(2, 2, 2, dtype=torch.uint8),
}
MANY = {"task": "multilabel", "y": torch.ones(4, 2), "test_y": torch.ones(2, 2)}
REGRESSION = {"task": "regression", "num_classes": 1, "y": torch.ones(4), "test_y": torch.ones(2)}

REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"clients": (torch.arange(4), torch.arange(0))},
        "client 1 has no examples; leave it out or give it data",
    ),
    (
        {"clients": (torch.arange(4), torch.arange(0)), "client_names": ("north", "south")},
        "client 1 ('south') has no examples; leave it out or give it data",
    ),
    (
        {"test_x": torch.zeros(0, 3), "test_y": torch.arange(0), "own_test": (torch.arange(0),) * 2},
        "the test set has no examples; give some",
    ),
    (
        {"y": torch.tensor([0, 1, 0])},
        "the training data have 4 inputs and 3 labels; each input needs one label",
    ),
    (
        {"clients": (torch.arange(2), torch.arange(3, 6))},
        "rows of clients go from 0 to 5, but there are 4; give rows 0 to 3",
    ),
    (
        {"test_x": torch.zeros(2, 3, dtype=torch.uint8)},
        "the training inputs have float32 numbers but the test inputs uint8; bring all to one type: "
        "bytes are scaled from 0-255 to 0-1, other numbers are taken as they are",
    ),
    (
        {"test_x": torch.zeros(2, 4)},
        "the training inputs have examples of shape (3,) but the test inputs have (4,); bring all to one shape",
    ),
    (
        {"x": with_value(torch.zeros(4, 3), (3, 1), NAN)},
        "client 1, example 1: the input is nan in column 1; replace or leave out what is missing",
    ),
    (
        {"x": torch.full((4, 3), float("inf"))},
        "client 0, example 0 (and 1 more): the input is inf in column 0; replace or leave out what is missing",
    ),
    (
        {"test_x": with_value(torch.zeros(2, 3), (1, 2), NAN)},
        "the test set, example 1: the input is nan in column 2; replace or leave out what is missing",
    ),
    (
        {"test_x": with_value(torch.zeros(2, 3), (1, 2), NAN), "own_test": (torch.tensor([0]), torch.tensor([1]))},
        "the test set of client 1, example 0: the input is nan in column 2; replace or leave out what is missing",
    ),
    (
        {"y": torch.tensor([0, 1, 0, 5])},
        "client 1, example 1: label 5 is not one of the 2 classes; number the classes 0 to 1, or give num_classes=6",
    ),
    (
        {"y": torch.tensor([0, -1, 0, 1])},
        "client 0, example 1: label -1 is negative; number the classes from 0, and leave out examples without a label",
    ),
    (
        {"y": torch.tensor([0.5, 1, 0, 1]), "test_y": torch.tensor([0.0, 1])},
        "client 0: labels are float32 numbers, such as 0.5; give y.long() if they are class numbers, "
        "or task='regression' if they are measurements",
    ),
    (
        {"y": torch.eye(4).long()[:, :2], "test_y": torch.eye(2).long()},
        "client 0: labels have shape (4, 2), but a class is one number; for one-hot labels give y.argmax(1), "
        "for several labels at once task='multilabel'",
    ),
    (
        {**MASKS, "y": with_value(MASKS["y"], (2, 0, 1), 7)},
        "client 1, example 0: the mask has 7, which is not one of the 2 classes and not the ignored 255; "
        "number the classes 0 to 1",
    ),
    (
        {**MASKS, "y": torch.cat([MASKS["y"][:2], torch.full((2, 2, 2), 255, dtype=torch.uint8)])},
        "client 1 has no pixel that counts: all are 255, which is ignored; leave it out",
    ),
    (
        {**MASKS, "y": torch.zeros(4, 3, 3).long(), "test_y": torch.zeros(2, 3, 3).long()},
        "client 0: masks are int64 of shape (3, 3); give a class number for each pixel, whole numbers of shape (2, 2)",
    ),
    (
        {**MANY, "y": with_value(torch.ones(4, 2), (1, 1), 0.5)},
        "client 0, example 1: label 0.5 in column 1 is neither 0 nor 1; give 1 where a class is present",
    ),
    (
        {**MANY, "num_classes": 3},
        "client 0: labels have shape (4, 2); several labels at once are 0 or 1 for each of 3 classes, of shape (4, 3)",
    ),
    (
        {**REGRESSION, "y": torch.tensor([1.0, 2.0, NAN, 1.0])},
        "client 1, example 0: the target is nan; replace or leave out what is missing",
    ),
    (
        {**REGRESSION, "y": torch.ones(4).long(), "test_y": torch.ones(2).long()},
        "client 0: targets of a regression are int64 numbers; give y.float()",
    ),
    (
        {"task": "my-own", "y": torch.tensor([1.0, 2.0, NAN, 1.0]), "test_y": torch.ones(2)},
        "client 1, example 0: the target is nan; replace or leave out what is missing",
    ),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[text[:60] for _, text in REFUSED])
def test_what_a_run_could_only_misunderstand_is_refused(changes: dict[str, Any], text: str) -> None:
    assert problems(federation(**changes))[0] == text
    with pytest.raises(ConfigError) as refusal:
        check(federation(**changes))
    assert str(refusal.value) == text


@pytest.mark.parametrize("changes", [{}, MASKS, MANY, REGRESSION, {"unseen": frozenset({1})}])
def test_good_data_have_no_problems(changes: dict[str, Any]) -> None:
    assert problems(federation(**changes)) == []


def test_every_problem_has_a_line() -> None:
    data = federation(x=torch.full((4, 3), NAN), test_y=torch.tensor([0, 2]))
    assert [line.split(":")[0] for line in problems(data)] == [
        "client 0, example 0 (and 1 more)",
        "client 1, example 0 (and 1 more)",
        "the test set, example 1",
    ]


def test_a_problem_of_many_clients_is_told_of_the_first() -> None:
    rows = tuple(torch.tensor([row]) for row in range(30))
    data = federation(x=torch.full((30, 3), NAN), y=torch.zeros(30).long(), clients=rows, own_test=rows[:2] * 15)
    lines = problems(data)
    assert len(lines) == 11
    assert lines[-1] == "more than 10 clients have this problem; those above are the first"


def test_a_row_that_no_client_has_harms_nobody() -> None:
    assert (
        problems(federation(x=torch.full((4, 3), NAN), clients=(torch.arange(0),) * 2, unseen=frozenset({0, 1}))) == []
    )


def test_a_newcomer_may_have_no_data_of_its_own() -> None:
    assert problems(federation(clients=(torch.arange(4), torch.arange(0)), unseen=frozenset({1}))) == []


def test_large_finite_numbers_are_no_problem() -> None:
    assert problems(federation(x=torch.full((4, 3), 3e38))) == []


def test_a_plan_is_not_made_of_such_data() -> None:
    data = tiny.federation()
    with pytest.raises(ConfigError) as refusal:
        tiny.plan(data=replace(data, x=with_value(data.x, (9, 0, 2, 3), NAN)))
    text = "client 1, example 1: the input is nan at (0, 2, 3); replace or leave out what is missing"
    assert str(refusal.value) == text


def test_a_million_clients_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    many = 1_000_000
    starts = torch.arange(many)
    data = federation(
        x=torch.zeros(many, 3),
        y=torch.zeros(many).long(),
        clients=ClientRows(starts, starts + 1),
        own_test=ClientRows(starts % 2, starts % 2 + 1),
    )
    looked: list[int] = []
    monkeypatch.setattr(ClientRows, "__getitem__", lambda rows, client: looked.append(client))
    assert problems(data) == []
    assert looked == []


def test_measurements_and_whole_numbers_are_not_one_kind() -> None:
    whole, half, double = (torch.zeros(2, 3, dtype=dtype) for dtype in (torch.int64, torch.float16, torch.float64))
    assert unlike("client 0", half, "client 1", double) is None
    assert unlike("client 0", half, "client 1", whole) == (
        "client 0 has float16 numbers but client 1 int64; bring all to one type: bytes are scaled from 0-255 to 0-1, "
        "other numbers are taken as they are"
    )
