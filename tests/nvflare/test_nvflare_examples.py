"""The page on NVFlare shows what the examples run, and the examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.fl_context import FLContext
from simulated import LIMIT

from fednorm.halves.wire_files import load_mine
from fednorm.nvflare.watch import Watch

pytestmark = pytest.mark.nvflare

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
        [sys.executable, str(EXAMPLES / "simulate.py")], capture_output=True, text=True, check=False, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = re.fullmatch(r"fedbn: ([0-9.]+) % right, each site on examples of its own", done.stdout.splitlines()[-1])
    assert said
    assert float(said[1]) > 90


APART = """
import sys
from nvflare.recipe.sim_env import SimEnv
from fednorm.nvflare import Recipe

recipe = Recipe(
    method="fedbn", model="hello_net:Net", train_script="hello_train.py", train_args="--epochs 1", num_rounds=2,
    min_clients=2, num_classes=2, every=2, launch_external_process=True,
)
recipe.add_client_file("hello_net.py")
recipe.add_server_file("hello_net.py")
recipe.execute(SimEnv(num_clients=2, workspace_root=sys.argv[1]))
"""


def test_a_script_may_run_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Its site still tells one line a round, and keeps its state in its own workspace."""
    command = [sys.executable, "-c", APART, str(tmp_path)]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list(tmp_path.rglob("fednorm/model.safetensors"))) == 1
    for site in ("site-1", "site-2"):
        place = tmp_path / "fednorm" / site
        told = re.findall(r"round (\d): 9 entries, 4 shared, 5 local; 712 bytes up", (place / "log.txt").read_text())
        assert told == ["1", "2"]
        (state,) = place.glob("fednorm_state/*/site-*")
        assert load_mine(state).accepted.tree["1.num_batches_tracked"] == 16  # two rounds of eight batches


class Talker:
    """As much of NVFlare's communicator as a watch touches."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def client_is_active(self, client_name: str, reason: str, fl_ctx: FLContext) -> None:
        self.told.append(client_name)


def test_a_site_is_silent_once_nothing_was_heard_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("fednorm.nvflare.watch.time", SimpleNamespace(monotonic=lambda: now))
    talker = Talker()
    watch = Watch(talker)
    assert watch.seconds == 600
    assert not watch.is_silent("site-1")  # never heard of: it begins now
    now += 601
    talker.client_is_active("site-2", "jobHeartbeat", FLContext())
    assert watch.is_silent("site-1")
    assert not watch.is_silent("site-2")
    assert talker.told == ["site-2"]
