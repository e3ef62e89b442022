"""The course of a run at the server, and a site's part in it, without anything that carries their messages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from course_by_hand import SITES, Federation, setup_of
from nvflare.apis.signal import Signal
from simulated import tiny

from fednorm.core.state import digest
from fednorm.errors import CheckpointError, FednormError
from fednorm.halves.wire_files import load_mine
from fednorm.nvflare.keeping import run_name, site_file
from fednorm.nvflare.member import Member
from fednorm.nvflare.recipe import Recipe
from fednorm.nvflare.server import NormController
from fednorm.running.config import updated
from fednorm.running.given import Objects
from fednorm.running.run import Run
from fednorm.running.store import Store

pytestmark = pytest.mark.nvflare


def test_the_order_of_arrival_changes_nothing(tmp_path: Path) -> None:
    setup = setup_of(method="fedbn")
    one = Federation(tmp_path / "1", setup).play(*SITES)
    other = Federation(tmp_path / "2", setup).play(*reversed(SITES))
    assert digest(one.course.server.tree) == digest(other.course.server.tree)
    for site in SITES:
        first, second = (site_file(tmp_path / each / site / "fednorm_state", "trial", site) for each in "12")
        assert first.read_bytes() == second.read_bytes()


def test_every_site_tells_one_line_a_round(tmp_path: Path) -> None:
    said = Federation(tmp_path, setup_of(method="fedbn", rounds=2)).play().said
    line = "16 entries, 6 shared, 10 local; 115752 bytes up, 115752 bytes down"
    assert [each for each in said if "entries" in each] == [f"round {number}: {line}" for number in (1, 1, 2, 2)]
    assert said[0] == f"run 'trial' starts clean; its state is kept in '{tmp_path / 'server' / 'trial'}'"


def test_phases_of_one_round_are_told_together(tmp_path: Path) -> None:
    said = Federation(tmp_path, setup_of(method="decoupled", rounds=1)).play().said
    assert [each.partition(":")[0] for each in said if "entries" in each] == ["round 1", "round 1"]


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "decoupled"},
        {"method": "hbn"},
        {"method": "sbn", "eval_every": 2},
        {"method": "posthoc"},
        {"method": "fedadam+fixbn"},
        {"method": "fedbn", "clients_per_round": 1, "rounds": 4},
        {"method": "fedavg", "data_val_fraction": 0.2, "train_weights": "uniform", "train_augment": "flip"},
    ],
    ids=lambda fields: fields["method"],
)
def test_methods_of_several_phases_have_the_bits_of_the_sequential_engine(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny(**fields)
    federation = Federation(tmp_path, Recipe(config=config).setup).play()
    run = Run(Objects().plan(updated(config, {"engine.name": "sequential"})), Store())
    rows = list(run.rounds())
    assert digest(federation.course.server.tree) == digest(run.server.tree)
    for name in ("stage", "exchanges", "bytes_up", "bytes_down", "train_loss"):
        assert [row[name] for row in federation.course.ledger.rows] == [row[name] for row in rows], name
    for client, site in enumerate(SITES):
        kept = load_mine(site_file(tmp_path / site / "fednorm_state", "trial", site))
        number = federation.course.server.state()[0]["accepted"].get(str(client), 0)
        assert digest(kept.as_of(number).accepted.tree) == digest(run.store.get(client).tree)


@pytest.mark.parametrize("after", range(4))
def test_a_server_that_is_started_again_goes_on(after: int, tmp_path: Path) -> None:
    setup = setup_of(method="fedbn", engine_quorum=None)
    whole = Federation(tmp_path / "whole", setup).play()
    federation = Federation(tmp_path / "cut", setup)
    federation.begin()
    for _ in range(after):
        federation.exchange()
    asked = federation.course.asked()
    welcome, request = asked["site-1"]
    federation.course.take("site-1", federation.members["site-1"].answer(welcome, request))  # lost with the server
    federation.members = {site: Member(setup, site, tmp_path / "cut" / site) for site in SITES}
    federation.course = federation.new_course()
    federation.play()
    assert federation.said[-1].startswith(f"round {3 if after < 4 else 0} of 3")
    assert digest(federation.course.server.tree) == digest(whole.course.server.tree)
    rows, wanted = ([{**row, "seconds": 0} for row in each.course.ledger.rows] for each in (federation, whole))
    assert rows == wanted
    for site in SITES:
        one, other = (site_file(tmp_path / each / site / "fednorm_state", "trial", site) for each in ("whole", "cut"))
        assert one.read_bytes() == other.read_bytes()


def test_a_run_is_continued_by_its_name_alone(tmp_path: Path) -> None:
    Federation(tmp_path, setup_of(rounds=2), run="mine").play()
    longer = Federation(tmp_path, setup_of(rounds=4), run="mine").play()
    note = "run 'mine' goes on after round 2 of 4, which had 2: what follows from the number follows the new one"
    assert longer.said[0] == note
    assert [row["round"] for row in longer.course.ledger.rows] == [1, 2, 3, 4]
    other = Federation(tmp_path, setup_of(rounds=1), run="other").play()
    assert other.said[0].startswith("run 'other' starts clean")
    with pytest.raises(CheckpointError, match="run 'mine' has 4 rounds already; give more than that"):
        Federation(tmp_path, setup_of(rounds=3), run="mine").play()
    with pytest.raises(CheckpointError, match="is of run 'mine' with another method, model, sites or settings"):
        Federation(tmp_path, setup_of(rounds=4, train_lr=0.5), run="mine").play()


class Patient(NormController):
    """Asks nobody: nobody would answer."""

    def _ask(self, *asked: Any) -> None:
        pass


def test_a_server_says_whom_it_waits_for(tmp_path: Path) -> None:
    abort, setup = Signal(), setup_of()
    course = Federation(tmp_path, setup).course
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        abort.trigger(True)

    course.say = say
    engine = SimpleNamespace(get_clients=lambda: [SimpleNamespace(name="site-1")])
    Patient(setup.to_json(), 2)._gather(course, abort, cast(Any, SimpleNamespace(get_engine=lambda: engine)))
    assert said == ["waits for 2 sites; here are site-1"]


def test_jobs_without_a_name_of_their_own_never_meet() -> None:
    assert run_name("mine", "simulate_job") == "mine"
    assert run_name(None, "0a1b-real-id") == "0a1b-real-id"
    assert run_name(None, "simulate_job") != run_name(None, "simulate_job")


@pytest.mark.parametrize("name", ["../up", "", "a/b", ".hidden", "x" * 101])
def test_a_run_id_that_is_no_folder_is_refused(name: str) -> None:
    with pytest.raises(FednormError, match="cannot name a folder; give letters, digits"):
        Recipe(config=tiny(), run_id=name)
