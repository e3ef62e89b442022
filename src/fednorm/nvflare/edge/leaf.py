"""A node of NVFlare's tree below the server: relays pass on what devices say and are asked, leaves speak with devices.

Nothing is summed up here. What a device sends goes up as it is, since the server's half judges and merges updates one
by one, and some methods need every single one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, cast

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.edge.constants import CookieKey, EdgeApiStatus, SpecialDeviceId
from nvflare.edge.executors.ete import EdgeTaskExecutor
from nvflare.edge.executors.hug import TaskInfo
from nvflare.edge.simulation.simulator import Simulator
from nvflare.edge.updater import Updater
from nvflare.edge.web.models.result_report import ResultReport
from nvflare.edge.web.models.result_response import ResultResponse
from nvflare.edge.web.models.selection_request import SelectionRequest
from nvflare.edge.web.models.selection_response import SelectionResponse
from nvflare.edge.web.models.task_request import TaskRequest
from nvflare.edge.web.models.task_response import TaskResponse
from nvflare.edge.widgets.tpo_runner import TPORunner

from fednorm.errors import WireError
from fednorm.halves.wire_format import short
from fednorm.nvflare.edge.packing import from_text, to_text
from fednorm.nvflare.edge.post import HELLO, Node
from fednorm.nvflare.edge.processor import NormTaskProcessor
from fednorm.nvflare.permission import Permission

MESSAGE = "fednorm"
"""the one item of a message between two nodes"""
MOST_TEXT = (4 << 20) - (64 << 10)
"""Characters of a model that NVFlare's routing proxy can carry to a device: gRPC takes 4 MiB in all."""
RETRY_AFTER = 1
"""seconds after which a device without a job may ask again"""


class Passing(Updater):
    """Sends reports up and jobs down, at the intervals of NVFlare's own periodic updates."""

    def __init__(self) -> None:
        super().__init__()
        self.node = Node()
        self.lock = threading.Lock()

    def start_task(self, task_data: Shareable, fl_ctx: FLContext) -> Node:
        return self.node

    def get_current_state(self, fl_ctx: FLContext) -> Node:
        return self.node

    def prepare_update_for_parent(self, fl_ctx: FLContext) -> Shareable:
        with self.lock:
            return Shareable({MESSAGE: self.node.report()})

    def process_parent_update_reply(self, reply: Shareable, fl_ctx: FLContext) -> None:
        if MESSAGE in reply:
            with self.lock:
                self.node.answered(reply[MESSAGE])

    def process_child_update(self, update: Shareable, fl_ctx: FLContext) -> tuple[bool, Shareable]:
        child, report = sender(fl_ctx), update[MESSAGE]
        with self.lock:
            self.node.hear(report, child)
            return True, Shareable({MESSAGE: self.node.reply(child, report["sheets"])})


def sender(fl_ctx: FLContext) -> str:
    """The name of the node that a message is from, which NVFlare has authenticated."""
    return str(cast(Any, fl_ctx.get_peer_context()).get_identity_name())


class NormEdgeExecutor(EdgeTaskExecutor):
    """What relays and leaves do in a run: jobs to devices, answers to the server."""

    def __init__(self, update_timeout: float = 60.0) -> None:
        EdgeTaskExecutor.__init__(self, "", update_timeout)
        self._passing = Passing()
        self._simulated: tuple[str, ...] = ()
        self._texts: dict[str, str] = {}

    def get_updater(self, fl_ctx: FLContext) -> Updater:
        return self._passing

    def process_edge_selection_request(
        self, request: SelectionRequest, current_task: TaskInfo, fl_ctx: FLContext
    ) -> SelectionResponse:
        """Which of this leaf's simulated devices have something to do, by the id of the job."""
        node = self._passing.node
        with self._passing.lock:
            self._introduce(str(request.get_device_id()))
            waiting = {device: HELLO for device in self._simulated if device not in node.known}
            asked = {device: job.id for device in self._simulated if (job := node.open_job(device))}
        return SelectionResponse(
            EdgeApiStatus.OK, str(fl_ctx.get_job_id()), task_id=str(current_task.id), selection=waiting | asked
        )

    def _introduce(self, said: str) -> None:
        """A simulator tells of its devices once, as PREFIX?COUNT."""
        prefix, mark, count = said.partition(SpecialDeviceId.MAX_INDICATOR)
        if mark:
            self._simulated = tuple(f"{prefix}{SpecialDeviceId.NUM_INDICATOR}{n}" for n in range(int(count)))

    def process_edge_task_request(
        self, request: TaskRequest, current_task: TaskInfo, fl_ctx: FLContext
    ) -> TaskResponse:
        """A device's job: to introduce itself where nobody knows it, else what the server asks of it, if anything."""
        device, job_id = str(request.get_device_id()), str(fl_ctx.get_job_id())
        node = self._passing.node
        with self._passing.lock:
            job = node.open_job(device)
            if device not in node.known:
                return self._task(current_task, job_id, HELLO, {"ask": "hello"})
            if job is None:
                why = "nothing is asked of you yet"
                return TaskResponse(EdgeApiStatus.RETRY, job_id, RETRY_AFTER, message=why)
            text = self._text(job.sheet)
            if device not in self._simulated and len(text) > MOST_TEXT:
                why = f"what it is sent has {len(text)} characters, the way to a device takes {MOST_TEXT}"
                node.hear({"failed": {device: (job.id, f"{why}; use a smaller model")}})
                return TaskResponse(EdgeApiStatus.RETRY, job_id, RETRY_AFTER, message=why)
            data = {"ask": "answer", "job": vars(job), "terms": to_text(node.terms), "sheet": text}
            return self._task(current_task, job_id, job.id, data)

    @staticmethod
    def _task(task: TaskInfo, job_id: str, id: int, data: Mapping[str, Any]) -> TaskResponse:
        return TaskResponse(
            status=EdgeApiStatus.OK,
            job_id=job_id,
            retry_wait=0,
            task_id=str(task.id),
            task_name=str(task.name),
            task_data=dict(data),
            cookie={CookieKey.DEVICE_SELECTION_ID: id},
        )

    def _text(self, name: str) -> str:
        """A sheet as devices read it, made once for all of them."""
        sheets = self._passing.node.sheets
        self._texts = {each: text for each, text in self._texts.items() if each in sheets}
        if name not in self._texts:
            self._texts[name] = to_text(sheets[name])
        return self._texts[name]

    def process_edge_result_report(
        self, request: ResultReport, current_task: TaskInfo, fl_ctx: FLContext
    ) -> ResultResponse:
        """Take a device's answer, or that it has none, and why."""
        device, result = str(request.get_device_id()), request.result or {}
        id = (request.cookie or {}).get(CookieKey.DEVICE_SELECTION_ID)
        report: dict[str, Any] = {}
        try:
            if type(id) is not int:
                raise WireError(f"device {short(device)} says {short(id)} as the id of its job; send its cookie")
            if "answer" in result:
                report = {"said": {device: (id, from_text(result["answer"]))}}
            else:
                why = str(result.get("why", f"it reports status {short(request.status)}"))
                report = {"failed": {device: (id, " ".join(why.split())[:500])}}
        except WireError as error:
            self.log_error(fl_ctx, str(error))
            return ResultResponse(
                EdgeApiStatus.ERROR, task_id=request.task_id, task_name=request.task_name, message=str(error)
            )
        with self._passing.lock:
            self._passing.node.hear(report)
        return ResultResponse(EdgeApiStatus.OK, task_id=request.task_id, task_name=request.task_name)


class DeviceRunner(TPORunner):
    """NVFlare's simulated devices, called after their leaf instead of by a new random number in every run."""

    def create_simulator(self, fl_ctx: FLContext) -> Simulator | None:
        if isinstance(self.tpo, NormTaskProcessor):
            self.tpo.permitted(Permission(fl_ctx))
        simulator = super().create_simulator(fl_ctx)
        if simulator is not None:
            simulator.device_id_prefix = str(fl_ctx.get_identity_name())
        return simulator
