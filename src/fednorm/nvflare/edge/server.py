"""NVFlare's side of the server: an assessor that answers reports, and a model manager around the desk.

NVFlare's own manager sums up what leaves have summed up before, sends lists of floats and forgets entries that no
device sent. This one has fednorm's server half inside: it keeps the whole schema, sees each device's update, checks it
against the very model that the device was sent, and holds no rule of any method.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_event_type import AppEventType
from nvflare.edge.assessor import Assessment, Assessor
from nvflare.edge.assessors.model_manager import ModelManager

from fednorm.errors import FednormError
from fednorm.nvflare.component import course_of, fail
from fednorm.nvflare.edge.desk import Desk
from fednorm.nvflare.edge.jobs import Pace
from fednorm.nvflare.edge.leaf import MESSAGE, sender


class NormModelManager(ModelManager):
    """The global model with its whole schema, and the versions that devices' updates make of it."""

    def __init__(self, run: dict[str, Any], pace: dict[str, Any]) -> None:
        """A `Setup` and a `Pace` as JSON values."""
        super().__init__()
        self.run, self.pace = run, pace
        self._desk: Desk | None = None

    @property
    def desk(self) -> Desk:
        if self._desk is None:
            raise RuntimeError("the manager was asked before START_RUN")
        return self._desk

    def initialize_model(self, model: Any, fl_ctx: FLContext) -> None:
        """Begin a course; the model is built as every device builds it, so none is given."""
        self._desk = Desk(course_of(self, self.run, fl_ctx), Pace(**self.pace))

    def process_updates(self, model_updates: Mapping[str, Any], fl_ctx: FLContext) -> bool:
        """Take a child's report; what cannot be used is refused in one line, and the rest goes on."""
        before = self.current_model_version
        self.desk.hear(sender(fl_ctx), model_updates)
        self.current_model_version = self.desk.version
        if self.current_model_version > before:
            self.generate_new_model(fl_ctx)
        return True

    def generate_new_model(self, fl_ctx: FLContext) -> None:
        """Tell whoever listens that there is a new version, which arrivals made."""
        self.current_model = self.desk.tree
        self.fire_event(AppEventType.GLOBAL_WEIGHTS_UPDATED, fl_ctx)

    def prune_model_versions(self, versions_to_keep: set[int], fl_ctx: FLContext) -> None:
        """Nothing to do: a version is kept as long as a device has it, which the server's half knows."""


class NormAssessor(Assessor):
    """Answers reports with jobs, until the last version is made and tested."""

    def __init__(self, model_manager_id: str = "model_manager") -> None:
        super().__init__()
        self.model_manager_id = model_manager_id
        self._lock = threading.Lock()
        self._manager: NormModelManager | None = None
        self._failed = False
        self.register_event_handler(EventType.START_RUN, self._begin)

    def _begin(self, event_type: str, fl_ctx: FLContext) -> None:
        manager = cast(Any, fl_ctx.get_engine()).get_component(self.model_manager_id)
        if not isinstance(manager, NormModelManager):
            kind = type(manager).__name__
            self.system_panic(f"component '{self.model_manager_id}' is a {kind}, not fednorm's model manager", fl_ctx)
            return
        self._manager = manager
        self._guarded(lambda: manager.initialize_model(None, fl_ctx), fl_ctx)

    def start_task(self, fl_ctx: FLContext) -> Shareable:
        return Shareable()

    def process_child_update(self, update: Shareable, fl_ctx: FLContext) -> tuple[bool, Shareable | None]:
        manager, report = self._manager, update.get(MESSAGE)
        if manager is None or self._failed or not isinstance(report, dict):
            return False, None
        with self._lock:
            self._guarded(lambda: manager.process_updates(report, fl_ctx), fl_ctx)
            if self._failed:
                return False, None
            return True, Shareable({MESSAGE: manager.desk.reply(sender(fl_ctx), report.get("sheets", ()))})

    def assess(self, fl_ctx: FLContext) -> Assessment:
        manager = self._manager
        if manager is None or self._failed:
            return Assessment.WORKFLOW_DONE
        with self._lock:
            self._guarded(manager.desk.go_on, fl_ctx)
        return Assessment.WORKFLOW_DONE if self._failed or manager.desk.course.over else Assessment.CONTINUE

    def finalize(self, fl_ctx: FLContext) -> None:
        """Write what came out; of a run that failed, the rows and the reason are there."""
        if self._manager is not None and self._manager.desk.course.over:
            self._manager.desk.course.end()

    def _guarded(self, act: Callable[[], object], fl_ctx: FLContext) -> None:
        """Do something; where the run cannot go on, NVFlare ends it with the one line that says why."""
        try:
            act()
        except FednormError as error:
            self._failed = True
            fail(self, error, fl_ctx)
        except Exception as error:  # NVFlare would log it and ask again and again
            self._failed = True
            self.log_exception(fl_ctx, "a fault in fednorm itself; please report it")
            self.system_panic(f"{type(error).__name__}: {error}", fl_ctx)
