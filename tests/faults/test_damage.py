"""Damage to the files of a run: it is refused in one line, or the run goes on as if there had been none."""

from __future__ import annotations

import importlib.util
import json
import lzma
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fednorm
from command import TINY
from command import fednorm as command
from fednorm.core.state import digest, model_state
from fednorm.errors import CheckpointError
from fednorm.halves.mine import ClientState
from fednorm.running.sealed import sealed
from fednorm.running.store import Store
from fednorm.running.tensor_files import load_tree

ROOT = Path(__file__).parents[2]
VERSION_2 = Path(__file__).parent / "version_2"


def tool(name: str) -> ModuleType:
    """A tool of the project, which is no part of a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and a comparison of two methods, played to their ends."""
    place = tmp_path_factory.mktemp("made")
    assert command("run", *TINY, "--method", "fedbn", "--out", place / "run", "--quiet").code == 0
    assert command("compare", "fedavg", "fedbn", *TINY, "--out", place / "both", "--quiet").code == 0
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy of them, to be damaged."""
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def refused(folder: Path) -> str:
    """What `fednorm resume` says of a folder that it refuses."""
    done = command("resume", folder, "--quiet")
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    return done.err.removeprefix("error: ").removesuffix("\n")


def edit(path: Path, **changes: Any) -> dict[str, Any]:
    """Change a JSON file as an editor would."""
    stored = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(stored))
    return stored


# -- the store --


@pytest.mark.fault(row=16)
@pytest.mark.slow
def test_no_flipped_bit_changes_what_is_read(tmp_path: Path) -> None:
    counts = tool("flip_bits").flip_all(tmp_path, cases=400, seed=7)
    assert {name: (found["silent"], found["untyped"]) for name, found in counts.items()} == dict.fromkeys(
        counts, (0, 0)
    )
    assert sum(found.total() for found in counts.values()) == 400
    assert counts["state.sqlite"]["refused"] > 200


@contextmanager
def database(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as db, db:
        yield db


def small_store(path: Path, clients: int = 3) -> Path:
    with closing(Store(path)) as store:
        for client in range(clients):
            store.put(client, ClientState(client, {"a": torch.full((4,), float(client))}))
        trees = {"model": {"w": torch.ones(3)}, "memory": {}}
        store.commit(1, trees, {"config": {}, "switch": {"k": 1}}, [{"round": 1}], best=True)
    return path


@pytest.mark.fault(row=16)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("DELETE FROM facts WHERE name='switch'", "the stored state has lost fact switch; start the run anew"),
        ("DELETE FROM server WHERE name='memory'", "the stored state has lost tree memory; start the run anew"),
        (
            "DELETE FROM clients WHERE id=1",
            "the stored state of clients is damaged: 2 of 3 rows are there, and their digests do not add up; start the "
            "run anew",
        ),
        (
            "DELETE FROM best_clients WHERE id=2",
            "the stored state of best clients is damaged: 2 of 3 rows are there, and their digests do not add up; "
            "start the run anew",
        ),
        (
            "DELETE FROM rounds",
            "the stored state of rounds is damaged: 0 of 1 rows are there, and their digests do not add up; start the "
            "run anew",
        ),
        ("DELETE FROM seal", "the stored state of the seal is damaged (its digest differs); start the run anew"),
        ("DROP INDEX best_ids", "PATH is damaged (its tables are not those of a run); start the run anew"),
        (
            "PRAGMA user_version=2",
            "PATH has state version 2, this fednorm reads 3 and 2; use the fednorm that wrote it",
        ),
        (
            "UPDATE server SET blob=CAST(blob AS TEXT) WHERE name='memory'",
            "the stored state of memory is damaged (its digest differs); start the run anew",
        ),
    ],
)
def test_what_is_lost_or_of_another_kind_is_named(tmp_path: Path, change: str, said: str) -> None:
    path = small_store(tmp_path / "s")
    with database(path) as db:
        db.execute(change)
    with pytest.raises(CheckpointError) as refusal, closing(Store(path)) as store:
        store.tree("memory")
    assert str(refusal.value) == said.replace("PATH", str(path))


@pytest.mark.fault(row=15)
def test_a_store_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = small_store(tmp_path / "s").read_bytes()
    path = tmp_path / "cut"
    for length in sorted({*range(120), *range(0, len(whole), 1511), *range(0, len(whole), 4096), len(whole) - 1}):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError), closing(Store(path, begun=True)):
            pass


@pytest.mark.fault(row=15)
def test_a_journal_cut_anywhere_leaves_one_commit_or_the_other(tmp_path: Path) -> None:
    """The journal holds what the file does not have yet; where it ends too soon, the commit before is there."""
    path = small_store(tmp_path / "s")
    store = Store(path)
    store.put(1, ClientState(9, {"a": torch.zeros(4)}))
    store.commit(2, {}, {"switch": {"k": 2}}, [{"round": 2}])
    whole, journal = path.read_bytes(), path.with_name("s-wal").read_bytes()
    store.close()
    found = set()
    copy = tmp_path / "copy"
    for length in sorted({*range(0, len(journal), 2003), len(journal)}):
        copy.write_bytes(whole)
        copy.with_name("copy-wal").write_bytes(journal[:length])
        with closing(Store(copy, begun=True)) as store:
            round, steps, rows = store.facts()["round"], store.get(1).steps, len(list(store.rows()))
        assert (round, steps, rows) in {(1, 1, 1), (2, 9, 2)}
        found.add(round)
    assert found == {1, 2}


@pytest.mark.fault(row=15)
@pytest.mark.parametrize("how", ["emptied", "gone", "of nothing"])
def test_a_state_that_was_there_does_not_begin_anew(place: Path, how: str) -> None:
    path = place / "run" / "state.sqlite"
    path.unlink()
    if how == "emptied":
        path.touch()
    if how == "of nothing":
        Store(path).close()
    assert refused(place / "run") == (
        f"{path} is empty, but metrics.jsonl beside it says that the run had begun; put the file back, or start a new "
        "run in another folder"
    )


# -- config.json, result.json, cells of a comparison --


@pytest.mark.fault(row=22)
def test_an_edited_comparison_is_refused_with_what_differs(place: Path) -> None:
    config = json.loads((place / "both" / "config.json").read_text())
    edit(place / "both" / "config.json", train={**config["train"], "lr": 0.5})
    path = place / "both" / "config.json"
    said = f"'{path}' is damaged or was edited (its digest differs); put it back, or start a new run"
    assert refused(place / "both") == said
    path.write_text(json.dumps(sealed(json.loads(path.read_text()))))
    cell = place / "both" / "fedavg-seed0"
    assert refused(place / "both") == f"'{cell}' was started with another config: train.lr was 0.05, is 0.5"


@pytest.mark.fault(row=22)
def test_cells_of_two_learning_rates_are_not_mixed(place: Path) -> None:
    """Also where somebody edits the comparison and its cells alike, and computes their digests anew."""
    for path in (place / "both").rglob("config.json"):
        stored = json.loads(path.read_text())
        path.write_text(json.dumps(sealed({**stored, "train": {**stored["train"], "lr": 0.5}})))
    result = place / "both" / "fedavg-seed0" / "result.json"
    config = result.with_name("config.json")
    assert refused(place / "both") == (
        f"'{result}' is of another config than '{config}'; delete it and resume, and it is written anew"
    )
    for each in (place / "both").rglob("result.json"):
        each.unlink()
    said = "the run was started with another config: train.lr was 0.05, is 0.5; put it back, or start a new run"
    assert refused(place / "both") == said


@pytest.mark.fault(row=16)
def test_a_forged_result_of_a_cell_is_refused(place: Path) -> None:
    path = place / "both" / "fedbn-seed0" / "result.json"
    stored = json.loads(path.read_text())
    stored["runs"][0]["final"]["pooled"]["accuracy"] = 99.9
    path.write_text(json.dumps(stored))
    edited = f"'{path}' is damaged or was edited (its digest differs); delete it and resume, and it is written anew"
    assert refused(place / "both") == edited
    with pytest.raises(CheckpointError) as refusal:
        fednorm.Result.load(path.parent)
    assert str(refusal.value) == edited
    path.write_text(json.dumps(sealed(stored)))
    state = path.with_name("state.sqlite")
    assert refused(place / "both") == (
        f"'{path}' was not made from '{state}'; delete it and resume, and it is written anew"
    )


@pytest.mark.fault(row=16)
def test_a_swapped_cell_is_refused(place: Path) -> None:
    one, other = place / "both" / "fedavg-seed0", place / "both" / "fedbn-seed0"
    shutil.copy(one / "result.json", other / "result.json")
    assert refused(place / "both") == (
        f"'{other / 'result.json'}' is of another config than '{other / 'config.json'}'; "
        "delete it and resume, and it is written anew"
    )
    (other / "result.json").unlink()
    shutil.copy(one / "state.sqlite", other / "state.sqlite")
    assert refused(place / "both") == (
        "the run was started with another config: method was fedavg, is fedbn; put it back, or start a new run"
    )
    with pytest.raises(
        fednorm.ConfigError, match=r"^the run was started with another config: method was fedavg, is fe"
    ):
        fednorm.export(other)


def test_a_deleted_result_is_computed_anew(place: Path) -> None:
    path = place / "both" / "fedbn-seed0" / "result.json"
    before = json.loads(path.read_text())
    path.unlink()
    assert command("resume", place / "both", "--quiet").code == 0
    again = json.loads(path.read_text())
    assert again["made_from"]["config"] == before["made_from"]["config"]
    assert again["runs"][0]["final"] == before["runs"][0]["final"]


# -- models --


@pytest.mark.fault(row=16)
def test_a_damaged_model_is_no_start(place: Path) -> None:
    path = place / "run" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 4
    path.write_bytes(bytes(data))
    said = f"'{path}' is damaged (its digest differs); export it again, or give another file"
    with pytest.raises(CheckpointError) as refusal:
        load_tree(path)
    assert str(refusal.value) == said
    done = command("run", *TINY, "--init", path, "--out", place / "new")
    assert (done.code, done.err, (place / "new").exists()) == (2, f"error: {said}\n", False)


# -- versions --


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A run that fednorm 0.1.0 stopped after two of four rounds, with state of version 2 and nothing sealed."""
    folder = tmp_path / "older"
    shutil.copytree(VERSION_2, folder)
    packed = folder / "state.sqlite.xz"
    (folder / "state.sqlite").write_bytes(lzma.decompress(packed.read_bytes()))
    packed.unlink()
    return folder


@pytest.mark.fault(row=23)
def test_a_run_of_the_version_before_is_brought_up_and_goes_on(
    older: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (older / "metrics.jsonl").read_text()
    assert fednorm.Result.load(older).runs[0]["rounds_done"] == 2
    note = f"note: '{older / 'result.json'}' is of an older fednorm and has no digest; resume writes it anew\n"
    assert capsys.readouterr().err == note
    again = fednorm.resume(older)
    assert (older / "metrics.jsonl").read_text().startswith(before)
    with database(older / "state.sqlite") as db:
        assert db.execute("PRAGMA user_version").fetchone() == (3,)
    stored = json.loads((older / "config.json").read_text())
    settings = {"rounds": 4, "model": stored["model"], "local_steps": 1, "keep": "best", "data.clients": 3}
    settings |= {"data.train_limit": 60, "data.val_fraction": 0.2, "engine.threads": 1, "engine.device": "cpu"}
    whole = fednorm.run(method="fedbn", **settings, **{"engine.name": "sequential"})
    one, other = (model_state(each.model()) for each in (again, whole))
    for key, value in other.items():  # the first rounds were played on another machine
        torch.testing.assert_close(one[key], value, rtol=1e-3, atol=1e-5)
    for each in (again.model(which="best"), again.model(client=1)):
        assert digest(model_state(each))


@pytest.mark.fault(row=23)
def test_damage_is_noticed_before_a_state_is_sealed(older: Path) -> None:
    with database(older / "state.sqlite") as db:
        db.execute("UPDATE facts SET value='[]' WHERE name='switch'")
    assert refused(older) == "the stored state of fact switch is damaged (its digest differs); start the run anew"


@pytest.mark.fault(row=23)
def test_a_newer_state_is_refused(place: Path) -> None:
    path = place / "run" / "state.sqlite"
    with database(path) as db:
        db.execute("PRAGMA user_version=4")
    said = f"{path} has state version 4, this fednorm reads 3 and 2; use the fednorm that wrote it"
    assert refused(place / "run") == said
