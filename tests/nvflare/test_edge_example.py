"""The edge examples: the simulator's is run, what the hierarchy said is read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from simulated import LIMIT

pytestmark = pytest.mark.nvflare

EXAMPLES = Path(__file__).parents[2] / "examples" / "nvflare" / "edge"


def test_the_simulators_example_ends_with_every_devices_own_score(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "simulate.py"), str(tmp_path / "work")]
    env = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    made = re.findall(r"^version (\d): devices \[\d, \d\], staleness \[\d+, \d+\], loss \d", done.stdout, re.MULTILINE)
    assert made == [str(version) for version in range(1, 9)]
    told = re.findall(r"^device (\d): accuracy ([\d.]+) .* counted \{(\d+)\} batches$", done.stdout, re.MULTILINE)
    assert [device for device, _, _ in told] == list("012345")
    assert sum(int(counted) for _, _, counted in told) == 8 * 2 * 15  # every update that made a version, and no other
    assert any(int(counted) > 15 for _, _, counted in told)
    assert sum(float(accuracy) for _, accuracy, _ in told) / 6 > 40


def test_the_committed_log_of_the_hierarchy_is_that_of_a_whole_run() -> None:
    text = (EXAMPLES / "hierarchy.log").read_text()
    assert re.findall(r"^  version (\d+) of 40:", text, re.MULTILINE) == [str(version) for version in range(1, 41)]
    assert "FINISHED:COMPLETED; the device ended with code 0" in text
    merged = re.findall(r"^  version (\d+) of 40:.* device-000006 (\d+)", text, re.MULTILINE)
    told = re.findall(r"^  (takes part in job|device phone#6, round \d+)", text, re.MULTILINE)
    rounds = [int(line.rsplit(" ", 1)[1]) for line in told if "round" in line]
    # What either process answered was merged from the version it was asked for: a kill loses nothing, nothing is twice.
    assert [int(version) - int(staleness) for version, staleness in merged] == rounds[: len(merged)]
    restart = told.index("takes part in job", 1)
    assert 1 <= restart - 1 < len(merged), "one process did it all"
    counted = re.search(r"device-000006: 10 entries, batches counted by its norms: \[(\d+)\]", text)
    assert counted is not None
    assert int(counted[1]) == 4 * len(merged)  # what came too late does not count
