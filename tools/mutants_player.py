"""Run chosen tests in a process of their own, forked from one that has torch loaded already, in a copy of the tree."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

FAST = ("torch", "numpy", "hypothesis", "safetensors.torch", "typer", "rich", "PIL.Image", "torch.fx", "torch.func")
"""Imported once and for all before the first fork; nothing of the package is."""


class Chosen:
    """Runs these tests alone, in this order, and tells which one failed first."""

    def __init__(self, ids: list[str], told: Path) -> None:
        self.places = {id: place for place, id in enumerate(ids)}
        self.told = told

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.places), key=lambda i: self.places[i.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.told.write_text(json.dumps({"by": report.nodeid}))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.told.write_text(json.dumps({"by": f"{report.nodeid} (cannot be collected)"}))


class Watcher:
    """Takes down which functions of the package each test runs, and how long it takes; only of tests that pass."""

    def __init__(self, source: Path, told: Path) -> None:
        self.source, self.told = f"{source}/", told
        self.tests: dict[str, list[Any]] = {}
        self.names: dict[CodeType, str | None] = {}
        self.seen: set[str] = set()

    def _name(self, code: CodeType) -> str | None:
        if not code.co_filename.startswith(self.source):
            return None
        function = code.co_qualname.split(".<locals>")[0]
        return None if function.startswith("<") else f"{code.co_filename.removeprefix(self.source)}::{function}"

    def _trace(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if code not in self.names:
            self.names[code] = self._name(code)
        name = self.names[code]
        if name is not None:
            self.seen.add(name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.seen, began = set(), time.perf_counter()
        self.tests[item.nodeid] = [0.0, []]
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            if item.nodeid in self.tests:
                self.tests[item.nodeid] = [round(time.perf_counter() - began, 3), sorted(self.seen)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.tests.pop(report.nodeid, None)

    def pytest_sessionfinish(self) -> None:
        self.told.write_text(json.dumps(self.tests))


class Playing:
    """Tests that run in a child process, with a limit of time; `told` is a file for what they have to say."""

    def __init__(self, tree: Path, files: list[str], plugin: Chosen | Watcher, limit: float) -> None:
        self.told, self.limit, self.began = plugin.told, limit, time.monotonic()
        self.told.unlink(missing_ok=True)
        self.child = os.fork()
        if not self.child:
            self._become_pytest(tree, files, plugin)

    def _become_pytest(self, tree: Path, files: list[str], plugin: Chosen | Watcher) -> None:
        code = 3
        try:
            os.setsid()
            os.chdir(tree)
            with (self.told.parent / f"{self.told.stem}.log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            sys.path.insert(0, str(tree / "src"))
            os.environ["PYTHONPATH"] = str(tree / "src")
            options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
            options += ["-x"] if isinstance(plugin, Chosen) else []
            code = int(pytest.main([*options, *files], plugins=[plugin]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def result(self) -> tuple[int | None, float] | None:
        """(exit code, seconds) once it is over; None as the code if it took too long."""
        seconds = time.monotonic() - self.began
        child, status = os.waitpid(self.child, os.WNOHANG)
        if not child and seconds < self.limit:
            return None
        self.end()
        if not child:
            os.waitpid(self.child, 0)
        return (os.waitstatus_to_exitcode(status) if child else None), round(seconds, 1)

    def end(self) -> None:
        """End it, and whatever it has started."""
        try:
            os.killpg(self.child, signal.SIGKILL)
        except ProcessLookupError:
            return

    def news(self) -> dict[str, Any]:
        return json.loads(self.told.read_text()) if self.told.exists() else {}
