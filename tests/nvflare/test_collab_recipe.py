"""What a recipe makes of `transport`, what it refuses, the filters that calls pass, and a site's desk."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

import torch
from collab_several import Noting, Scaled, for_processes, in_engine, left_in, setup_of
from nvflare.apis.fl_constant import FilterKey, FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.private.privacy_manager import Scope
from nvflare.recipe import SimEnv
from simulated import LIMIT

from fednorm.core.state import digest
from fednorm.errors import ConfigError, StateError, WireError
from fednorm.halves import wire
from fednorm.halves.messages import Hello, Message, Refusal, Request, Update, Welcome
from fednorm.nvflare import Recipe
from fednorm.nvflare.calls import Desk
from fednorm.nvflare.chain import passed
from fednorm.nvflare.collab import refuse_absent
from fednorm.nvflare.course import Course
from fednorm.nvflare.member import Member
from fednorm.nvflare.permission import permit_in
from fednorm.nvflare.same import refuse_incomparable
from fednorm.running.plan import make_plan

pytestmark = pytest.mark.nvflare


def made(folder: Path, method: str, **settings: Any) -> Any:
    data = setup_of(folder, "fedavg", run_id="x").config.data.name
    return Recipe(**{"method": method, "model": "mlp_bn", "data": data, "num_rounds": 2, **settings})


def job_of(recipe: Recipe, folder: Path) -> dict[str, Any]:
    recipe.export(str(folder))
    return {
        path.name: json.loads(path.read_text()) for path in (folder / "fednorm").rglob("*.json") if "app" in str(path)
    } | {"custom": list((folder / "fednorm").rglob("custom"))}


@pytest.mark.parametrize(
    ("method", "transport", "workflow"),
    [
        ("fedbn", None, "fednorm.nvflare.server.NormController"),
        ("fedbn", "collab", "fednorm.nvflare.collab.NormCollabController"),
        ("fedbuff(b=2)+fedbn", None, "fednorm.nvflare.collab.NormCollabController"),
    ],
)
def test_a_job_has_one_workflow_and_brings_no_code(
    method: str, transport: str | None, workflow: str, tmp_path: Path
) -> None:
    job = job_of(made(tmp_path, method, transport=transport), tmp_path / "job")
    (found,) = job["config_fed_server.json"]["workflows"]
    assert found["path"] == workflow
    assert job["custom"] == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tasks": (
        {"method": "fedbuff(b=2)+fedbn", "transport": "tasks"},
        "'fedbuff(b=2)+fedbn' takes updates as they come, and tasks come in rounds; use transport='collab'",
    ),
    "script": (
        {"method": "fedbn", "transport": "collab", "data": None, "train_script": "train.py", "min_clients": 2},
        "train_script='train.py' is a script of the Client API, which calls cannot reach; use transport='tasks', "
        "a method without a strategy, or data= in place of the script",
    ),
    "transport": (
        {"method": "fedbn", "transport": "pigeons"},
        "transport 'pigeons' is not known; known: collab, tasks.",
    ),
    "times": (
        {"method": "fedbuff(b=2)+fedbn", "times": "shifted"},
        "clock.times=shifted is virtual time, which fednorm's simulator alone has; on NVFlare sites take the time they "
        "take: leave it out",
    ),
    "concurrency": (
        {"method": "fedbuff(b=2)+fedbn", "concurrency": 4},
        "clock.concurrency=4 but only 3 clients train; give at most that many",
    ),
    "exchanges": (
        {"method": "fedbuff(b=2)+decoupled"},
        "'decoupled' takes 2 exchanges with the same clients to a round, and here every client has one job at a time; "
        "play it in rounds, or take another method here",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_is_refused_by_name(name: str, tmp_path: Path) -> None:
    settings, text = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        made(tmp_path, **settings)
    assert str(caught.value) == text


def test_bits_are_compared_where_there_are_any(tmp_path: Path) -> None:
    refuse_incomparable(setup_of(tmp_path, "fedbuff(b=2)+fedbn", run_id="x", concurrency=1).config)
    refuse_incomparable(setup_of(tmp_path, "fedbn", run_id="x").config)
    with pytest.raises(ConfigError, match=r"--check compares bits, and 'fedbuff\(b=2\)\+fedbn' takes updates in the"):
        refuse_incomparable(setup_of(tmp_path, "fedbuff(b=2)+fedbn", run_id="x").config)


def test_a_job_does_not_begin_without_its_sites() -> None:
    refuse_absent(["a", "b"], ["b", "a"], 2)
    refuse_absent([], ["b", "a"], 2)
    with pytest.raises(ConfigError) as caught:
        refuse_absent(["a", "b", "c"], ["b"], 1)
    assert str(caught.value) == ("sites are missing (a, c of 3); start the job with all of them, or give other sites=")
    with pytest.raises(ConfigError, match=r"sites are missing \(1 of 3\); "):
        refuse_absent([], ["a", "b"], 3)


def update_of(folder: Path) -> tuple[Request, Update, Welcome]:
    """A request of a run's first exchange, a site's answer to it, and the welcome that came with it."""
    setup = setup_of(folder, "fedbn", run_id="x")
    course = Course(setup, folder / "server", folder / "records", "x", lambda line: None)
    members = {name: Member(setup, name, folder / name) for name in ("site-1", "site-2", "site-3")}
    for name, member in members.items():
        course.greet(name, member.hello())
    course.begin()
    welcome, request = course.asked()["site-1"]
    answer = members["site-1"].answer(welcome, request)
    assert isinstance(answer, Update)
    return request, answer, welcome


def test_filters_of_a_site_see_calls_as_they_see_tasks(tmp_path: Path) -> None:
    request, update, welcome = update_of(tmp_path)
    scope, fl_ctx = Scope(), FLContext()
    assert passed(update, fl_ctx) is update
    fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True)
    assert passed(update, fl_ctx) is update
    scope.add_task_result_filter(Scaled(""), FilterKey.OUT)
    scope.add_task_data_filter(Noting(str(tmp_path / "came")), FilterKey.IN)
    changed = passed(update, fl_ctx)
    assert isinstance(changed, Update)
    assert changed.shared.keys() == update.shared.keys()
    assert all(torch.equal(changed.shared[key], 2 * value) for key, value in update.shared.items())
    assert wire.decode(wire.encode(changed)).report == update.report  # type: ignore[union-attr]
    same = passed(request, fl_ctx, welcome)
    assert isinstance(same, Request)
    assert digest(same.tree) == digest(request.tree)
    assert json.loads((tmp_path / "came").read_text()) == sorted(f"tree/{key}" for key in request.tree)


def test_a_filter_that_fails_or_alters_what_comes_lets_nothing_pass(tmp_path: Path) -> None:
    request, update, welcome = update_of(tmp_path)
    scope, fl_ctx = Scope(), FLContext()
    fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True)
    scope.add_task_data_filter(Scaled(""), FilterKey.IN)
    scope.add_task_result_filter(Noting(str(tmp_path)), FilterKey.OUT)  # a folder cannot be written
    with pytest.raises(WireError, match=r"entry '.*': was altered on the way \(its digest differs\)"):
        passed(request, fl_ctx, welcome)
    with pytest.raises(WireError, match=r"^a filter let nothing out: .*Is a directory"):
        passed(update, fl_ctx)


def test_a_recipe_over_collab_in_the_simulator(tmp_path: Path) -> None:
    """As users run it, with a filter of theirs: same bits, and the filter saw all that left."""
    setup = setup_of(tmp_path, "fedbn", run_id="x")
    recipe = Recipe(config=setup.config, transport="collab", run_id="x", state_dir=str(tmp_path / "state"))
    recipe.add_client_output_filter(Noting(str(tmp_path / "left")), tasks=["train"])
    workspace = tmp_path / "ws"
    permit_in(workspace / "fednorm", ["collab_several."])
    with for_processes():
        recipe.execute(SimEnv(num_clients=3, workspace_root=str(workspace)))
    records = workspace / "fednorm" / "server" / "simulate_job" / "fednorm"
    assert left_in(records, tmp_path / "state", "x") == in_engine(setup)[0]
    seen = [json.loads(line) for line in (tmp_path / "left").read_text().splitlines()]
    shared = make_plan(setup.config).phases[0].shared
    updates = [keys for keys in seen if keys and keys[0].startswith("shared/")]
    assert updates == [sorted(f"shared/{key}" for key in shared)] * 12  # 4 rounds of 3 sites
    assert len(seen) == 15  # and their tests


HELLO = Hello(name="a", num_examples=1, schema="")


class Slow:
    """Work that is done once it is let go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def __call__(self) -> Message:
        assert self.go_on.wait(LIMIT)
        return HELLO


def test_a_desk_says_nothing_while_work_goes_on_and_then_its_answer_as_often_as_asked() -> None:
    desk, slow = Desk(), Slow()
    assert desk.begin(slow, 0.01) == b""
    assert desk.more(0.01) == b""
    slow.go_on.set()
    assert wire.decode(desk.more(LIMIT)) == HELLO
    assert wire.decode(desk.more(0)) == HELLO


def test_a_desk_does_one_thing_after_the_other() -> None:
    desk, slow = Desk(), Slow()
    desk.begin(slow, 0.01)
    assert desk.begin(lambda: Refusal("the second"), 0.05) == b""
    slow.go_on.set()
    assert wire.decode(desk.more(LIMIT)) == Refusal("the second")


def failing(error: Exception) -> Message:
    raise error


def test_what_fails_at_a_desk_is_told_and_does_not_stop_it() -> None:
    desk = Desk()
    with pytest.raises(WireError, match="nothing was begun here; ask this site anew"):
        desk.more(0)
    told = desk.begin(lambda: failing(StateError("its state was lost")), LIMIT)
    assert wire.decode(told) == Refusal("its state was lost")
    with pytest.raises(ValueError, match="a mistake in somebody's code"):
        desk.begin(lambda: failing(ValueError("a mistake in somebody's code")), LIMIT)
    assert wire.decode(desk.begin(lambda: HELLO, LIMIT)) == HELLO
