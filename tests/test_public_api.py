"""What `import fednorm` promises."""

from __future__ import annotations

import subprocess
import sys

import fednorm
import fednorm.compare  # so that the modules of these names are loaded, which must not hide the functions
import fednorm.prepare
import fednorm.registry
import fednorm.run


def test_public_names_are_pinned() -> None:
    assert sorted(fednorm.__all__) == [
        "ConfigError",
        "Federation",
        "FednormError",
        "Kind",
        "Method",
        "Part",
        "Policy",
        "RunConfig",
        "Update",
        "__version__",
        "compare",
        "entries",
        "from_clients",
        "kinds",
        "load",
        "local_rules",
        "merge",
        "parse",
        "prepare",
        "register",
        "register_norm",
        "registry",
        "run",
        "split",
    ]
    for name in fednorm.__all__:
        assert getattr(fednorm, name) is not None


def test_functions_win_over_the_modules_of_their_name() -> None:
    assert all(callable(getattr(fednorm, name)) for name in ("run", "compare", "prepare", "registry"))


def test_import_does_not_wait_for_torch() -> None:
    code = "import sys, fednorm; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
