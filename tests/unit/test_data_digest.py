"""A digest of data changes with every part of them, and with nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tiny
from fednorm.data import digest
from fednorm.data.client_rows import ClientRows
from fednorm.data.digest import data_digest, data_digests, rows_digest, tensor_digest


def test_equal_data_have_equal_digests() -> None:
    assert data_digests(tiny.federation()) == data_digests(tiny.federation())
    assert data_digest(tiny.federation()) == data_digest(tiny.federation())


@pytest.mark.parametrize(
    ("field", "part"),
    [
        ("x", "training inputs"),
        ("y", "training labels"),
        ("test_x", "test inputs"),
        ("test_y", "test labels"),
    ],
)
def test_one_number_changes_the_digest_of_its_part(field: str, part: str) -> None:
    data = tiny.federation()
    changed = getattr(data, field).clone()
    changed.view(-1)[-1] += 1
    before, after = data_digests(data), data_digests(replace(data, **{field: changed}))
    assert [name for name in before if before[name] != after[name]] == [part]
    assert data_digest(data) != data_digest(replace(data, **{field: changed}))


def test_another_division_changes_the_digest_of_the_clients() -> None:
    data = tiny.federation()
    before, after = data_digests(data), data_digests(replace(data, clients=data.clients[::-1]))
    assert [name for name in before if before[name] != after[name]] == ["clients"]


def test_type_and_shape_are_part_of_it() -> None:
    zeros = torch.zeros(4)
    assert len({tensor_digest(each) for each in (zeros, zeros.view(2, 2), zeros.int(), zeros[:3])}) == 4


def test_compact_rows_have_a_digest() -> None:
    starts = torch.tensor([0, 2])
    assert rows_digest(ClientRows(starts, starts + 2)) != rows_digest(ClientRows(starts, starts + 1))


def test_of_a_large_tensor_any_single_change_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "WHOLE_BYTES", 64)
    monkeypatch.setattr(digest, "BLOCK", 8)
    tensor = torch.arange(1003, dtype=torch.uint8)
    before = tensor_digest(tensor)
    for place in range(len(tensor)):
        changed = tensor.clone()
        changed[place] += 1
        assert tensor_digest(changed) != before
