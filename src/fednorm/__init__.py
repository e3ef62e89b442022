"""Normalization layers that work in federated learning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fednorm.core.method import Method as Method
    from fednorm.core.method import Part as Part
    from fednorm.core.optim import Optimizer as Optimizer
    from fednorm.core.optimizers import register_optimizer as register_optimizer
    from fednorm.core.state import Kind as Kind
    from fednorm.core.state import Policy as Policy
    from fednorm.core.state import entries as entries
    from fednorm.core.state import kinds as kinds
    from fednorm.core.state import register_norm as register_norm
    from fednorm.data.federation import Federation as Federation
    from fednorm.data.given import from_clients as from_clients
    from fednorm.data.given import from_pool as from_pool
    from fednorm.data.own import register_data as register_data
    from fednorm.data.own import register_partition as register_partition
    from fednorm.engines.clock.schedule import register_schedule as register_schedule
    from fednorm.errors import ConfigError as ConfigError
    from fednorm.errors import FednormError as FednormError
    from fednorm.errors import UserCodeError as UserCodeError
    from fednorm.halves import wire as wire
    from fednorm.halves.founding import found as found
    from fednorm.halves.loop import load as load
    from fednorm.halves.loop import local_rules as local_rules
    from fednorm.halves.loop import merge as merge
    from fednorm.halves.loop import split as split
    from fednorm.halves.messages import Update as Update
    from fednorm.halves.prepared import prepare as prepare
    from fednorm.halves.reception import Reception as Reception
    from fednorm.halves.server import Server as Server
    from fednorm.halves.site import Site as Site
    from fednorm.methods import known_methods as known_methods
    from fednorm.methods import parse as parse
    from fednorm.methods import register as register
    from fednorm.models.output import output as output
    from fednorm.models.registry import register_model as register_model
    from fednorm.running.api import run as run
    from fednorm.running.comparison import compare as compare
    from fednorm.running.config import RunConfig as RunConfig
    from fednorm.running.results import Result as Result
    from fednorm.running.resuming import resume as resume
    from fednorm.running.stopping import Stop as Stop
    from fednorm.scoring.own_task import Task as Task
    from fednorm.scoring.tasks import TaskData as TaskData
    from fednorm.scoring.tasks import register_task as register_task
    from fednorm.views.export import export as export

__version__ = "0.1.0"

# Names are imported on first use, so that `import fednorm` and `fednorm --help` do not wait for torch.
_HOME = {
    "ConfigError": "errors",
    "Federation": "data.federation",
    "FednormError": "errors",
    "Kind": "core.state",
    "Method": "core.method",
    "Optimizer": "core.optim",
    "Part": "core.method",
    "Policy": "core.state",
    "Reception": "halves.reception",
    "Result": "running.results",
    "RunConfig": "running.config",
    "Server": "halves.server",
    "Site": "halves.site",
    "Stop": "running.stopping",
    "Task": "scoring.own_task",
    "TaskData": "scoring.tasks",
    "Update": "halves.messages",
    "UserCodeError": "errors",
    "compare": "running.comparison",
    "entries": "core.state",
    "export": "views.export",
    "found": "halves.founding",
    "from_clients": "data.given",
    "from_pool": "data.given",
    "kinds": "core.state",
    "known_methods": "methods",
    "load": "halves.loop",
    "local_rules": "halves.loop",
    "merge": "halves.loop",
    "output": "models.output",
    "parse": "methods",
    "prepare": "halves.prepared",
    "register": "methods",
    "register_data": "data.own",
    "register_model": "models.registry",
    "register_norm": "core.state",
    "register_optimizer": "core.optimizers",
    "register_partition": "data.own",
    "register_schedule": "engines.clock.schedule",
    "register_task": "scoring.tasks",
    "resume": "running.resuming",
    "run": "running.api",
    "split": "halves.loop",
    "wire": "halves",
}
__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fednorm' has no attribute '{name}'")
    home = f"fednorm.{_HOME[name]}"
    found = getattr(importlib.import_module(home), name, None)
    return importlib.import_module(f"{home}.{name}") if found is None else found


def __dir__() -> list[str]:
    return __all__
