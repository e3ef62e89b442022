"""A run in NVFlare's simulator, from its config to a folder like that of every other run.

The job is exported and given to the simulator, a process with all its sites below it. What they leave is put together
here, where all of it is in one place: the server's records, and a store with the server's state and every site's own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fednorm.core.state import Tree
from fednorm.errors import ConfigError, FednormError
from fednorm.files import read_json
from fednorm.halves.wire_files import load, load_mine
from fednorm.nvflare.keeping import server_file, site_file, state_root
from fednorm.nvflare.ledger import ABOUT, FAILURE, RESULTS
from fednorm.nvflare.permission import code_paths, permit_in
from fednorm.nvflare.recipe import Recipe
from fednorm.nvflare.setup import Setup
from fednorm.running.api import save_model
from fednorm.running.config import RunConfig, to_dict
from fednorm.running.folder import RunFolder
from fednorm.running.given import Objects
from fednorm.running.plan import Plan
from fednorm.running.records import OnRow, RoundRow, RunId, read_result, read_row
from fednorm.running.result_file import write_result
from fednorm.running.results import Result
from fednorm.running.stopping import Interrupted, orderly_stop
from fednorm.running.store import Store
from fednorm.running.tensor_files import load_tree

LOG = "nvflare.log"
"""what the simulator and its sites said, in the run's folder"""
_LOOK = 0.2
"""Seconds between two looks at how far the server is."""


class Unexplained(FednormError):
    """The simulator ended without a result, and without a reason of ours."""


def simulate(
    config: RunConfig,
    out: Path,
    *,
    threads: int | None = None,
    run_id: str | None = None,
    state_dir: str | None = None,
    on_row: OnRow | None = None,
) -> Result:
    """Play a config in NVFlare's simulator; `threads` sites work at a time, all of them unless told otherwise."""
    folder = RunFolder(out)
    folder.refuse_place()
    recipe = Recipe(config=config, run_id=run_id, state_dir=state_dir, server_reads_data=True)
    if recipe.setup.data_code is not None:
        raise ConfigError(
            f"data '{recipe.setup.data_code}' is code, which no TOML file runs; give it to fednorm.nvflare.Recipe"
        )
    plan = Objects().trusting(recipe.setup.config).plan(recipe.setup.config)
    with _workspace() as workspace:
        recipe.export(str(workspace / "job"))
        permit_in(workspace / "ws", code_paths(recipe.setup.config))
        _play(recipe, workspace, threads, on_row)
        found = _Left(recipe.setup, workspace / "ws")
        shutil.copytree(found.records, out, dirs_exist_ok=True)
        shutil.copy(workspace / LOG, out / LOG)
        with closing(Store(folder.state)) as store:
            found.gather(plan, store)
            save_model(plan, store, folder.model)
            told = read_result(read_json(found.records / "result.json"))
            write_result(folder, Result(tuple(told["runs"])).to_json(), store)
    return Result.load(out, allow_code=True)


@contextmanager
def _workspace() -> Iterator[Path]:
    """A folder for the simulator; where only its logs can say what went wrong, it stays."""
    path = Path(tempfile.mkdtemp(prefix="fednorm-nvflare-"))
    try:
        yield path
    except Unexplained:
        raise
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)


def _play(recipe: Recipe, workspace: Path, threads: int | None, on_row: OnRow | None) -> None:
    """Run the exported job to its end, and tell of its rounds as they come."""
    sites, home = len(recipe.setup.sites), workspace / "home"
    home.mkdir()
    command = [sys.executable, "-m", "nvflare.cli", "simulator", str(workspace / "job" / recipe.name)]
    command += ["-w", str(workspace / "ws"), "-n", str(sites), "-t", str(threads or sites)]
    # Our own home: NVFlare writes into the user's. Our own session: all its processes are ended together.
    with (
        (workspace / LOG).open("wb") as log,
        subprocess.Popen(  # noqa: S603
            command, stdout=log, stderr=log, env={**os.environ, "HOME": str(home)}, start_new_session=True
        ) as process,
    ):
        try:
            watch = _Watch(recipe.setup, workspace / "ws", on_row)
            with orderly_stop() as signal_that_came:
                while process.poll() is None:
                    if number := signal_that_came():
                        raise Interrupted(number)
                    watch.look()
                    time.sleep(_LOOK)
            watch.look()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    refuse_failed(workspace)


def refuse_failed(workspace: Path) -> None:
    """Say why a job has no result: what the server said, or where NVFlare's own words are."""
    records = _records(workspace / "ws")
    if (records / "result.json").exists():
        return
    if not (records / FAILURE).exists():
        raise Unexplained(f"the simulator ended without a result; its log is '{workspace / LOG}'")
    told = read_json(records / FAILURE)
    error = FednormError(told["error"])
    error.exit_code = told["exit_code"]
    raise error


class _Watch:
    """Reads the rows that the server writes, and tells each once."""

    def __init__(self, setup: Setup, workspace: Path, on_row: OnRow | None) -> None:
        self._metrics = RunFolder(_records(workspace)).metrics
        self._id = RunId(setup.name, setup.config.seed)
        self._on_row = on_row
        self._told = 0

    def look(self) -> None:
        if self._on_row is None or not self._metrics.exists():
            return
        for row in rows_in(self._metrics)[self._told :]:
            self._on_row(self._id, row)
            self._told += 1


def rows_in(metrics: Path) -> list[RoundRow]:
    """The rows of a metrics.jsonl."""
    return [read_row(json.loads(line)) for line in metrics.read_text().splitlines()]


class _Left:
    """What a simulation left on the disk."""

    def __init__(self, setup: Setup, workspace: Path) -> None:
        self.setup, self.workspace = setup, workspace
        self.records = _records(workspace)
        self.run = str(read_json(self.records / ABOUT)["run"])

    def server(self) -> tuple[dict[str, Any], dict[str, Tree]]:
        """The server's state."""
        return load(server_file(state_root(self.setup.state_dir, self.workspace / "server"), self.run))

    def gather(self, plan: Plan, store: Store) -> None:
        """Put all state into a store, as our own simulator has it."""
        facts, trees = self.server()
        accepted = {int(client): number for client, number in facts["accepted"].items()}
        for client, site in enumerate(sorted(self.setup.sites)):
            path = site_file(state_root(self.setup.state_dir, self.workspace / site), self.run, site)
            if client in accepted:
                store.put(client, load_mine(path).as_of(accepted[client]).accepted)
        rows = facts.pop("rows")
        about: dict[str, Any] = {"config": to_dict(plan.config), "engine": "sequential", "finished": True}
        facts = {**{name: facts[name] for name in facts if name not in ("lineage", "rounds")}, "terms": ""}
        number = facts["round"] if plan.clock is None else facts["version"]
        if plan.clock is None:
            about |= {name: value for name, value in {**facts, "accepted": {}}.items() if name != "round"}
        else:  # jobs that came too late are not under way any more
            about["clock"] = {**facts, "accepted": {}, "flights": [], "buffer": [], "time": 0.0, "under_way": []}
        model = load_tree(self.records / "model.safetensors")
        store.commit(number, {"model": model, "memory": trees["memory"]}, about, rows)


def _records(workspace: Path) -> Path:
    return workspace / "server" / "simulate_job" / RESULTS
