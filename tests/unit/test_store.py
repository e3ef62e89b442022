"""The store: what goes in comes out, a round is lasting as a whole or not at all, and damage is noticed."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednorm.core.state import Tree, digest, tree_bytes
from fednorm.errors import CheckpointError, ConfigError
from fednorm.running.store import ClientState, Store, encode
from fednorm.running.tensor_files import load_tree

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
    assert again.facts() == {"switch": {"k": [1, 2.5, None]}, "round": 2}
    assert list(again.rows()) == [{"version": 1, "round": 1}, {"version": 1, "round": 2, "loss": 0.1}]
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


PLACES = {
    "record": ("clients", "id=3"),
    "blob": ("server", "name='model'"),
    "value": ("facts", "name='switch'"),
    "row": ("rounds", "round=1"),
    "layout": ("layouts", "number=0"),
}


def read_all(path: Path) -> None:
    store = Store(path)
    try:
        store.facts(), store.tree("model"), store.get(3), store.get(5), list(store.rows())
    finally:
        store.close()


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_every_flipped_bit_is_noticed(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "s"
    path.unlink(missing_ok=True)
    saved(path)
    column = data.draw(st.sampled_from(sorted(PLACES)))
    table, where = PLACES[column]
    db = sqlite3.connect(path)
    db.text_factory = bytes
    content = bytearray(db.execute(f"SELECT {column} FROM {table} WHERE {where}").fetchone()[0])  # noqa: S608
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    content[bit // 8] ^= 1 << bit % 8
    is_text = column in ("value", "row", "layout")
    with db:
        new = "CAST(? AS TEXT)" if is_text else "?"
        db.execute(f"UPDATE {table} SET {column}={new} WHERE {where}", (bytes(content),))  # noqa: S608
    db.close()
    with pytest.raises(CheckpointError, match=r"is damaged|Could not decode to UTF-8"):
        read_all(path)


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
        "UPDATE clients SET layout=1 WHERE id=3",
        "UPDATE clients SET digest=x'0011223344556677' WHERE id=3",
        "UPDATE clients SET record=(SELECT record FROM clients WHERE id=5) WHERE id=3",
        "UPDATE clients SET id=CASE id WHEN 3 THEN -3 ELSE id END; UPDATE clients SET id=3 WHERE id=5",
        "UPDATE facts SET value='3' WHERE name='round'",
        "UPDATE facts SET name='other' WHERE name='switch'",
        "UPDATE rounds SET round=2 WHERE round=1",
        "UPDATE layouts SET number=1 WHERE number=0",
    ],
)
def test_an_exchanged_row_is_noticed(tmp_path: Path, change: str) -> None:
    path = saved(tmp_path / "s")
    db = sqlite3.connect(path)
    db.executescript(change)
    db.close()
    with pytest.raises(CheckpointError) as refusal:
        read_all(path)
    assert re.search(r"is damaged|has lost layout 0", str(refusal.value))


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "s")
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(CheckpointError) as refusal:
        Store(path)
    assert (
        str(refusal.value) == f"{path} has state version 99, this fednorm reads 3 and 2; use the fednorm that wrote it"
    )


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
    with pytest.raises(CheckpointError):
        read_all(path)


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


def state(number: int, size: int = 256) -> ClientState:
    return ClientState(number, {"a": torch.full((size,), float(number)), "n": torch.tensor(number)})


def filled(store: Store, clients: range, size: int = 256) -> Store:
    for client in clients:
        store.put(client, state(client, size))
    store.commit(1, {}, {}, [])
    return store


@pytest.mark.parametrize("cache_bytes", [0, 5000, 1 << 20])
def test_the_cache_changes_nothing_and_keeps_its_bound(tmp_path: Path, cache_bytes: int) -> None:
    store = filled(Store(tmp_path / "s", cache_bytes=cache_bytes), range(40))
    order = [*range(40), *range(0, 40, 3), 7, 7]
    for client in order:
        assert store.get(client).steps == client
        assert digest(store.get(client).tree) == digest(state(client).tree)
        assert sum(tree_bytes(held.tree) for held in store._cached.values()) <= cache_bytes
    store.put(3, state(99))
    assert store.get(3).steps == 99
    store.commit(2, {}, {}, [])
    assert store.get(3).steps == 99
    store.close()


def test_changed_clients_are_held_until_the_commit_whatever_the_cache() -> None:
    store = Store(cache_bytes=0)
    for client in range(30):
        store.put(client, state(client))
    assert [store.get(client).steps for client in range(30)] == list(range(30))
    store.commit(1, {}, {}, [])
    assert [store.get(client).steps for client in range(30)] == list(range(30))


def test_many_are_read_at_once(tmp_path: Path) -> None:
    store = filled(Store(tmp_path / "s", cache_bytes=4000), range(0, 2400, 2), size=2)
    store.put(2, state(77, 2))
    found = store.get_many([1201, 2, 1200, 4])
    assert {client: each.steps for client, each in found.items()} == {1201: 0, 2: 77, 1200: 1200, 4: 4}
    assert list(found) == [1201, 2, 1200, 4]
    everyone = store.get_many(range(2400))
    assert sum(bool(each.tree) for each in everyone.values()) == 1200
    store.close()


def test_the_cache_does_not_keep_a_stack_alive() -> None:
    stack = torch.zeros(1000, 8)
    store = Store()
    store.put(0, ClientState(1, {"a": stack[3]}))
    store.commit(1, {}, {}, [])
    assert store.get(0).tree["a"].untyped_storage().nbytes() == 8 * 4


def test_stacks_hold_the_states_in_order_whether_stored_or_changed(tmp_path: Path) -> None:
    store = filled(Store(tmp_path / "s"), range(1100), size=2)
    store.put(5, state(50, 2))
    store.put(6, ClientState(1, {"other": torch.ones(1)}))
    store.put(2000, state(2000, 2))
    clients = store.holding(["a", "n"])
    assert clients == [c for c in range(1100) if c != 6] + [2000]
    stacks = list(store.stacks(clients))
    assert torch.cat([stack["n"] for stack in stacks]).tolist() == [50 if c == 5 else c for c in clients]
    assert torch.cat([stack["a"] for stack in stacks])[:, 1].tolist() == [50.0 if c == 5 else c for c in clients]
    assert store.holding(["other"]) == [6]
    assert store.holding(["absent"]) == []
    store.close()


@given(st.lists(trees(), max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_states_of_any_layout_are_stacked(tmp_path: Path, several: list[Tree]) -> None:
    store = Store()
    for client, tree in enumerate(several):
        store.put(client, ClientState(client, tree))
    store.commit(1, {}, {}, [])
    stacks = [{k: v[i] for k, v in s.items()} for s in store.stacks(range(len(several))) for i in range(_rows(s))]
    assert [digest(tree) for tree in stacks] == [digest(tree) for tree in several if tree]
    store.close()


def _rows(stack: Tree) -> int:
    return len(next(iter(stack.values()))) if stack else 0


@pytest.mark.parametrize("size", [250, 560, 1050, 2060])
def test_the_file_is_little_larger_than_the_states(tmp_path: Path, size: int) -> None:
    path = tmp_path / "s"
    store = Store(path)
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(0)).tolist()
    for number, start in enumerate(range(0, 3000, 100)):
        for client in order[start : start + 100] + order[: start // 10]:
            store.put(client * 300, state(client, size))
        store.commit(number, {}, {}, [])
    store.close()
    empty_tables = 10 * 4096
    assert path.stat().st_size - empty_tables < 1.15 * 3000 * (size * 4 + 16)
    assert not path.with_name("s-wal").exists()


def test_a_reader_at_work_does_not_disturb_the_first_clients(tmp_path: Path) -> None:
    path = tmp_path / "s"
    store = Store(path)
    store.commit(0, {"model": {"w": torch.ones(8)}}, {}, [{"round": n} for n in range(3)])
    rows = store.rows()
    next(rows)
    filled(store, range(3))
    rows.close()
    store.close()
    assert Store(path).seen() == [0, 1, 2]


def test_tensors_that_share_memory_are_stored(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    tree = {"a": base, "b": base, "c": base[1:3], "d": base.view(2, 3).t(), "e": base[:1].expand(4)}
    store = Store(tmp_path / "s")
    store.put(1, ClientState(1, tree))
    store.commit(1, {"model": tree}, {}, [])
    store.close()
    again = Store(tmp_path / "s")
    assert digest(again.tree("model")) == digest(again.get(1).tree) == digest(tree)
    again.close()


def test_a_type_that_cannot_be_stored_is_named() -> None:
    store = Store()
    store.put(1, ClientState(1, {"a": torch.zeros(2, dtype=torch.complex128)}))
    with pytest.raises(
        ConfigError, match=r"^'a' has type torch.complex128, which cannot be stored; use one of float64,"
    ):
        store.commit(1, {}, {}, [])


def test_a_file_that_lost_its_layouts_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "s")
    db = sqlite3.connect(path)
    with db:
        db.execute("DELETE FROM layouts")
    db.close()
    with pytest.raises(CheckpointError) as refusal:
        read_all(path)
    assert str(refusal.value) == "the stored state has lost layout 0; start the run anew"


def test_trees_that_are_gone_leave_the_file_and_its_seal(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    with closing(Store(path)) as store:
        store.commit(1, {"model": {"w": torch.ones(2)}, "base 0": {"w": torch.zeros(2)}}, {}, [])
        store.commit(2, {"base 1": {"w": torch.ones(2)}}, {}, [], gone=["base 0"])
    with closing(Store(path, begun=True)) as store:  # which looks at all that the seal names
        assert store.tree_names() == ["base 1", "model"]
        assert torch.equal(store.tree("model")["w"], torch.ones(2))
        with pytest.raises(CheckpointError, match="holds no 'base 0'"):
            store.tree("base 0")
