"""A device of its own over HTTP, in a process of its own, against NVFlare's own HTTP views and a leaf's executor."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

from edge_desk import Played
from flask import Flask
from nvflare.edge.constants import EdgeApiStatus
from nvflare.edge.web.models.api_error import ApiError
from nvflare.edge.web.models.job_request import JobRequest
from nvflare.edge.web.models.job_response import JobResponse
from nvflare.edge.web.models.result_report import ResultReport
from nvflare.edge.web.models.task_request import TaskRequest
from nvflare.edge.web.models.task_response import TaskResponse
from nvflare.edge.web.routing_proxy import FilteredJSONProvider, handle_api_error
from nvflare.edge.web.views.feg_views import api_query, feg_bp
from simulated import LIMIT
from werkzeug.serving import make_server

from fednorm.nvflare.edge.device import main
from fednorm.nvflare.edge.leaf import NormEdgeExecutor

pytestmark = pytest.mark.nvflare

CONTEXT = SimpleNamespace(get_job_id=lambda: "job-1")
TASK = SimpleNamespace(id="task-1", name="train")


class Leaf:
    """What is behind the proxy: a leaf's executor, and the job it runs; its node is the played run's leaf."""

    def __init__(self, played: Played) -> None:
        self.executor = NormEdgeExecutor()
        self.executor._passing.node = played.leaf
        self.played, self.reports = played, list[Any]()

    def __call__(self, request: Any) -> Any:
        if isinstance(request, JobRequest):
            return JobResponse(EdgeApiStatus.OK, "job-1", request.job_name, job_data={})
        if isinstance(request, TaskRequest):
            if self.played.over:
                return TaskResponse(EdgeApiStatus.NO_JOB)
            return self.executor.process_edge_task_request(request, TASK, CONTEXT)
        assert isinstance(request, ResultReport)
        self.reports.append(request)
        answer = self.executor.process_edge_result_report(request, TASK, CONTEXT)
        with self.executor._passing.lock:
            self.played.report()
        return answer


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Leaf, str]]:
    """A leaf behind NVFlare's own HTTP views on loopback, and its address."""
    leaf = Leaf(Played(tmp_path, devices=1, method="fedbuff(b=1)+fedbn", num_versions=3))
    monkeypatch.setattr(api_query, "query", leaf)
    app = Flask("proxy")
    app.json = FilteredJSONProvider(app)
    app.register_blueprint(feg_bp)
    app.register_error_handler(ApiError, handle_api_error)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield leaf, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


def start(leaf: Leaf, address: str) -> subprocess.Popen[str]:
    run = leaf.played.recipe.device_file(leaf.played.folder / "run.json")
    command = [sys.executable, "-m", "fednorm.nvflare.edge.device", address, "--job", "edge", "--id", "phone#0"]
    return subprocess.Popen(
        [*command, "--run", str(run)],
        env={**os.environ, "HOME": str(leaf.played.folder)},
        cwd=leaf.played.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_device_of_its_own_does_a_whole_run_over_http(served: tuple[Leaf, str]) -> None:
    leaf, address = served
    out, told = start(leaf, address).communicate(timeout=LIMIT)
    assert leaf.played.over, told
    assert out == ""
    assert "the job is over; 5 answers were sent" in told  # hello, three versions, the last one's test
    assert [row["cohort"] for row in leaf.played.rows] == [[0]] * 3
    counted = [int(value) for value in leaf.played.kept(0).values() if not value.is_floating_point()]
    assert counted == [6, 6]
    assert all(isinstance(report.result["answer"], str) for report in leaf.reports)
    sent = [len(report.result["answer"]) for report in leaf.reports[1:4]]
    assert max(sent) < 1.2 * 115752  # differences in base64; as lists of floats they are six times as long


def test_a_model_that_the_proxy_cannot_carry_is_said_to_be_too_large(
    served: tuple[Leaf, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf, _ = served
    played, info = leaf.played, {"device_info": {"device_id": "site-1#0"}}
    played.work()
    played.report()
    monkeypatch.setattr("fednorm.nvflare.edge.leaf.MOST_TEXT", 1000)
    answer = leaf(TaskRequest.from_dict({**info, "job_id": "job-1"})[1])
    assert answer.status == EdgeApiStatus.RETRY
    played.report()
    size = r"what it is sent has \d+ characters, the way to a device takes 1000; use a smaller model"
    assert re.fullmatch(f"site 'device-000000', version 1: {size}", played.said[-1])


def test_a_device_that_cannot_take_part_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Played(tmp_path, devices=1).recipe.device_file(tmp_path / "run.json")
    nobody = ["http://127.0.0.1:9", "--job", "edge", "--run", str(run), "--patience", "0.1"]
    assert main([*nobody, "--id", "phone#0"]) == 4
    why = "error: job 'edge' cannot be reached (ConnectionError) for 0.1 seconds; start it, or give a larger --patience"
    assert capsys.readouterr().err.strip() == why
    assert main([*nobody[:-3], str(tmp_path / "none.json"), "--id", "phone#0"]) == 2
    why = f"error: '{tmp_path / 'none.json'}' does not exist; give the setup that a device has, or config_fed_client"
    assert capsys.readouterr().err.startswith(why)
    assert main([*nobody, "--id", "phone"]) == 2
    why = "error: device 'phone' has no number; call it NAME#NUMBER, such as phone#3"
    assert capsys.readouterr().err.strip() == why
