"""20 devices below two leaves in NVFlare's simulator: own state over reuse, and the bits of our own engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

import torch
from edge_desk import small
from simulated import LIMIT

from fednorm.core.state import Tree, digest
from fednorm.halves.wire_files import load_mine
from fednorm.nvflare.edge.processor import device_name
from fednorm.nvflare.keeping import site_file
from fednorm.running.folder import RunFolder
from fednorm.running.plan import make_plan
from fednorm.running.results import Result
from fednorm.running.run import Run
from fednorm.running.store import Store
from fednorm.running.tensor_files import load_tree

pytestmark = pytest.mark.nvflare

HERE = Path(__file__).parent
VERSIONS, LEAVES, EACH = 3, 2, 10
DEVICES = LEAVES * EACH
FIELDS = {"method": "fedbn", "rounds": VERSIONS, "data.clients": DEVICES, "data.train_limit": 40 * DEVICES}
PLAY = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from edge_desk import small
from simulated import LIMIT
from edge_probe import ProbingProcessor
from fednorm.nvflare import EdgeRecipe

if __name__ == "__main__":
    recipe = EdgeRecipe(
        config=small(**{FIELDS!r}), leaves={LEAVES}, devices_per_leaf={EACH}, run_id="run", state_dir=sys.argv[1],
        processor=ProbingProcessor, hello_timeout={LIMIT / 2},
    )
    recipe.execute(recipe.simulator(workspace_root=sys.argv[2]))
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `state`, the simulator's workspace `ws`, what devices wrote in `probe`, and `log`."""
    folder = tmp_path_factory.mktemp("edge")
    (folder / "probe").mkdir()
    (folder / "play.py").write_text(PLAY)
    command = [sys.executable, str(folder / "play.py"), str(folder / "state"), str(folder / "ws")]
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    known = {"HOME": str(folder), "PROBE": str(folder / "probe"), "PYTHONPATH": os.pathsep.join(paths)}
    with (folder / "log").open("wb") as log:
        done = subprocess.run(
            command, env={**os.environ, **known}, cwd=folder, stdout=log, stderr=log, timeout=LIMIT, check=False
        )
    assert done.returncode == 0, (folder / "log").read_text()[-4000:]
    return folder


@pytest.fixture(scope="module")
def ours() -> tuple[Tree, Mapping[int, Any]]:
    """The same run in our sequential engine: the server's tree, and what every client keeps."""
    torch.set_num_threads(1)
    run = Run(make_plan(small(**FIELDS, **{"engine.name": "sequential"})), Store())
    list(run.rounds())
    return run.server.tree, run.store.get_many(range(DEVICES))


def kept(played: Path, number: int) -> Any:
    return load_mine(site_file(played / "state", "run", device_name(number)))


def lines(played: Path) -> dict[str, list[dict[str, Any]]]:
    return {p.name: [json.loads(line) for line in p.read_text().splitlines()] for p in (played / "probe").iterdir()}


def test_every_device_keeps_its_own_batch_norm_from_selection_to_selection(played: Path) -> None:
    for device, asked in lines(played).items():
        assert [each["counted"] for each in asked] == [[], [2, 2], [4, 4], [6, 6], [6, 6]], device
    assert len({digest(kept(played, number).accepted.tree) for number in range(DEVICES)}) == DEVICES


def test_the_bits_are_those_of_our_own_engine(played: Path, ours: tuple[Tree, Mapping[int, Any]]) -> None:
    tree, states = ours
    got = load_tree(played / "ws" / "fednorm-edge" / "server" / "simulate_job" / "fednorm" / "model.safetensors")
    assert digest(got) == digest({key: tree[key] for key in sorted(tree)})
    for number in range(DEVICES):
        assert digest(kept(played, number).accepted.tree) == digest(states[number].tree), number


def test_no_local_entry_left_a_device_and_the_global_schema_is_whole(played: Path) -> None:
    got = load_tree(played / "ws" / "fednorm-edge" / "server" / "simulate_job" / "fednorm" / "model.safetensors")
    local = set(kept(played, 0).accepted.tree)
    assert len(got) == 16
    assert len(local) == 10
    assert local < set(got)
    told = lines(played)
    assert sorted(told) == sorted(f"site-{leaf}#{n}" for leaf in (1, 2) for n in range(EACH))
    for device, asked in told.items():
        assert [each["ask"] for each in asked] == ["hello", *["answer"] * (VERSIONS + 1)], device
        assert [each["round"] for each in asked] == [0, 1, 2, 3, 3]
        assert [each["kind"] for each in asked] == ["hello", "update", "update", "update", "scores"]
        for each in asked:
            assert not local & set(each["down"])
            sent = {key.removeprefix("shared/") for key in each["up"] if each["kind"] == "update"}
            assert sent == (set(got) - local if each["kind"] == "update" else set())
    assert len({each["process"] for asked in told.values() for each in asked}) == LEAVES


def test_the_server_leaves_records_that_tables_and_pictures_read(played: Path) -> None:
    folder = played / "ws" / "fednorm-edge" / "server" / "simulate_job" / "fednorm"
    result = Result.load(folder)
    (run,) = result.runs
    assert (run["method"], run["rounds_done"], run["metric"]) == ("fedbn", VERSIONS, "accuracy")
    assert run["client_names"] == [device_name(number) for number in range(DEVICES)]
    rows = [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]
    assert [row["clients"] for row in rows] == [DEVICES] * VERSIONS
    assert sorted(map(int, rows[-1]["eval"]["own_client"]["per_client"])) == list(range(DEVICES))
    text = (played / "log").read_text()
    assert "run 'run' starts clean; its state is kept in " in text
    assert text.count("round 3: 16 entries, 6 shared, 10 local; 115752 bytes up, 115752 bytes down") == DEVICES
