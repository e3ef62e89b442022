"""Which code a job names, and whether a site lets it run: by the list and the right of NVFlare's own components."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.app_common.widgets.component_path_authorizer import CLASS_ALLOW_LIST, ComponentPathAuthorizer

from fednorm.core.expression import parse_term
from fednorm.errors import ConfigError
from fednorm.files import write_json
from fednorm.nvflare.setup import dotted, is_code
from fednorm.running.config import RunConfig

ALLOWED = "fednorm.nvflare."
"""what a site's class_allow_list must have for jobs that bring no code"""


class Permission:
    """A site's answer to a path such as `hospital.data.load`: silence, or a refusal."""

    def __init__(self, fl_ctx: FLContext) -> None:
        self._context = fl_ctx
        self._authorizer = ComponentPathAuthorizer()

    def __call__(self, path: str) -> None:
        try:
            self._authorizer.authorize_component_config({"path": path}, fl_ctx=self._context)
        except UnsafeComponentError:
            raise ConfigError(
                f"the job names code, '{path}', which this site does not permit; add it to class_allow_list in "
                "local/resources.json, or submit the job with its code where the right byoc is granted"
            ) from None


def code_paths(config: RunConfig) -> list[str]:
    """The code that a config names, as a site's class_allow_list has it."""
    model = parse_term(config.model, "model", "resnet20(shortcut=B)").name
    return [dotted(name) for name in (*(name for name in (model, config.data.name) if is_code(name)), *config.use)]


def permit_in(workspace: Path, code: Sequence[str]) -> None:
    """Let the sites of a simulator's workspace build our components, and run this code, unless it has its own list."""
    local = workspace / "local"
    files = [local / name for name in ("resources.json", "resources.json.default")]
    target = next((path for path in files if path.exists()), files[1])
    resources: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {"format_version": 2}
    listed = resources.get(CLASS_ALLOW_LIST, list(DEFAULT_CLASS_ALLOW_LIST))
    missing = [path for path in (ALLOWED, *code) if path not in listed and "*" not in listed]
    local.mkdir(parents=True, exist_ok=True)
    write_json(target, {**resources, CLASS_ALLOW_LIST: [*listed, *missing]})
