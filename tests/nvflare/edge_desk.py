"""A run on devices without NVFlare's processes: desk, one leaf and devices in one process, message by message."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.edge.web.models.task_response import TaskResponse

from fednorm.core.state import Tree
from fednorm.halves.server import Row
from fednorm.halves.wire_files import load_mine
from fednorm.nvflare.arrivals import ArrivalCourse
from fednorm.nvflare.course import Course
from fednorm.nvflare.edge.desk import Desk
from fednorm.nvflare.edge.packing import from_text, to_text
from fednorm.nvflare.edge.post import HELLO, Job, Node
from fednorm.nvflare.edge.processor import NormTaskProcessor, device_name
from fednorm.nvflare.edge.recipe import EdgeRecipe
from fednorm.nvflare.keeping import site_file
from fednorm.running.config import RunConfig, updated

SMALL = {"model": "fedbs_mnist_cnn", "train.local_steps": 2, "train.batch_size": 8, "eval.every": 10, "seed": 3}


def small(**fields: Any) -> RunConfig:
    return updated(RunConfig(), {**SMALL, "data.train_limit": 160, **fields})


class Played:
    """Desk, leaf and devices."""

    def __init__(self, folder: Path, devices: int = 4, *, config: RunConfig | None = None, **options: Any) -> None:
        self.folder, self.said = folder, list[str]()
        config = config or small()
        self.recipe = EdgeRecipe(config=config, devices_per_leaf=devices, state_dir=str(folder / "state"), **options)
        self.leaf = Node()
        self.devices = {f"site-1#{number}": self._device(f"site-1#{number}") for number in range(devices)}
        self.desk = self.new_desk()

    def _device(self, name: str) -> NormTaskProcessor:
        processor = NormTaskProcessor(self.recipe.setup.to_json(), {"site-1": 0})
        processor.device = SimpleNamespace(device_id=name)
        return processor

    def new_desk(self) -> Desk:
        """The server's process, from whatever is on the disk."""
        setup = self.recipe.setup
        kind = ArrivalCourse if setup.strategy else Course
        place = self.folder / "state" / "run"
        place.mkdir(parents=True, exist_ok=True)
        course = kind(setup, place / "server", self.folder / "records", "run", self.said.append)
        return Desk(course, self.recipe.pace)

    def report(self) -> None:
        """The leaf reports and is answered."""
        told = self.leaf.report()
        self.desk.hear("site-1", told)
        self.leaf.answered(self.desk.reply("site-1", told["sheets"]))

    def task(self, device: str) -> dict[str, Any] | None:
        """What a device is asked now."""
        if device not in self.leaf.known:
            return {"ask": "hello"}
        job = self.leaf.open_job(device)
        if job is None:
            return None
        sheet = to_text(self.leaf.sheets[job.sheet])
        return {"ask": "answer", "job": vars(job), "terms": to_text(self.leaf.terms), "sheet": sheet}

    def done(self, device: str) -> tuple[int, bytes] | None:
        """A device does what it is asked: the id of its job, and its answer."""
        said = self.task(device)
        if said is None:
            return None
        result = self.devices[device].process_task(TaskResponse("OK", task_data=said))
        assert set(result) == {"answer"}, result
        return said.get("job", {"id": HELLO})["id"], from_text(result["answer"])

    def work(self, *devices: str) -> None:
        """Devices do what they are asked, all unless some are named, and the leaf hears of it."""
        for device in devices or self.devices:
            if (answer := self.done(device)) is not None:
                self.leaf.hear({"said": {device: answer}})

    def play(self, most: int = 40) -> None:
        """Until the run is over."""
        for _ in range(most):
            self.work()
            self.report()
            if self.over:
                self.desk.course.end()
                return
        raise AssertionError(f"not over after {most} reports: {self.said}")

    @property
    def over(self) -> bool:
        return self.desk.course.over

    @property
    def rows(self) -> list[Row]:
        return self.desk.course.ledger.rows

    def job(self, device: str) -> Job:
        job = self.leaf.open_job(device)
        assert job is not None
        return job

    def kept(self, number: int) -> Tree:
        """What a device keeps, as of the last work that it knows to be accepted: all of it, after the last test."""
        return load_mine(site_file(self.folder / "state", "run", device_name(number))).accepted.tree
