"""What the server writes of a run for others to read: a folder like that of every other run of fednorm's.

config.json, env.json, metrics.jsonl with a row a round, result.json, and model.safetensors with what the server has.
Entries that stay with the sites are not in it, and there is no state.sqlite: what sites keep is theirs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from fednorm.core.report import Report
from fednorm.core.state import Tree, digest
from fednorm.core.task import AnyTask
from fednorm.engines.machine import device_name
from fednorm.errors import FednormError
from fednorm.files import disk_errors, write_json
from fednorm.halves.messages import Scores
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.server import Row
from fednorm.nvflare.setup import Setup
from fednorm.running.environment import environment
from fednorm.running.evaluate import evaluate, metric_facts, over_clients
from fednorm.running.folder import RunFolder
from fednorm.running.given import Objects, stored_config
from fednorm.running.plan import Plan, make_plan
from fednorm.running.records import ROW_VERSION, Ran, RoundRow
from fednorm.running.result_file import write_result
from fednorm.running.results import Result, summarise
from fednorm.running.sealed import sealed
from fednorm.running.store import Store
from fednorm.running.tensor_files import save_tree

RESULTS = "fednorm"
"""folder of the records, in the job's own folder at the server, which comes back with the job's result"""
FAILURE = "failure.json"
"""why a run ended early"""
ABOUT = "nvflare.json"
"""name of the run, which `run_id` continues, and its sites"""


def write_failure(folder: Path, error: FednormError) -> None:
    """Leave the reason where the result would be."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FAILURE, {"error": str(error), "exit_code": error.exit_code})


class Ledger:
    """Rows of a run as they come, and its result at the end."""

    def __init__(self, path: Path, setup: Setup, rows: Sequence[Row] = ()) -> None:
        self.folder = RunFolder(path)
        self.setup = setup
        self.rows: list[Row] = [dict(row) for row in rows]
        """of the rounds that are over, as the file has them"""
        self.task: AnyTask = setup.plain_task()
        self._plan: Plan | None = None
        self._since = time.perf_counter()

    def begin(self, rows: Sequence[Row], run: str, sites: Sequence[str]) -> None:
        """Make the folder, with the rows of rounds that were played before."""
        self.rows = [dict(row) for row in rows]
        with disk_errors(self.folder.path):
            self.folder.path.mkdir(parents=True, exist_ok=True)
        write_json(self.folder.path / ABOUT, {"run": run, "sites": list(sites)})
        write_json(self.folder.path / "env.json", environment())
        write_json(self.folder.config, sealed(stored_config(self.setup.config, Objects())))
        with self.folder.metrics_open(cast(list[RoundRow], self.rows)):
            pass
        self._since = time.perf_counter()

    def scored(self, phase: PreparedPhase, tree: Tree, sums: Mapping[int, Scores]) -> dict[str, Any]:
        """Scores of a round by protocol, from what sites sent of their tests.

        Where the server can read the test set, and nothing stays with the sites, it tests the global model itself.
        """
        if self.setup.server_reads_data and not phase.kept:
            return evaluate(self._whole(), phase, tree, Store())
        found: dict[str, Any] = {}
        for protocol in ("own_client", "validation"):
            each = {client: answer.sums[protocol] for client, answer in sorted(sums.items()) if protocol in answer.sums}
            if each:
                summaries = {client: self.task.summary(total) for client, total in each.items()}
                found[protocol] = over_clients(self.task, summaries)
        return found

    def _whole(self) -> Plan:
        if self._plan is None:
            config = self.setup.config
            self._plan = make_plan(config, code=Objects().trusting(config).code)
        return self._plan

    def add(self, row: Row, reports: Sequence[Report], scores: Mapping[str, Any] | None) -> Row:
        """Complete the row of a round that is over, and write it."""
        now = time.perf_counter()
        plain = {name: value for name, value in row.items() if name != "sums"}
        told: Row = {"version": ROW_VERSION, **plain}
        if scores:
            told |= {"eval": dict(scores), "metric": metric_facts(self.task)}
        if reports:
            examples = sum(report.num_examples for report in reports)
            told["train_loss"] = sum(report.losses["all"] for report in reports) / len(reports)
            told["train_loss_weighted"] = sum(r.num_examples * r.losses["all"] for r in reports) / examples
        told["seconds"] = round(now - self._since, 6)
        self._since = now
        self.rows.append(told)
        with self.folder.metrics_open(cast(list[RoundRow], self.rows)):
            pass
        return told

    def finish(self, method: str, tree: Tree, sites: Sequence[str], notes: Sequence[str] = ()) -> Result:
        """Write the result, and the model as far as the server has it."""
        config = self.setup.config
        summary = summarise(
            cast(list[RoundRow], self.rows),
            method=method,
            seed=config.seed,
            rounds=config.rounds,
            metric=self.task.metric,
            higher_is_better=self.task.higher_is_better,
            percent=self.task.percent,
            digest=digest(tree),
            notes=notes,
            ran=_ran(self.setup),
        )
        result = Result(({**summary, "client_names": list(sites)},))
        plain = {key: value.cpu().contiguous() for key, value in tree.items()}
        save_tree(self.folder.model, plain, {"method": method, "model": config.model})
        write_result(self.folder, result.to_json())
        return result


def _ran(setup: Setup) -> Ran:
    return {
        "engine": "nvflare",
        "fell_back": None,
        "precision": setup.config.engine.precision,
        "threads": torch.get_num_threads(),
        "processes": len(setup.sites) or 1,
        "device": str(setup.device),
        "device_name": device_name(setup.device),
    }
