"""A device that writes down what leaves it and what it keeps, for a test that runs it inside NVFlare's processes."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from nvflare.edge.web.models.task_response import TaskResponse

from fednorm.halves import wire
from fednorm.halves.messages import Request
from fednorm.halves.wire_files import load_mine
from fednorm.halves.wire_format import Limits, unpack
from fednorm.nvflare.edge.packing import from_text
from fednorm.nvflare.edge.processor import NormTaskProcessor, device_name, device_number
from fednorm.nvflare.keeping import site_file


class ProbingProcessor(NormTaskProcessor):
    """Appends a line for every task to PROBE/DEVICE: the job, what came down, what goes up."""

    def process_task(self, task: TaskResponse) -> dict[str, Any]:
        result, said = super().process_task(task), task.task_data or {}
        header, planes = unpack(zlib.decompress(from_text(result["answer"])), Limits())
        sheet = wire.decode(from_text(said["sheet"])) if "sheet" in said else None
        line = {
            "ask": said["ask"],
            "phase": str(sheet.phase) if isinstance(sheet, Request) else "",
            "round": sheet.round if isinstance(sheet, Request) else 0,
            "down": sorted(sheet.tree) if isinstance(sheet, Request) else [],
            "up": sorted(planes),
            "kind": header["kind"],
            "counted": self._counted(),
            "process": os.getpid(),
        }
        with (Path(os.environ["PROBE"]) / str(self.device.device_id)).open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result

    def _counted(self) -> list[int]:
        """The batches that its norms have counted so far, as its file has it."""
        name = device_name(device_number(str(self.device.device_id), self.first))
        mine = load_mine(site_file(Path(self.run["state_dir"]), self.run["run_id"], name))
        state = mine.pending or mine.accepted
        return [int(value) for value in state.tree.values() if value.dtype == torch.int64]
