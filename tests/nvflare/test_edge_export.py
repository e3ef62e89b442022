"""A device's own model, out of its own file and the global model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

import torch
from edge_desk import Played
from safetensors import safe_open
from typer.testing import CliRunner

from fednorm.cli import app
from fednorm.errors import CheckpointError, ConfigError
from fednorm.nvflare.edge.processor import device_name
from fednorm.nvflare.keeping import site_file
from fednorm.nvflare.personal import personal_model, read_setup
from fednorm.running.tensor_files import load_tree

pytestmark = pytest.mark.nvflare


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    played = Played(tmp_path_factory.mktemp("played"), devices=2, method="fedbuff(b=2)+fedbn", num_versions=2)
    played.play()
    played.recipe.device_file(played.folder / "run.json")
    return played


def state_of(played: Played, number: int) -> Path:
    return site_file(played.folder / "state", "run", device_name(number))


def test_it_has_the_own_entries_of_its_device_and_the_rest_of_the_server(played: Played) -> None:
    model = played.folder / "records" / "model.safetensors"
    for number in range(2):
        found = personal_model(played.recipe.setup, state_of(played, number), model)
        own, server = played.kept(number), played.desk.tree
        assert set(found.local) == set(own)
        assert set(found.tree) == set(played.recipe.setup.network().state_dict())
        for key, value in found.tree.items():
            assert value.equal((own if key in own else server)[key]), key


def test_it_scores_what_the_device_reported(played: Played) -> None:
    model = played.folder / "records" / "model.safetensors"
    scores = played.rows[-1]["eval"]["own_client"]["per_client"]
    for number in range(2):
        found = personal_model(played.recipe.setup, state_of(played, number), model)
        network = played.recipe.setup.network().eval()
        network.load_state_dict(found.tree)
        data = played.devices[f"site-1#{number}"].own_data(number)
        assert data.test is not None
        x, y = data.test
        shape = (1, -1, 1, 1)
        mean, std = torch.tensor(data.mean).view(shape), torch.tensor(data.std).view(shape)
        with torch.no_grad():
            right = network((x.float() / 255 - mean) / std).argmax(1) == y
        assert 100 * right.double().mean().item() == pytest.approx(scores[number], abs=1e-9)


def test_the_verb_writes_it_and_says_what_it_is(played: Played) -> None:
    state, out = state_of(played, 1), played.folder / "own.safetensors"
    files = [
        "--model",
        str(played.folder / "records" / "model.safetensors"),
        "--setup",
        str(played.folder / "run.json"),
    ]
    done = CliRunner().invoke(app, ["nvflare", "export-site", str(state), *files, "-o", str(out)])
    assert done.exit_code == 0, done.output
    exchange = played.desk.course.arrivals.accepted[1]
    assert f"16 entries, 10 of them the site's own, after exchange {exchange}" in done.output
    expected = personal_model(played.recipe.setup, state, played.folder / "records" / "model.safetensors").tree
    got = load_tree(out)
    assert all(got[key].equal(value) for key, value in expected.items())
    with safe_open(out, "pt") as file:
        about = file.metadata()
    assert (about["method"], about["client"], about["local_entries"]) == ("fedbuff(b=2)+fedbn", state.name, "10")


def test_files_of_another_run_are_refused(played: Played, tmp_path: Path) -> None:
    model = played.folder / "records" / "model.safetensors"
    other = Played(tmp_path, devices=2, method="fedbuff(b=2)+silobn", num_versions=1)
    with pytest.raises(CheckpointError, match="is a client's state of another run; choose another file for this one"):
        personal_model(other.recipe.setup, state_of(played, 0), model)
    with pytest.raises(CheckpointError, match="does not exist; give the state file of a site"):
        personal_model(played.recipe.setup, tmp_path / "none", model)
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        personal_model(played.recipe.setup, state_of(played, 0), state_of(played, 1))
    setup = tmp_path / "setup.json"
    setup.write_text(json.dumps([1, 2]))
    why = (
        "has no setup of a run in it; give the setup that a device has, or config_fed_client.json of the job at a site"
    )
    with pytest.raises(ConfigError, match=why):
        read_setup(setup)
    setup.write_text(json.dumps({"config": 3, "outputs": 3, "state_dir": None}))
    with pytest.raises(ConfigError, match="the job's setup has no config of a run; write it anew"):
        read_setup(setup)


def test_the_setup_is_also_in_the_jobs_own_file(played: Played, tmp_path: Path) -> None:
    played.recipe.export(str(tmp_path))
    files = list(tmp_path.rglob("config_fed_client.json"))
    assert [read_setup(path) for path in files] == [played.recipe.setup]
