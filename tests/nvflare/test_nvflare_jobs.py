"""Jobs as NVFlare gets them: processes that come and go, runs that are continued, code that sites must permit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.recipe.sim_env import SimEnv
from simulated import HERE, PIDS, Net, tiny

from command import fednorm
from fednorm import Result, run
from fednorm.errors import ConfigError
from fednorm.files import read_json
from fednorm.halves.wire_files import load_mine
from fednorm.nvflare import Recipe
from fednorm.nvflare.edge.processor import NormTaskProcessor
from fednorm.nvflare.keeping import site_file
from fednorm.nvflare.permission import Permission, code_paths
from fednorm.nvflare.setup import Setup
from fednorm.running.config import from_dict, updated
from fednorm.running.recipe import read_recipe

pytestmark = pytest.mark.nvflare

FEDBN = HERE.parents[1] / "examples" / "nvflare" / "fedbn.toml"
UNEVEN = """
import os

import torch

from fednorm import register_data


@register_data("uneven")
def uneven():
    random = torch.Generator().manual_seed(os.getpid())
    x, y = torch.randn(40, 6, generator=random), torch.arange(40) % 2
    return (x[:30], y[:30]), (x[30:], y[30:])
"""
TINY = ("--set", "data.train_limit=60", "--set", "train.local_epochs=1", "--quiet")


def own(**more: Any) -> Recipe:
    settings = {"num_rounds": 2, "min_clients": 4, "local_steps": 3, "batch_size": 4, "eval.every": 2}
    return Recipe(model=Net, data="simulated:own_data", shape=(6,), num_classes=2, **{**settings, **more})


def test_local_entries_survive_the_swap_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sites on two threads: NVFlare starts a process for every task."""
    pids = tmp_path / "pids"
    pids.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=":")
    monkeypatch.setenv(PIDS, str(pids))
    own(method="fedbn").execute(SimEnv(num_clients=4, num_threads=2, workspace_root=str(tmp_path / "ws")))
    workspace = tmp_path / "ws" / "fednorm"
    records = workspace / "server" / "simulate_job" / "fednorm"
    assert read_json(records / "result.json")["runs"][0]["rounds_done"] == 2
    run = read_json(records / "nvflare.json")["run"]
    means = []
    for site in ("site-1", "site-2", "site-3", "site-4"):
        assert len(set((pids / site).read_text().split())) == 4, "a hello, two rounds and a test, each in its own"
        kept = load_mine(site_file(workspace / site / "fednorm_state", run, site))
        assert kept.pending is None
        assert kept.exchange == 2
        assert kept.accepted.tree["layers.1.num_batches_tracked"] == 6
        means.append(kept.accepted.tree["layers.1.running_mean"])
    assert not any(one.equal(other) for one in means for other in means if one is not other)


def test_a_run_is_continued_in_another_job_by_its_id(tmp_path: Path) -> None:
    def played(rounds: int, *words: str) -> str:
        kept = ("--run-id", "mine", "--state-dir", tmp_path / "state", "--out", tmp_path / str(rounds))
        done = fednorm("nvflare", "run", FEDBN, *TINY, *kept, "--set", f"rounds={rounds}", *words)
        assert (done.code, done.err) == (0, ""), (done.out, done.err)
        return (tmp_path / str(rounds) / "nvflare.log").read_text()

    assert f"run 'mine' starts clean; its state is kept in '{tmp_path / 'state' / 'mine'}'" in played(1)
    assert "run 'mine' goes on after round 1 of 3, which had 1" in played(3, "--check")
    assert len((tmp_path / "3" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_job_that_cannot_go_on_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    done = fednorm("nvflare", "run", FEDBN, *TINY, "--out", tmp_path / "run", "--set", "train.lr=1e30")
    assert done.code == 3
    assert done.err.startswith("error: diverged in round 1, client 0 ('site-1'): ")
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_the_example_ends_with_the_same_bits(tmp_path: Path) -> None:
    done = fednorm("nvflare", "run", FEDBN, "--check", "--out", tmp_path / "run")
    assert (done.code, done.err) == (0, "")
    assert "fedbn seed 0  round 5/5  own-client accuracy" in done.out
    same = [f"{holder}: same bits" for holder in ("server", "server's memory", "site-1", "site-2")]
    assert done.out.splitlines()[-5:] == [f"folder: {tmp_path / 'run'}", *same]
    assert "round 5: 16 entries, 6 shared, 10 local; 115752 bytes up" in (tmp_path / "run" / "nvflare.log").read_text()
    assert Result.load(tmp_path / "run").per_client()[1]["name"] == "site-2"
    assert Result.load(tmp_path / "run").picture(tmp_path / "run.png").stat().st_size > 1000
    assert fednorm("resume", tmp_path / "run", "--rounds", "6", "--quiet").code == 0, "our own engine goes on from it"
    longer = Result.load(tmp_path / "run").runs[0]
    whole = run(updated(from_dict(read_recipe(FEDBN).fields), {"rounds": 6}), threads=1, engine="sequential")
    assert (longer["rounds_done"], longer["digest"]) == (6, whole.runs[0]["digest"])
    assert set(longer["curves"]) == {"round", "own_client"}
    assert set(longer["final"]) == {"pooled", "own_client"}


def test_a_run_that_is_not_the_same_there_is_noticed(tmp_path: Path) -> None:
    """Data that differ from process to process, by a file that the command line uses."""
    (tmp_path / "uneven.py").write_text(UNEVEN)
    config = tmp_path / "run.toml"
    config.write_text('method = "fedbn"\nmodel = "mlp_bn(width=4)"\nrounds = 1\n[data]\nname = "uneven"\nclients = 2\n')
    words = ("--use", tmp_path / "uneven.py", "--out", tmp_path / "run", "--set", "data.partition=iid")
    done = fednorm("nvflare", "run", config, "--check", "--quiet", *words)
    assert done.code == 1
    told = [line.partition(": ") for line in done.err.splitlines()]
    assert [holder for holder, _, _ in told] == ["server", "site-1", "site-2"]
    assert all(text.startswith("differs from the sequential engine, first in '") for _, _, text in told)
    assert "server's memory: same bits" in done.out


def test_an_exported_job_brings_no_code(tmp_path: Path) -> None:
    done = fednorm("nvflare", "export", FEDBN, tmp_path, "--name", "mine", "--run-id", "first")
    assert (done.code, done.err) == (0, "")
    job = tmp_path / "mine"
    assert not list(job.rglob("custom"))
    assert read_json(job / "meta.json")["min_clients"] == 2
    (server,) = read_json(job / "app" / "config" / "config_fed_server.json")["workflows"]
    (client,) = read_json(job / "app" / "config" / "config_fed_client.json")["executors"]
    assert server["path"] == "fednorm.nvflare.server.NormController"
    assert client["executor"]["path"] == "fednorm.nvflare.client.NormExecutor"
    setups = [Setup.from_json(each["args"]["setup"]) for each in (server, client["executor"])]
    assert setups[0] == setups[1]
    assert (setups[0].run_id, setups[0].sites, setups[0].config.method) == ("first", ("site-1", "site-2"), "fedbn")
    again = fednorm("nvflare", "export", FEDBN, tmp_path, "--name", "mine")
    assert (again.code, again.err) == (2, f"error: '{job}' exists already; choose another DIR or --name\n")


def test_check_tells_what_is_shared_and_what_sites_must_permit(tmp_path: Path) -> None:
    found = fednorm("nvflare", "check", FEDBN, "--json").json
    assert found["problems"] == []
    assert found["permits"] == {"needed": ["fednorm.nvflare."], "missing": ["fednorm.nvflare."], "byoc": False}
    (phase,) = found["phases"]
    assert {each["kind"]: each["policy"] for each in phase["entries"] if each["leaves_site"]} == {"weight": "shared"}
    assert {each["kind"] for each in phase["entries"] if not each["leaves_site"]} == {"affine", "statistic", "counter"}
    resources = tmp_path / "resources.json"
    for listed, code in ((["nvflare."], 2), (["fednorm.nvflare."], 0), (["fednorm."], 0), (["*"], 0)):
        resources.write_text(json.dumps({"class_allow_list": listed}))
        done = fednorm("nvflare", "check", FEDBN, "--resources", resources)
        assert (done.code, bool(done.err)) == (code, code == 2), listed
    refused = fednorm("nvflare", "check", "--resources", tmp_path / "none.json")
    assert refused.code == 2
    assert refused.err.startswith(f"error: '{tmp_path / 'none.json'}' cannot be read")


@pytest.mark.parametrize("method", ["centralized", "fedtan", "posthoc(mode=ema)"])
def test_methods_that_need_everybody_in_one_place_are_refused_by_name(method: str, tmp_path: Path) -> None:
    done = fednorm("nvflare", "run", FEDBN, "--set", f"method={method}", "--out", tmp_path / "run")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert f"'{method}' needs " in done.err
    assert "which only the simulator has; use fednorm.run, or another method here" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"train_script": "train.py"}, "data and train_script were both given; give one of them"),
        ({"model": Net(2)}, "model Net cannot be named in a job; give a name of fednorm's, or 'package.module:Net(wid"),
        ({"world.dropout": 0.5}, "world.dropout=0.5 is played by fednorm's simulator alone; on NVFlare sites fail by"),
        ({"transport": "mail"}, "transport 'mail' is not known; known: collab, tasks."),
        ({"methd": "fedbn"}, "setting 'methd' is not known; did you mean 'method'?"),
    ],
)
def test_what_a_job_cannot_be_is_refused_in_one_line(more: dict[str, Any], error: str) -> None:
    given: dict[str, Any] = {"model": "mlp_bn", "data": "fashion_mnist_small", "min_clients": 2}
    with pytest.raises(ConfigError) as caught:
        Recipe(**{**given, **more})
    assert str(caught.value).startswith(error)
    assert len(str(caught.value).splitlines()) == 1


def test_a_number_of_sites_must_be_known() -> None:
    with pytest.raises(ConfigError, match="how many sites take part is not known; give min_clients"):
        Recipe(model=Net, data="simulated:own_data", shape=(6,), num_classes=2)


def permission(folder: Path, listed: Sequence[str], byoc: bool = False) -> Permission:
    """What a site permits whose list has these, to a job that brings code or brings none."""

    class Workspace:
        def get_resources_file_path(self) -> str:
            return str(folder / "resources.json")

    (folder / "resources.json").write_text(json.dumps({"class_allow_list": list(listed)}))
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace())
    context.set_prop(FLContextKey.JOB_META, {"byoc": byoc})
    return Permission(context)


@pytest.mark.parametrize(("listed", "byoc"), [((), False), (("simulated.own_data",), False), ((), True)])
def test_a_site_decides_which_code_a_job_may_name(listed: tuple[str, ...], byoc: bool, tmp_path: Path) -> None:
    setup, permit = own().setup, permission(tmp_path, listed, byoc)
    if listed or byoc:
        assert len(setup.own_data("site-1", permit).train[1]) == 16
        return
    with pytest.raises(ConfigError) as caught:
        setup.own_data("site-1", permit)
    assert str(caught.value) == (
        "the job names code, 'simulated.own_data', which this site does not permit; add it to class_allow_list in "
        "local/resources.json, or submit the job with its code where the right byoc is granted"
    )


def test_a_leaf_permits_files_that_its_devices_use_as_a_site_does(tmp_path: Path) -> None:
    (tmp_path / "uneven.py").write_text(UNEVEN)
    config = updated(tiny(), {"use": (str(tmp_path / "uneven.py"),)})
    processor = NormTaskProcessor(replace(own().setup, config=config).to_json())
    (path,) = code_paths(config)
    assert path.startswith("use.")
    processor.permitted(permission(tmp_path, [path]))
    with pytest.raises(ConfigError, match=f"the job names code, '{path}', which this site does not permit"):
        processor.permitted(permission(tmp_path, ["fednorm.nvflare."]))


def test_a_site_that_does_not_know_its_rows_is_told_how_to() -> None:
    with pytest.raises(
        ConfigError, match=r"site 'hospital' does not know which of the 2 clients of .* it is; give sites"
    ):
        Recipe(config=tiny()).setup.own_data("hospital")
    named = Recipe(config=tiny(), sites=["hospital", "clinic"]).setup
    first = Recipe(config=tiny()).setup.own_data("site-1")
    assert named.own_data("clinic").train[0].equal(first.train[0])  # by the order of names, as the server numbers them
