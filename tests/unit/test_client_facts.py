"""What clients hold and how far they are from each other, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fednorm.cli.data_text import facts_text
from fednorm.data.client_facts import feature_shift, federation_facts, label_counts, label_shift
from fednorm.data.federation import Federation


def two_clients(x: Tensor, y: Tensor, **fields: object) -> Federation:
    """The first two rows are one client's, the last two the other's; each is tested on one of its rows."""
    rows = (torch.tensor([0, 1]), torch.tensor([2, 3]))
    own = (torch.tensor([0]), torch.tensor([1]))
    tests = {"test_x": x[:2], "test_y": y[:2], "own_test": own}
    made = Federation(name="own", x=x, y=y, clients=rows, **tests, num_classes=3, client_names=("a", "b"))
    return replace(made, **fields)  # pyright: ignore[reportArgumentType]


def shift_of_labels(data: Federation) -> list[float]:
    return label_shift(data, label_counts(data.y, data.clients, data)).tolist()


def test_label_shift_is_the_share_of_labels_that_would_have_to_change() -> None:
    data = two_clients(torch.zeros(4, 1), torch.tensor([0, 0, 0, 1]))
    # all: 3/4, 1/4; a: 1, 0; b: 1/2, 1/2
    assert shift_of_labels(data) == [0.25, 0.25]
    facts = federation_facts(data)
    assert facts["classes_without_training"] == [2]
    assert [entry["missing_classes"] for entry in facts["clients"]] == [[1, 2], [2]]


def test_feature_shift_is_the_distance_of_means_in_deviations() -> None:
    # first column: means 1 and 5 around 3, deviation of 0, 2, 4, 6 is sqrt(5); second never changes
    data = two_clients(torch.tensor([[0.0, 7], [2, 7], [4, 7], [6, 7]]), torch.tensor([0, 1, 0, 1]))
    assert feature_shift(data) == pytest.approx([(4 / 5 / 2) ** 0.5] * 2)


def test_images_are_told_apart_by_channel() -> None:
    x = torch.zeros(4, 2, 1, 2, dtype=torch.uint8)
    x[2:, 0] = 10
    # first channel: means 0 and 10 around 5 with deviation 5; second never changes
    assert feature_shift(two_clients(x, torch.tensor([0, 1, 0, 1]))) == pytest.approx([0.5**0.5] * 2)


def test_clients_that_never_train_do_not_move_the_centre() -> None:
    data = two_clients(torch.tensor([[0.0], [2], [4], [6]]), torch.tensor([0, 1, 2, 2]), unseen=frozenset({1}))
    assert feature_shift(data) == pytest.approx([0, 4])
    assert shift_of_labels(data) == [0, 1]


def test_numbers_are_compared_by_their_means() -> None:
    data = two_clients(torch.zeros(4, 1), torch.tensor([0.0, 2, 4, 6]), task="regression", num_classes=1)
    assert shift_of_labels(data) == pytest.approx([2 / 5**0.5] * 2)
    first = federation_facts(data)["clients"][0]
    assert (first["target_min"], first["target_max"]) == (0, 2)


def test_tokens_are_compared_by_how_often_they_occur() -> None:
    data = two_clients(torch.tensor([[5, 5], [5, 5], [9, 9], [9, 5]]), torch.tensor([0, 1, 0, 1]))
    # all: 5/8, 3/8; a: 1, 0; b: 1/4, 3/4
    assert feature_shift(data) == pytest.approx([3 / 8, 3 / 8])


def test_many_labels_count_each_by_itself() -> None:
    data = two_clients(torch.zeros(4, 1), torch.tensor([[1.0, 0], [1, 1], [0, 1], [0, 0]]), task="multilabel")
    counts = label_counts(data.y, data.clients, data)
    assert counts is not None
    assert counts.tolist() == [[2, 1], [0, 1]]


def test_the_table_has_a_column_a_class_while_that_fits() -> None:
    facts = federation_facts(two_clients(torch.zeros(4, 1), torch.tensor([0, 0, 0, 1]), classes=("cat", "dog", "eel")))
    assert facts_text({**facts, "model": "mlp_bn"}) == [
        "own",
        "2 clients, 4 training and 2 test examples",
        "inputs: float32 1, 0 to 0; task: classification; model: mlp_bn",
        "",
        "client  train  test  cat  dog  eel  label shift  feature shift",
        "a           2     1    2    -    -         0.25           0.00",
        "b           2     1    1    1    -         0.25           0.00",
        "",
        "label shift: share of a client's labels that differ from the mix of all (of",
        "  numbers: distance of the means)",
        "feature shift: distance of a client's mean inputs from all clients' mean, in",
        "  standard deviations",
        "nobody trains on: eel",
        "client a has no training example of dog, eel",
        "client b has no training example of eel",
    ]
    many = {**facts, "classes": [f"long class name {k}" for k in range(9)], "model": "mlp_bn"}
    many["clients"] = [{**entry, "labels": [1] * 9, "missing_classes": []} for entry in facts["clients"]]
    assert "a           2     1   9 of 9         0.25           0.00" in facts_text(many)
