"""What a device does: fednorm's client half around its own data, the same in NVFlare's simulator and on a real device.

A device is one `Site`. What it keeps lies in a file of its own, named by the run and the device, so it outlives the
process: a leaf's that simulates many devices, or the device's. Which data are its own is said by the number behind the
`#` of its id, never by a hash of it, which differs from process to process.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from nvflare.edge.simulation.device_task_processor import DeviceTaskProcessor
from nvflare.edge.web.models.job_response import JobResponse
from nvflare.edge.web.models.task_response import TaskResponse

from fednorm.core.task import AnyTask
from fednorm.data.federation import Federation
from fednorm.errors import ConfigError, FednormError, WireError
from fednorm.halves import wire
from fednorm.halves.messages import Message, Request, Update, Welcome
from fednorm.nvflare.edge.packing import encode, from_text, to_text
from fednorm.nvflare.edge.post import Job
from fednorm.nvflare.member import Member
from fednorm.nvflare.permission import code_paths
from fednorm.nvflare.setup import OwnData, Permit, Setup

_AT_WORK = threading.Lock()
"""Models draw from torch's one generator when they are built, and some when they train; simulated devices are threads
of one process, so they work one after the other, each as if it were alone."""
_Kind = TypeVar("_Kind", bound=Message)
_NUMBER = re.compile(r"(?P<prefix>.*)#(?P<number>\d{1,9})", re.DOTALL)


def device_number(device_id: str, first: Mapping[str, int] | None = None) -> int:
    """A device's number among all: the one behind `#`, counted from the first number of the leaf before it.

    >>> device_number("site-2#3", {"site-1": 0, "site-2": 10}), device_number("phone#20")
    (13, 20)
    """
    found = _NUMBER.fullmatch(device_id)
    if found is None:
        raise ConfigError(f"device '{device_id}' has no number; call it NAME#NUMBER, such as phone#3")
    return (first or {}).get(found["prefix"], 0) + int(found["number"])


def device_name(number: int) -> str:
    """How a device introduces itself; in the order of these names the server numbers its clients.

    >>> device_name(7)
    'device-000007'
    """
    return f"device-{number:06}"


class NormTaskProcessor(DeviceTaskProcessor):
    """Does what the server asks of a device, with its part of the data that the run's config names.

    Override `own_data` for a device that has its data elsewhere.
    """

    def __init__(self, run: dict[str, Any], first: dict[str, int] | None = None) -> None:
        """`run` is a `Setup` as JSON values, `first` the number of each leaf's first device."""
        super().__init__()
        self.run, self.first = run, first

    def permitted(self, permit: Permit) -> None:
        """Refuse code that the job names, unless the leaf whose process this is lets it run."""
        setup = Setup.from_json(self.run)
        for path in code_paths(setup.config):
            permit(path)

    def own_data(self, number: int) -> OwnData:
        """A device's own examples."""
        setup = Setup.from_json(self.run)
        if setup.data_code is not None:
            return setup.own_data(device_name(number))
        task, federation = _read(json.dumps(self.run, sort_keys=True))
        clients = federation.training_clients
        if number >= len(clients):
            raise ConfigError(
                f"device {number} has no part of '{federation.name}', which is dealt to {len(clients)} devices; "
                "number devices from 0, or give a larger data.clients"
            )
        return OwnData.of(federation, clients[number], task)

    def setup(self, job: JobResponse) -> None:
        """Nothing is made ready: it is called before every task, and a task says all there is to know."""

    def shutdown(self) -> None:
        """Nothing is open between two tasks."""

    def process_task(self, task: TaskResponse) -> dict[str, Any]:
        """Do a task; the answer as text, or the line that says why there is none."""
        try:
            with _AT_WORK:
                return {"answer": to_text(self._answer(task.task_data or {}))}
        except FednormError as error:
            self.logger.error(f"device {self.device.device_id}: {error}")
            return {"why": str(error)}

    def _answer(self, said: Mapping[str, Any]) -> bytes:
        device = str(self.device.device_id)
        number = device_number(device, self.first)
        member = Member(
            Setup.from_json(self.run),
            device_name(number),
            Path.cwd(),
            say=lambda line: self.logger.info(f"device {device}, {line}"),
        )
        member.data = self.own_data(number)
        if said.get("ask") == "hello":
            return encode(member.hello())
        welcome, sheet, job = _message(said, "terms", Welcome), _message(said, "sheet", Request), _job(said)
        answer = member.answer(replace(welcome, client=job.client), job.request(sheet))
        return encode(answer, sheet.tree if isinstance(answer, Update) else None)


def _job(said: Mapping[str, Any]) -> Job:
    try:
        return Job(**said["job"])
    except (KeyError, TypeError):
        raise WireError("the task has no job of fednorm's; the leaf runs another program") from None


def _message(said: Mapping[str, Any], name: str, kind: type[_Kind]) -> _Kind:
    found = wire.decode(from_text(said.get(name)))
    if not isinstance(found, kind):
        raise WireError(f"the task's {name} is a {type(found).__name__.lower()}, expected a {kind.__name__.lower()}")
    return found


@lru_cache(maxsize=2)
def _read(run: str) -> tuple[AnyTask, Federation]:
    """Task and data of a run, read once for all devices of a process."""
    setup = Setup.from_json(json.loads(run))
    setup.load_extensions()
    return setup.everybodys_data()
