"""The pages say what the code does: generated ones are current, examples run, every option named exists."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, is_typeddict

import pytest

import fednorm
import tiny
from command import fednorm as command
from fednorm import models
from fednorm.core.expression import literal, parse_term
from fednorm.core.state import Kind, digest
from fednorm.data.partition import PARTITIONS, find_partition
from fednorm.errors import ConfigError
from fednorm.methods import known_methods, parse
from fednorm.running import records
from fednorm.running.config import RunConfig, all_fields, updated
from fednorm.strategies import joined, known_strategies, split

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CODE = re.compile(r"`([^`]+)`")


def load_file(path: Path) -> ModuleType:
    """Import a file that is no part of a package."""
    spec = importlib.util.spec_from_file_location(path.stem.lstrip("0123456789_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten afterwards."""
    known_methods()
    home = sys.modules["fednorm.core.registry"]  # the package's own attribute of this name is the function
    monkeypatch.setattr(home, "_REGISTRY", dict(vars(home)["_REGISTRY"]))


def test_the_methods_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_file(ROOT / "tools" / "make_methods_page.py").main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_methods_page_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = load_file(ROOT / "tools" / "make_methods_page.py")
    monkeypatch.setattr(tool, "PAGE", tmp_path / "methods.md")
    monkeypatch.setattr(tool, "page", lambda: "new\n")
    (tmp_path / "methods.md").write_text("old\n")
    assert tool.main(["--check"]) == 1
    assert capsys.readouterr().err == "docs/methods.md is out of date; run python tools/make_methods_page.py\n"
    assert tool.main([]) == 0
    assert tool.main(["--check"]) == 0


def test_the_records_page_is_current() -> None:
    tool = load_file(ROOT / "tools" / "make_records_page.py")
    assert (DOCS / "records.md").read_text() == tool.page(), "run `make docs`"


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ("make_settings_page", "settings.md"),
        ("make_api_page", "python_api.md"),
        ("make_reliability_page", "reliability.md"),
    ],
)
def test_the_pages_of_settings_and_names_are_current(tool: str, name: str) -> None:
    assert (DOCS / name).read_text() == load_file(ROOT / "tools" / f"{tool}.py").page(), "run `make docs`"


def test_the_page_of_settings_names_every_field_and_partition() -> None:
    page = (DOCS / "settings.md").read_text()
    for name in (*all_fields(), *PARTITIONS):
        assert f"| `{name}` |" in page


def test_the_page_of_the_python_api_names_everything_public() -> None:
    page = (DOCS / "python_api.md").read_text()
    for name in set(fednorm.__all__) - {"__version__"}:
        assert f"\n### {name}\n" in page


@pytest.mark.parametrize("number", range(2))
def test_the_examples_of_the_python_api_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = python_blocks(DOCS / "python_api.md")
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block.py").write_text(blocks[number])
    runpy.run_path("block.py", run_name="__main__")
    assert "fixbn(at=0.5)" in (told := capsys.readouterr().out) or told.startswith("fedavg 0 1 ")


def test_the_worked_recipe_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = ROOT / "examples" / "compare.toml"
    assert recipe.read_text().rstrip() in (DOCS / "settings.md").read_text()
    quick = ("--model", "mlp_bn(width=16)", "--rounds", "2", "--local-steps", "1", "--engine", "sequential")
    quick += ("--set", "data.train_limit=400")
    monkeypatch.chdir(tmp_path)
    planned = command("compare", "--config", recipe, *quick, "--dry-run")
    assert planned.code == 0, planned.err
    assert "for 6 runs; nothing was written" in planned.out
    done = command("compare", "--config", recipe, *quick, "--seeds", "7,", "--out", "all", "--quiet")
    assert done.code == 0, done.err
    assert len(list((tmp_path / "all").glob("*-seed7"))) == 3


def test_the_records_page_names_every_record_and_every_file(tmp_path: Path) -> None:
    page = (DOCS / "records.md").read_text()
    for name in (name for name, cls in vars(records).items() if is_typeddict(cls)):
        assert f"### {name}\n" in page
    fednorm.run(out=tmp_path / "run", model="mlp_bn", rounds=1, local_steps=1, train_limit=200)
    for path in (tmp_path / "run").iterdir():
        assert f"| `{path.name}` |" in page


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.usefixtures("own_registry")
def test_the_page_on_adding_a_method_adds_one_that_trains(tmp_path: Path) -> None:
    (block,) = python_blocks(DOCS / "adding_a_method.md")
    assert block == (ROOT / "examples" / "own_method.py").read_text()
    method_lines = [line for line in block.partition('if __name__ == "__main__"')[0].splitlines() if line.strip()]
    assert len(method_lines) <= 15
    file = tmp_path / "slow_affine.py"
    file.write_text(block)
    load_file(file)

    def trained(factor: float) -> dict[Kind, float]:
        """How far each kind of trained tensor moved in two rounds."""
        made = tiny.plan(f"slow-affine(factor={factor})", rounds=2, train__weight_decay=0.0)
        run = tiny.play(made)
        moved = dict.fromkeys((Kind.WEIGHT, Kind.AFFINE), 0.0)
        for key, entry in made.prepared.facts.entries.items():
            if entry.kind in moved:
                moved[entry.kind] += float((run.server.tree[key] - made.prepared.initial[key]).abs().sum())
        return moved

    frozen, slow, usual = trained(0.0), trained(0.1), trained(1.0)
    assert frozen[Kind.AFFINE] < 1e-15 < slow[Kind.AFFINE] < usual[Kind.AFFINE]  # 0, but for the mean's last bit
    assert frozen[Kind.WEIGHT] > 0
    assert parse("slow-affine+gn+fixbn(affine=true,statistics=false)").name.startswith("slow-affine")


@pytest.mark.usefixtures("own_registry")
def test_the_page_on_the_two_halves_gives_the_numbers_of_the_simulator(tmp_path: Path) -> None:
    page: dict[str, Any] = {}
    for number, block in enumerate(python_blocks(DOCS / "halves.md")):
        file = tmp_path / f"block_{number}.py"
        file.write_text(block)
        page |= vars(load_file(file))
    plan = tiny.plan("control-variates+fedbn", rounds=3, train__momentum=0.0, eval__every=3)
    expected = digest(tiny.play(plan).server.tree)
    data = plan.federation
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(len(data.clients) + 1) as pool:
        served = pool.submit(
            page["serve"], listener, tmp_path, len(data.clients), tiny.residual_net(), plan.method, plan.work
        )

        def connect() -> socket.socket:
            return socket.create_connection(listener.getsockname(), timeout=2)

        for client, rows in enumerate(data.clients):
            own = (data.x[rows], data.y[rows])
            given = (tmp_path, f"client-{client}", tiny.residual_net(), own, plan.task, served.done)
            pool.submit(page["take_part"], connect, *given)
        assert digest(served.result(600)) == expected


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), target


def reading_rows() -> list[list[str]]:
    lines = (DOCS / "readings.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if row[-1] not in ("---", "the other reading")]


def exists(code: str) -> bool:
    """Whether a piece of code on the page is a setting, a method, a model or a partition that fednorm accepts."""
    field, _, value = code.partition("=")
    if field in all_fields():
        return bool(updated(RunConfig(), {field: literal(value)}))
    term = parse_term(code.partition("+")[0], "expression", "")
    if term.name in known_strategies():
        strategy, method = split(code)
        return bool(joined(strategy, method))
    if term.name in known_methods():
        return bool(parse(code))
    if term.name in models.MODELS:
        return bool(models.build(term.name, **term.options).state_dict())
    return bool(find_partition(term.name, term.options))


def offered() -> list[str]:
    code = [code for row in reading_rows() for cell in row[2:] for code in CODE.findall(cell)]
    return sorted({each for each in code if not each.startswith(("--", "<"))})


@pytest.mark.parametrize("code", offered())
def test_every_reading_that_is_offered_exists(code: str) -> None:
    assert exists(code)


def test_the_check_of_readings_finds_mistakes() -> None:
    for wrong in ("fixbn(affin=true)", "train.weights=alike", "resnet20(shortcut=C)", "dirichlet(alpha=1)"):
        with pytest.raises(ConfigError):
            exists(wrong)


def test_all_numbered_readings_are_there_and_say_what_else_there_is() -> None:
    rows = reading_rows()
    numbered = [row[0] for row in rows if row[0]]
    assert sorted(numbered, key=lambda number: int(number[1:])) == [f"A{number}" for number in range(1, 27)]
    for _, question, ours, other in rows:
        assert question.rstrip(".").endswith("?") or question.endswith(".")
        assert ours
        assert CODE.search(other) or re.search(r"not offered|refused|None:|None", other, re.IGNORECASE), other


def test_the_benchmarks_page_shows_the_stored_numbers() -> None:
    benchmark = load_file(ROOT / "benchmarks" / "inference.py")
    stored = json.loads((ROOT / "benchmarks" / "results" / "inference_cpu.json").read_text())
    assert benchmark.table(stored) in (ROOT / "benchmarks" / "README.md").read_text()
    assert stored.keys() >= {"command", "commit", "hardware", "versions", "settings", "results"}


@pytest.mark.usefixtures("own_registry")
def test_the_example_of_an_own_method_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "own_method.py"), run_name="__main__")
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["method", "pooled", "own_client", "kB/round"]
    assert line.split()[0] == "slow-affine(factor=0.2)+fixbn"
