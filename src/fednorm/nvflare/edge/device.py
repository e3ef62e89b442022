"""A device that is a process of its own: it speaks HTTP and JSON with NVFlare's routing proxy, as a phone would.

    python -m fednorm.nvflare.edge.device http://127.0.0.1:9000 --job JOB --id phone#20 --run run.json

It asks for a job of a name, then again and again for something to do, and ends when the job is over. Killed and started
again it goes on: what it keeps is in a file, and whatever it had not reported it is asked for again.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import requests
from nvflare.edge.constants import EdgeApiStatus
from nvflare.edge.simulation.devices.tp import TaskProcessingDevice
from nvflare.edge.simulation.feg_api import FegApi
from nvflare.edge.web.models.api_error import ApiError
from nvflare.edge.web.models.capabilities import Capabilities
from nvflare.edge.web.models.device_info import DeviceInfo
from nvflare.edge.web.models.job_request import JobRequest
from nvflare.edge.web.models.result_report import ResultReport
from nvflare.edge.web.models.task_request import TaskRequest
from nvflare.edge.web.models.user_info import UserInfo

from fednorm import __version__
from fednorm.errors import FednormError, QuorumError
from fednorm.nvflare.edge.processor import NormTaskProcessor, device_number
from fednorm.nvflare.personal import read_setup

log = logging.getLogger("fednorm.device")
_OVER = (EdgeApiStatus.NO_JOB, EdgeApiStatus.DONE)
_TASK = (EdgeApiStatus.OK, EdgeApiStatus.RETRY, *_OVER)
_TAKEN = (EdgeApiStatus.OK, EdgeApiStatus.ERROR, *_OVER)
_PAUSE = 1.0


class HttpDevice:
    """One device behind a routing proxy."""

    def __init__(self, endpoint: str, device_id: str, processor: NormTaskProcessor, *, patience: float = 120.0) -> None:
        """`patience` is how many seconds it waits for a job to begin, or for a proxy that is gone to come back."""
        device_number(device_id, processor.first)  # refused here, and not at the first task
        info = DeviceInfo(device_id, app_name="fednorm", app_version=__version__, platform="python")
        user = UserInfo(user_id=device_id)
        self.device = TaskProcessingDevice(device_id, endpoint, info, user, processor)
        self.patience = patience
        self._cookie: dict[str, Any] = {}
        self._api = FegApi(endpoint, info, user)

    def take_part(self, job_name: str) -> int:
        """Do what is asked in a job until it is over; how many answers were sent."""
        said = self._until(lambda: self._api.get_job(self._job_request(job_name)), f"job '{job_name}'")
        self.device.set_job(
            said.job_id, said.get("job_name", job_name), said.get("method", ""), said.get("job_data", {})
        )
        log.info("takes part in job %s", said.job_id)
        answers = 0
        while True:
            task = self._until(lambda: self._api.get_task(self._task_request()), "the proxy", _TASK)
            if task.status in _OVER:
                log.info("the job is over; %d answers were sent", answers)
                return answers
            if task.status != EdgeApiStatus.OK:
                time.sleep(task.get("retry_wait") or _PAUSE)
                continue
            self._cookie = task.get("cookie") or {}
            report = self._report(task, self.device.do_task(task))
            self._until(partial(self._api.report_result, report), "the proxy", _TAKEN)
            answers += 1

    def _job_request(self, name: str) -> JobRequest:
        device = self.device
        return JobRequest(name, device.get_device_info(), device.get_user_info(), Capabilities(["fednorm"]))

    def _task_request(self) -> TaskRequest:
        device = self.device
        return TaskRequest(device.get_device_info(), device.get_user_info(), str(device.job_id), self._cookie)

    def _report(self, task: Any, result: dict[str, Any]) -> ResultReport:
        device = self.device
        return ResultReport(
            device.get_device_info(),
            device.get_user_info(),
            task.job_id,
            task.task_id,
            task_name=task.task_name,
            status=EdgeApiStatus.OK if "answer" in result else EdgeApiStatus.ERROR,
            result=result,
            cookie=self._cookie,
        )

    def _until(self, ask: Callable[[], Any], whom: str, wanted: tuple[str, ...] = (EdgeApiStatus.OK,)) -> Any:
        """What is answered, once it has a status that is wanted; a proxy or a job may come later than the device."""
        since = time.monotonic()
        while True:
            try:
                said = ask()
                if said.status in wanted:
                    return said
                why = f"{whom} answers {said.status}"
            except (requests.RequestException, ApiError) as error:
                why = f"{whom} cannot be reached ({type(error).__name__})"
            if time.monotonic() - since > self.patience:
                raise QuorumError(f"{why} for {self.patience:g} seconds; start it, or give a larger --patience")
            time.sleep(_PAUSE)


def main(arguments: list[str] | None = None) -> int:
    """The command line: 0 once the job is over."""
    parser = argparse.ArgumentParser(description="a device of its own behind NVFlare's routing proxy")
    parser.add_argument("endpoint", help="of the proxy, such as http://127.0.0.1:9000")
    parser.add_argument("--job", required=True, help="name of the job")
    parser.add_argument("--id", required=True, help="NAME#NUMBER of this device")
    parser.add_argument("--run", required=True, type=Path, help="JSON file that EdgeRecipe.device_file wrote")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for the job, or for the proxy")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        processor = NormTaskProcessor(read_setup(args.run).to_json())
        HttpDevice(args.endpoint, args.id, processor, patience=args.patience).take_part(args.job)
    except FednormError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
