"""The page on NVFlare shows what the examples run, and the examples run."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nvflare.apis.fl_context import FLContext

from fednorm.nvflare.watch import Watch

pytestmark = [pytest.mark.nvflare, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "nvflare"


def test_the_page_shows_parts_of_the_examples() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "nvflare.md").read_text(), re.DOTALL)
    texts = [path.read_text() for path in EXAMPLES.glob("*.py")]
    assert len(blocks) == 2
    assert [block for block in blocks if not any(block in text for text in texts)] == []


def test_a_script_becomes_fedbn_in_the_simulator(tmp_path: Path) -> None:
    """The three lines are enough: ten rounds of the script learn what features, in units of each site's own, mean."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "simulate.py")], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = re.fullmatch(r"fedbn: ([0-9.]+) % right, each site on examples of its own", done.stdout.splitlines()[-1])
    assert said
    assert float(said[1]) > 90


class Talker:
    """As much of NVFlare's communicator as a watch touches."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def client_is_active(self, client_name: str, reason: str, fl_ctx: FLContext) -> None:
        self.told.append(client_name)


def test_a_site_is_silent_once_nothing_was_heard_for_so_long() -> None:
    talker = Talker()
    watch = Watch(talker)
    assert watch.seconds == 600
    watch.seconds = 0.2
    assert not watch.is_silent("site-1")  # never heard of: it begins now
    time.sleep(0.3)
    talker.client_is_active("site-2", "jobHeartbeat", FLContext())
    assert watch.is_silent("site-1")
    assert not watch.is_silent("site-2")
    assert talker.told == ["site-2"]
