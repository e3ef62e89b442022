"""All messages of a run are recorded at the server's side of the wire: no local entry is there, by name or by bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
from simulated import LIMIT, Net

from fednorm.halves.wire_files import load

pytestmark = pytest.mark.nvflare

HERE = Path(__file__).parent
ROUNDS = 3
NORM = {f"layers.1.{part}" for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
STATISTICS = {f"layers.1.{part}" for part in ("running_mean", "running_var", "num_batches_tracked")}


def play(folder: Path, method: str, source: dict[str, str]) -> None:
    """A run in a process of its own, as NVFlare's simulator wants it, with the probe in place."""
    code = f"""
from nvflare.recipe.sim_env import SimEnv
from fednorm.nvflare import Recipe
from recorder import Recorder

recipe = Recipe(
    method={method!r}, model="simulated:Net", num_rounds={ROUNDS}, min_clients=2, num_classes=2, shape=(6,),
    local_steps=2, batch_size=8, **{source!r},
)
for task in ("fednorm_hello", "train"):
    recipe.add_server_output_filter(Recorder({str(folder / "messages")!r}), tasks=[task])
    recipe.add_server_input_filter(Recorder({str(folder / "messages")!r}), tasks=[task])
for name in ("simulated.py", "recorder.py"):
    recipe.add_client_file(name)
    recipe.add_server_file(name)
recipe.execute(SimEnv(num_clients=2, workspace_root={str(folder / "sim")!r}))
"""
    env = {**os.environ, "HOME": str(folder), "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, env=env, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("method", "local", "source"),
    [
        ("fedbn", NORM, {"data": "simulated:own_data"}),
        ("silobn", STATISTICS, {"train_script": "wrong_script.py"}),
    ],
)
def test_no_local_entry_crosses_the_wire(tmp_path: Path, method: str, local: set[str], source: dict[str, str]) -> None:
    play(tmp_path, method, source)
    messages = list((tmp_path / "messages").glob("*.safetensors"))
    # Each site is asked for a hello, and then to train in every round; a test comes after the last.
    ways = [path.name.partition("-")[0] for path in messages]
    assert ways.count("out") >= 2 * (1 + ROUNDS)
    assert ways.count("in") == ways.count("out")
    carried = [safetensors.torch.load(path.read_bytes()) for path in messages]
    said = [json.loads(path.with_suffix(".json").read_text()) for path in messages]
    keys = {place.rpartition("/")[2] for tree in carried for place in tree}
    entries = set(Net(2).state_dict())
    assert keys & entries == entries - local
    texts = json.dumps(said)
    assert [key for key in sorted(local) if key in texts] == []
    assert [key for key in sorted(entries - local) if key not in texts] == []

    wire = b"".join(path.read_bytes() for path in messages)
    states = sorted((tmp_path / "sim").rglob("fednorm_state/*/site-*"))
    assert len(states) == 2
    for state in states:
        trees = [tree for tree in load(state)[1].values() if tree]
        assert trees
        for tree in trees:
            assert tree.keys() == local
            many = {key: tensor for key, tensor in tree.items() if tensor.dim()}  # a counter may be anybody's number
            assert [key for key, tensor in many.items() if tensor.numpy().tobytes() in wire] == []
    # The search finds what is there: the last shared state was sent for the test after the last round.
    (model,) = (tmp_path / "sim").rglob("fednorm/model.safetensors")
    last = safetensors.torch.load(model.read_bytes())
    assert [key for key in sorted(entries - local) if last[key].numpy().tobytes() not in wire] == []
