"""The store: what goes in comes out, a round is lasting as a whole or not at all, and damage is noticed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednorm.errors import CheckpointError
from fednorm.state import Tree, digest
from fednorm.store import ClientState, Store, encode, load_tree

SHAPES = st.lists(st.integers(0, 3), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16])


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    def tensor() -> torch.Tensor:
        seed = draw(st.integers(0, 99))
        values = torch.randn(draw(SHAPES), generator=torch.Generator().manual_seed(seed)) * 10
        return values.to(draw(DTYPES))

    return {
        key: tensor()
        for key in draw(st.lists(st.text(min_size=1, max_size=6), unique=True, max_size=4))
        if key != "__metadata__"
    }


def saved(path: Path) -> Path:
    store = Store(path)
    store.put(3, ClientState(7, {"a": torch.arange(4.0)}))
    store.put(5, ClientState(9, {"a": torch.ones(4)}))
    store.commit(1, {"model": {"w": torch.ones(8)}, "memory": {}}, {"switch": {"count": 2}}, [{"round": 1, "x": 0.5}])
    store.close()
    return path


@given(trees(), trees(), st.integers(0, 10**9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_what_goes_in_comes_out(tmp_path: Path, server: Tree, mine: Tree, steps: int) -> None:
    path = tmp_path / "state.sqlite"
    store = Store(path)
    store.put(4, ClientState(steps, mine))
    store.commit(2, {"model": server}, {"switch": {"k": [1, 2.5, None]}}, [{"round": 1}, {"round": 2, "loss": 0.1}])
    store.close()
    again = Store(path)
    assert digest(again.tree("model")) == digest(server)
    assert digest(again.get(4).tree) == digest(mine)
    assert again.get(4).steps == steps
    assert again.seen() == [4]
    assert again.facts() == {"switch": {"k": [1, 2.5, None]}, "round": 2, "version": 1}
    assert list(again.rows()) == [{"round": 1}, {"round": 2, "loss": 0.1}]
    again.close()


def test_a_client_never_seen_has_nothing() -> None:
    store = Store()
    assert store.get(8) == ClientState()
    assert store.seen() == []
    assert store.facts() == {}


def test_only_a_commit_is_lasting(tmp_path: Path) -> None:
    path = saved(tmp_path / "s")
    store = Store(path)
    store.put(3, ClientState(8, {"a": torch.zeros(4)}))
    store.put(6, ClientState(1, {}))
    store.close()
    again = Store(path)
    assert again.get(3).steps == 7
    assert again.seen() == [3, 5]
    again.close()


def test_a_failed_commit_changes_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "s")
    store = Store(path)
    store.put(3, ClientState(8, {"a": torch.zeros(4)}))
    with pytest.raises(TypeError):
        store.commit(2, {"model": {"w": torch.zeros(8)}}, {"switch": object()}, [])  # no JSON value
    assert store.facts()["round"] == 1
    assert store.tree("model")["w"].tolist() == [1.0] * 8
    store.close()
    again = Store(path)
    assert again.get(3).steps == 7
    again.close()


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_every_flipped_bit_of_a_blob_is_noticed(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "s"
    saved(path)
    table, where = data.draw(st.sampled_from([("clients", "id=3"), ("server", "name='model'")]))
    db = sqlite3.connect(path)
    blob = bytearray(db.execute(f"SELECT blob FROM {table} WHERE {where}").fetchone()[0])  # noqa: S608
    bit = data.draw(st.integers(0, len(blob) * 8 - 1))
    blob[bit // 8] ^= 1 << bit % 8
    with db:
        db.execute(f"UPDATE {table} SET blob=? WHERE {where}", (bytes(blob),))  # noqa: S608
    db.close()
    store = Store(path)
    with pytest.raises(CheckpointError, match="is damaged"):
        store.get(3) if table == "clients" else store.tree("model")
    store.close()


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
def test_a_damaged_file_is_refused_or_read_right(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "s"
    for old in tmp_path.iterdir():
        old.unlink()
    raw = bytearray(saved(path).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(raw))
    store = None
    try:
        store = Store(path)
        store.facts()
        assert store.tree("model")["w"].tolist() == [1.0] * 8
        for client in store.seen():
            assert client not in (3, 5) or len(store.get(client).tree["a"]) == 4
        list(store.rows())
    except CheckpointError:
        pass
    finally:
        if store:
            store.close()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE clients SET steps=8 WHERE id=3",
        "UPDATE clients SET digest='00' WHERE id=3",
        "UPDATE clients SET blob=(SELECT blob FROM clients WHERE id=5) WHERE id=3",
        "UPDATE clients SET id=CASE id WHEN 3 THEN -3 ELSE id END; UPDATE clients SET id=3 WHERE id=5",
    ],
)
def test_an_exchanged_row_is_noticed(tmp_path: Path, change: str) -> None:
    path = saved(tmp_path / "s")
    db = sqlite3.connect(path)
    db.executescript(change)
    db.close()
    store = Store(path)
    with pytest.raises(CheckpointError) as refusal:
        store.get(3)
    assert str(refusal.value).endswith("is damaged (its digest differs); start the run anew")
    store.close()


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "s")
    db = sqlite3.connect(path)
    with db:
        db.execute("UPDATE facts SET value='99' WHERE name='version'")
    db.close()
    store = Store(path)
    with pytest.raises(CheckpointError) as refusal:
        store.facts()
    assert str(refusal.value) == f"{path} has state version 99, this fednorm reads 1; use the fednorm that wrote it"
    store.close()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary, " * 100)
    with pytest.raises(CheckpointError) as refusal:
        Store(path)
    assert str(refusal.value) == f"{path} is not usable as the state of a run: file is not a database"
    assert path.read_text().startswith("dear diary")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "s")
    path.write_bytes(path.read_bytes()[:5000])

    def read_all() -> None:
        store = Store(path)
        try:
            store.facts(), store.tree("model"), store.get(3), list(store.rows())
        finally:
            store.close()

    with pytest.raises(CheckpointError):
        read_all()


def test_a_missing_tree_is_named(tmp_path: Path) -> None:
    store = Store(saved(tmp_path / "s"))
    with pytest.raises(CheckpointError) as refusal:
        store.tree("optimizer")
    assert str(refusal.value) == f"{store.path} holds no 'optimizer'; it is not the state of a run"
    store.close()


def test_a_safetensors_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(encode({"w": torch.arange(6.0).view(2, 3).t()}))
    assert torch.equal(load_tree(path)["w"], torch.arange(6.0).view(2, 3).t())


def test_other_files_are_not(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refusal:
        load_tree(tmp_path / "absent")
    assert str(refusal.value) == f"'{tmp_path / 'absent'}' does not exist; give a .safetensors file"
    pickled = tmp_path / "model.pt"
    torch.save({"w": torch.ones(2)}, pickled)
    with pytest.raises(CheckpointError, match=r"is not a safetensors file .*; pickle files are never read"):
        load_tree(pickled)
