"""Times of jobs: what the built-in schedules draw, what a file says, what a user's function may say."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fednorm.engines.clock.schedule import SCHEDULES, Asked, Clients, Drawn, Times, make_schedule, register_schedule
from fednorm.errors import ConfigError

FIVE = Clients(5)


def test_every_job_of_equal_clients_takes_the_same_time() -> None:
    made = make_schedule("equal", FIVE)
    assert {made.times(seed, client, job) for seed in (0, 1) for client in range(3) for job in (1, 2)} == {(0, 1, 0)}
    assert make_schedule("equal(time=0.25)", FIVE).times(0, 0, 1) == Times(0.0, 0.25, 0.0)


def test_the_default_schedule_is_the_published_one() -> None:
    made = make_schedule("default", Clients(1000))
    assert isinstance(made, Drawn)
    assert (made.compute.means, made.compute.shares) == ((1.0, 1.3, 1.6), (0.25, 0.5, 0.25))
    times = [made.times(7, client, 1) for client in range(1000)]
    assert {each.download for each in times} == {0.1}
    lower = [each for each in times if 0.13 <= each.upload < 0.17]
    assert len(lower) + sum(0.23 <= each.upload < 0.27 for each in times) == 1000
    assert 400 < len(lower) < 600
    assert 1.1 < sum(each.compute for each in times) / 1000 < 1.5


def test_the_shifted_schedule_is_the_published_one() -> None:
    made = make_schedule("shifted", Clients(1000))
    times = [made.times(7, client, 1) for client in range(1000)]
    assert {each.download for each in times} == {0.02}
    assert all(0.04 <= each.upload < 0.06 or 0.09 <= each.upload < 0.11 for each in times)
    assert 0.085 < sum(each.compute for each in times) / 1000 < 0.115


def test_a_client_keeps_its_means() -> None:
    made = make_schedule("default", Clients(40))
    uploads = {client: {made.times(0, client, job).upload > 0.2 for job in range(1, 30)} for client in range(40)}
    assert Counter(map(len, uploads.values())) == {1: 40}
    assert len({each.pop() for each in uploads.values()}) == 2


def test_draws_depend_on_seed_client_and_job_alone() -> None:
    made = make_schedule("exponential(mean=2)", FIVE)
    first = [made.times(0, client, job).compute for client in range(5) for job in range(1, 5)]
    assert len(set(first)) == 20
    again = [made.times(0, client, job).compute for client in reversed(range(5)) for job in reversed(range(1, 5))]
    assert first == again[::-1]
    assert made.times(1, 0, 1) != made.times(0, 0, 1)


def test_an_exponential_time_is_the_quantile_of_its_luck() -> None:
    span = make_schedule("exponential(mean=2)", FIVE).compute  # pyright: ignore[reportAttributeAccessIssue]
    assert span.drawn(2.0, 0.5) == pytest.approx(2 * math.log(2))
    assert span.drawn(2.0, 0.0) == 0


def files(folder: Path, clients: dict[str, dict[str, object]]) -> dict[str, Path]:
    """The same clients as JSON, TOML and CSV."""
    columns = ["download", "compute", "upload", "around"]
    lines = [",".join([name, *(str(each.get(key, "")) or "0" for key in columns)]) for name, each in clients.items()]
    tables = [
        "\n".join([f'[clients."{name}"]', *(f"{key} = {json.dumps(value)}" for key, value in each.items())])
        for name, each in clients.items()
    ]
    texts = {
        "json": json.dumps({"clients": clients}),
        "toml": "\n".join(tables),
        "csv": "\n".join([",".join(["client", *columns]), *lines]),
    }
    found = {kind: folder / f"times.{kind}" for kind in texts}
    for kind, path in found.items():
        path.write_text(texts[kind], encoding="utf-8")
    return found


def test_a_file_says_the_means_of_each_client(tmp_path: Path) -> None:
    fixed: dict[str, object] = {"download": 0.5, "compute": 3, "upload": 0.25, "around": "fixed"}
    clients = {"0": fixed, "*": {"download": 0, "compute": 1.0, "upload": 0, "around": "exponential"}}
    for path in files(tmp_path, clients).values():
        made = make_schedule(f"file:{path}", FIVE)
        assert [made.times(0, 0, job) for job in (1, 2)] == [(0.5, 3.0, 0.25)] * 2
        assert made.times(0, 1, 1) == make_schedule("exponential(mean=1)", FIVE).times(0, 1, 1)


def test_a_file_may_name_clients_by_their_names(tmp_path: Path) -> None:
    path = files(tmp_path, {"north": {"compute": 2, "around": "fixed"}, "1": {"compute": 4, "around": "fixed"}})["json"]
    made = make_schedule(f"file:{path}", Clients(2, ("north", "south")))
    assert [made.times(0, client, 1).compute for client in (0, 1)] == [2, 4]


@pytest.mark.parametrize(
    ("clients", "told"),
    [
        ({"7": {"compute": 1}, "*": {}}, "names client '7', which the run does not have; it has clients 0 to 4"),
        ({"north": {}, "*": {}}, "names client 'north', which the run does not have; it has clients 0 to 4"),
        ({"0": {"compute": -1}, "*": {}}, ", client 0: compute=-1 is out of range; give 0 up to 1e+12"),
        ({"0": {"upload": "nan"}, "*": {}}, ", client 0: upload=nan is out of range; give 0 up to 1e+12"),
        ({"*": {"download": "soon"}}, ", client *: download=soon is out of range; give 0 up to 1e+12"),
        (
            {"0": {}},
            "has no times for client 1, one of 4; add them, or a client '*' for all that are not named",
        ),
        ({"*": {"around": "normal"}}, ", client *: around='normal' is neither exponential nor fixed"),
        ({"*": {"speed": 1}}, "field of schedule '{path}' 'speed'"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, clients: dict[str, dict[str, object]], told: str) -> None:
    path = files(tmp_path, clients)["json"]
    with pytest.raises(ConfigError, match=re.escape(told.replace("{path}", str(path)))) as problem:
        make_schedule(f"file:{path}", FIVE)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("gone.json", None, "does not exist; give a JSON, TOML or CSV file with times"),
        ("times.txt", "", "is none of .json, .toml, .csv; give a file of one of these kinds"),
        ("times.json", "{", "cannot be read: Expecting property name"),
        ("times.toml", "[", "cannot be read: "),
        ("times.json", "[]", "has no table of clients; write clients, and below each its download, compute, upload"),
        ("times.csv", "who\n1\n", "has no column client; write client,download,compute,upload in its first line"),
        ("times.csv", "client,compute\n0\n", "line 2: it has not as many columns as the first"),
        ("times.csv", "client,compute\n0,1\n0,2\n*,1\n", "has client 0 twice; keep one"),
        ("times.csv", "client,compute,compute\n*,1,2\n", "has column 'compute' twice; keep one"),
        (
            "times.json",
            '{"clients": {"0": {"compute": 1}, "0": {"compute": 2}, "*": {}}}',
            "cannot be read: it has '0' twice; keep one",
        ),
        (
            "times.toml",
            'around = "fixed"\n[clients."*"]\ncompute = 1.0\n',
            "has 'around' beside its clients; put it below each of them, or '*'",
        ),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(told)):
        make_schedule(f"file:{tmp_path / name}", FIVE)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("equal(time=-1)", "schedule 'equal': time=-1.0 is out of range; give a number above 0, up to 1e+12"),
        ("exponential(mean=0)", "schedule 'exponential': mean=0.0 is out of range; give a number above 0, up to 1e+12"),
        ("exponential(mean=nan)", "mean takes a number"),
        ("sometimes", "schedule 'sometimes' is not known; known: default, equal, exponential, "),
    ],
)
def test_schedules_that_are_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        make_schedule(text, FIVE)


def test_a_function_of_a_user_is_a_schedule() -> None:
    @register_schedule("by-number")
    def by_number(seed: int, client: int, job: int, slow: float = 2.0) -> tuple[float, float, float]:
        return 0.0, slow if client else -1.0, 0.0

    try:
        made = make_schedule("by-number(slow=3)", FIVE)
        assert made.times(0, 1, 1) == (0.0, 3.0, 0.0)
        with pytest.raises(ConfigError, match=r"'by-number' gives client 0 a compute of -1\.0; give 0 up to 1e\+12"):
            made.times(0, 0, 1)
        with pytest.raises(ConfigError, match="must take seed, client and job; it takes client"):
            register_schedule("odd")(lambda client: (0, 0, 0))
    finally:
        SCHEDULES._known.pop("by-number")  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("given", [1.0, (1.0, 2.0), (0.0, "soon", 0.0), None, "abc"])
def test_a_function_of_a_user_gives_three_numbers(given: Any) -> None:
    told = f"schedule 'odd' gives client 2 {given!r}; give three numbers, the times of download, training and upload"
    with pytest.raises(ConfigError, match=re.escape(told)):
        Asked("odd", lambda seed, client, job: given).times(0, 2, 1)
