"""What `import fednorm` promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fednorm


def test_public_names_are_pinned() -> None:
    assert sorted(fednorm.__all__) == [
        "ConfigError",
        "Federation",
        "FednormError",
        "Kind",
        "Method",
        "Optimizer",
        "Part",
        "Policy",
        "Reception",
        "Result",
        "RunConfig",
        "Server",
        "Site",
        "Stop",
        "Task",
        "TaskData",
        "Update",
        "UserCodeError",
        "__version__",
        "compare",
        "entries",
        "export",
        "found",
        "from_clients",
        "from_pool",
        "kinds",
        "known_methods",
        "load",
        "local_rules",
        "merge",
        "output",
        "parse",
        "prepare",
        "register",
        "register_data",
        "register_model",
        "register_norm",
        "register_optimizer",
        "register_partition",
        "register_schedule",
        "register_task",
        "resume",
        "run",
        "split",
        "wire",
    ]
    for name in fednorm.__all__:
        assert getattr(fednorm, name) is not None


def test_no_module_hides_a_public_name() -> None:
    """A module called `run` would take the place of the function once something imports it."""
    package = Path(fednorm.__file__).parent
    modules = {path.stem for path in package.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not modules & set(fednorm.__all__)


def test_import_does_not_wait_for_torch() -> None:
    code = "import sys, fednorm; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
