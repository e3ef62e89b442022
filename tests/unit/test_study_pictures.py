"""Pictures of studies and the page of results: what is drawn of which cells, from records made by hand."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from fednorm.errors import ConfigError
from fednorm.running.config import to_dict
from fednorm.running.records import RoundRow, RunResult
from fednorm.studies.figures import QUICK, draw, make_figure, panel_rows, picture_text
from fednorm.studies.library import Diverged, Library, Record, key_of, make_record
from fednorm.studies.measured import Measured
from fednorm.studies.panels import KINDS, probe_curves
from fednorm.studies.study import Study, StudyCell, all_studies, find_study

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]


def record(cell: StudyCell, seed: int, final: float) -> Record:
    """A run that was scored twice and ended at `final`."""
    config = cell.config
    rounds = [config.rounds // 2, config.rounds]
    scores = {"accuracy": final, "per_client": {"0": final - 1, "1": final + 1}}
    run = {
        "method": config.method,
        "seed": seed,
        "rounds": config.rounds,
        "metric": "accuracy",
        "final": {cell.score.protocol: scores},
        "curves": {"round": rounds, cell.score.protocol: [final / 2, final]},
        "seconds": 12.0,
        "ran": {"precision": "fp32", "device_name": "a machine"},
    }
    probes = [{"round": rounds[0], "probes": {"drift": 2.0}}]
    environment = {"commit": "0123456789abcdef", "command": "fednorm reproduce --next"}
    losses = {"round": rounds, "loss": [2.0, 1.0]}
    return Record(key_of(config), to_dict(config), cast("RunResult", run), losses, probes, ["a", "b"], environment)


def measured(study: Study, cells: Sequence[StudyCell] | None = None) -> list[Measured]:
    """Every cell with two seeds, at 60 and 62, and so on by its place."""
    return [
        Measured(cell, (record(cell, 0, 60.0 + number), record(cell, 1, 62.0 + number)))
        for number, cell in enumerate(study.cells() if cells is None else cells)
        if cell.selected in (None, "average")
    ]


def filled(study: Study, kind: str, results: Sequence[Measured] | None = None) -> dict[str, Any]:
    """The axes of every panel of a kind by its title."""
    from matplotlib.figure import Figure

    panels = KINDS[kind](study, results or measured(study))
    axes = {}
    for panel in panels:
        axes[panel.title] = Figure().subplots()
        panel.fill(axes[panel.title])
    return axes


def test_curves_have_a_panel_a_setting_and_a_line_a_method() -> None:
    study = find_study("fixbn.fedtan")
    axes = filled(study, "curves")
    assert list(axes) == ["partition n/a", "partition iid", "partition non_iid"]
    handles, labels = axes["partition iid"].get_legend_handles_labels()
    assert labels == ["fedtan", "fedavg_bn", "fedavg_gn", "heterofl_sbn", "feddna", "fixbn", "published mean"]
    # The first cell of this panel is the third of the study: its seeds end at 62 and 64.
    assert handles[0].get_ydata().tolist() == [31.5, 63.0]
    assert handles[0].get_xdata().tolist() == [5000, 10000]


def test_curves_against_steps_share_an_axis() -> None:
    axes = filled(find_study("fixbn.local_steps_curves"), "curves")
    handles, labels = axes["fedavg_gn, dataset cifar10"].get_legend_handles_labels()
    assert labels == [f"local steps {steps}" for steps in (1, 20, 100, 500, 2500)]
    assert [handle.get_xdata()[-1] for handle in handles] == [64_000, 64_000, 64_000, 64_000, 65_000]


def test_bars_stand_beside_what_was_published() -> None:
    axis = filled(find_study("fixbn.decoupled"), "bars")[""]
    assert [bar.get_height() for bar in axis.patches] == [52.0, 89.0, 61.0, 62.0]
    averages = filled(find_study("fedwon.t5"), "bars")
    assert list(averages) == ["batch size 32, agc True", "batch size 2, agc False"]


@pytest.mark.parametrize("id", ["fixbn.norms", "fixbn.tI", "fedwon.t5"])
def test_a_quick_picture_has_nothing_of_the_paper(id: str) -> None:
    study = find_study(id)
    quick = measured(study, study.cells(quick=True))
    figure = make_figure(study, quick, quick=True)
    labels = {label for axis in figure.axes for label in axis.get_legend_handles_labels()[1]}
    assert labels
    assert not [label for label in labels if "published" in label]
    assert not [line for axis in figure.axes for line in axis.get_lines() if line.get_linestyle() == ":"]
    shown = [each for each in quick if each.cell.setting.get("domain", "average") == "average"]
    bars = [bar for axis in filled(study, "bars", quick).values() for bar in axis.patches]
    assert [bar.get_height() for bar in bars] == [each.ours.mean for each in shown if each.ours]


def test_a_deviation_that_nobody_knows_has_no_whisker() -> None:
    study = find_study("fixbn.tH")  # whose numbers were published without
    (once, *_) = measured(study)
    axis = filled(study, "bars", [replace(once, records=once.records[:1])])[""]
    whiskers = [line for container in axis.containers if hasattr(container, "has_yerr") for line in container[2]]
    assert len(whiskers) == 2
    assert not any(len(segment) for line in whiskers for segment in line.get_segments())


def test_dotted_lines_are_named_in_the_legend() -> None:
    axis = filled(find_study("fixbn.norms"), "curves")[""]
    assert axis.get_legend_handles_labels()[1][-1] == "published mean"
    assert axis.get_xlabel() == "round"


def test_heat_maps_say_what_their_colours_are() -> None:
    study = find_study("fixbn.grid.tiny")
    figure = make_figure(study, measured(study))
    assert [axis.get_ylabel() for axis in figure.axes][-1] == "accuracy (%)"
    assert figure.axes[0].get_xlabel() == "local steps"


def test_heat_maps_are_by_two_axes() -> None:
    study = find_study("fixbn.grid.tiny")
    maps = filled(study, "heatmap")
    assert list(maps) == [
        f"{method}, budget {b}" for method in ("fedavg_bn", "fedavg_gn") for b in ("epochs", "rounds")
    ]
    axis = maps["fedavg_bn, budget epochs"]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["1", "20", "100", "500", "2500"]
    assert axis.images[0].get_array().shape == (5, 5)
    assert axis.images[0].get_array()[0, 0] == 61.0


@pytest.mark.parametrize("id", ["fixbn.f1", "fixbn.fedtan", "fixbn.norms", "fixbn.tI", "fixbn.curves", "fedwon.t6"])
def test_a_legend_lies_inside_its_picture(id: str) -> None:
    study = find_study(id)
    figure = make_figure(study, measured(study, study.cells(quick=True)), quick=True)
    figure.canvas.draw()
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_a_place_in_a_heat_map_means_the_same_in_all_of_them() -> None:
    study = find_study("fixbn.grid.tiny")
    asked = {("fedavg_bn", "20", "iid"), ("fedavg_bn", "1", "shards"), ("fedavg_gn", "20", "iid")}
    cells = [
        cell
        for cell in study.cells()
        if cell.setting["budget"] == "epochs"
        and (cell.method, cell.setting["local_steps"], cell.setting["partition"]) in asked
    ]
    for axis in filled(study, "heatmap", measured(study, cells)).values():
        assert [text.get_text() for text in axis.get_xticklabels()] == ["1", "20"]
        assert [text.get_text() for text in axis.get_yticklabels()] == ["iid", "shards"]
        assert axis.images[0].get_array().shape == (2, 2)


def test_scores_along_an_axis_need_two_places() -> None:
    study = find_study("fixbn.dynamics")
    axes = filled(study, "by_axis")
    assert list(axes) == ["local steps 100"]
    ticks = [text.get_text() for text in axes["local steps 100"].get_xticklabels()]
    assert ticks == ["0.05", "0.1", "0.25", "0.5", "0.75", "0.9"]


def test_what_has_one_place_so_far_is_drawn_beside_what_has_several() -> None:
    study = find_study("fixbn.momentum")
    of_bn = [cell for cell in study.cells() if cell.method == "fedavg_bn" and cell.setting["dataset"] == "cifar10"]
    one = [cell for cell in of_bn if cell.setting["momentum"] == "local" and cell.setting["local_steps"] == "100"]
    several = [cell for cell in of_bn if cell.setting["momentum"] == "reset"]
    assert not KINDS["by_axis"](study, measured(study, one))
    titles = ["momentum reset, dataset cifar10", "momentum local, dataset cifar10"]
    assert list(filled(study, "by_axis", measured(study, [*several, *one]))) == titles


def test_published_numbers_along_an_axis_are_crosses() -> None:
    axis = filled(find_study("fixbn.tI"), "by_axis")[""]
    told = axis.get_legend_handles_labels()[0][0]
    assert told.get_label() == "fedavg_gn, published"
    assert told.get_ydata().tolist() == [59.42, 57.61, 58.86]


def test_probes_and_training_loss_are_drawn_by_round() -> None:
    study = find_study("fixbn.dynamics")
    results = measured(study)
    assert probe_curves(results[0].records[0]) == {"drift": ([32000], [2.0])}
    axes = filled(study, "probes", results)
    assert list(axes) == [
        "drift, local steps 1",
        "training loss, local steps 1",
        "drift, local steps 100",
        "training loss, local steps 100",
    ]
    _, labels = axes["drift, local steps 100"].get_legend_handles_labels()
    assert labels == ["fedavg_bn", "fixbn"]


def test_the_training_loss_that_is_drawn_weighs_clients_by_their_examples() -> None:
    study = find_study("fixbn.dynamics")
    cell = study.cells(methods=["fixbn"])[0]
    rows: Any = [
        {"round": 1, "train_loss": 8.0, "train_loss_weighted": 9.0},
        {"round": 2, "train_loss": 2.0, "train_loss_weighted": 3.0, "eval": {}},
        {"round": 4, "train_loss": 1.0, "train_loss_weighted": 1.5, "eval": {}},
    ]
    made = make_record(cell.config, record(cell, 0, 50.0).run, rows, [], {})
    assert made.train_loss == {"round": [2, 4], "loss": [2.0, 1.0], "weighted": [3.0, 1.5]}
    (axis,) = (axis for title, axis in filled(study, "probes", [Measured(cell, (made,))]).items() if "loss" in title)
    assert axis.get_lines()[0].get_ydata().tolist() == [3.0, 1.5]
    # Beside a file from before, all are drawn as that one has it.
    older = replace(made, train_loss={"round": [2, 4], "loss": [4.0, 3.0]})
    both = filled(study, "probes", [Measured(cell, (made, older))])
    (title,) = (title for title in both if title.startswith("training loss"))
    assert title.split(",")[0] == "training loss"
    assert both[title].get_lines()[0].get_ydata().tolist() == [3.0, 2.0]


def test_a_result_keeps_what_probes_saw_in_scored_rounds() -> None:
    """Clients that see 1 and 3 in turn: mean 2 over both clients, variance 1 over any even window."""
    cell = find_study("fixbn.dynamics").cells()[0]
    rows = [
        {
            "round": number,
            "train_loss": 0.5,
            "probes": {
                "train": {0: {"batch-shift": 1.0 + 2 * (number % 2)}, 1: {"batch-shift": 3.0 - 2 * (number % 2)}}
            },
            "round_probes": {"train": {"global-shift": number / 100}},
            **({"eval": {}} if number % 100 == 0 else {}),
        }
        for number in range(1, 301)
    ]
    run = record(cell, 0, 50.0).run
    made = make_record(cell.config, run, cast("list[RoundRow]", rows), [], {})
    assert made.probes == [
        {"round": 100, "probes": {"global-shift": 1.0, "batch-shift": 2.0}},
        {"round": 200, "probes": {"global-shift": 2.0, "batch-shift": 2.0, "batch-shift variance": 1.0}},
        {"round": 300, "probes": {"global-shift": 3.0, "batch-shift": 2.0, "batch-shift variance": 1.0}},
    ]
    assert made.train_loss == {"round": [100, 200, 300], "loss": [0.5, 0.5, 0.5]}


@pytest.mark.parametrize("study", [s for s in all_studies() if s.id != "fedwon.f2"], ids=lambda study: study.id)
def test_every_study_has_panels_once_it_is_played(study: Study) -> None:
    results = measured(study)
    if results:
        assert all(panel_rows(study, results))


def test_a_picture_of_a_quick_run_says_so(tmp_path: Path) -> None:
    study = find_study("fixbn.tI")
    results = measured(study, study.cells(quick=True))
    assert make_figure(study, results, quick=True).get_suptitle().startswith(f"{QUICK}\n")
    assert QUICK not in make_figure(study, results).get_suptitle()
    assert picture_text(study, results, tmp_path / "new", quick=True) == f"picture: {tmp_path}/new/fixbn.tI-quick.png"
    assert draw(study, results, tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_what_cannot_be_drawn_is_told() -> None:
    study = find_study("fixbn.tI")
    nothing = [Measured(cell, ()) for cell in study.cells()]
    with pytest.raises(ConfigError) as caught:
        make_figure(study, nothing)
    assert str(caught.value) == "fixbn.tI has no run yet to draw; play it with: fednorm reproduce fixbn.tI"
    statistics = find_study("fedwon.f2")
    text = picture_text(statistics, measured(statistics), Path("unused"), quick=False)
    why = "fedwon.f2 shows statistics of single clients, which none of its runs kept"
    assert text == f"no picture: {why}; move their files elsewhere and play it anew"


def test_a_picture_names_the_seeds_that_diverged(tmp_path: Path) -> None:
    study = find_study("fixbn.norms")
    config = study.cells(methods=["fixbn"])[0].config
    run: Any = {"method": config.method, "seed": 2, "diverged_in": 321, "why": "", "ran": {"precision": "fp32"}}
    lost = Diverged(key_of(config), to_dict(config), run, {})
    results = [replace(each, diverged=(lost,)) if each.cell.method == "fixbn" else each for each in measured(study)]
    told = "without seeds that diverged: fixbn (1 of 3)"
    assert make_figure(study, results).get_suptitle().splitlines()[1] == told
    alone = [replace(each, records=()) if each.cell.method == "fixbn" else each for each in results]
    assert make_figure(study, alone).get_suptitle().splitlines()[1] == told.replace("1 of 3", "1 of 1")
    only = [each for each in alone if each.diverged]
    assert picture_text(study, only, tmp_path, quick=False) == "no picture: no run of fixbn.norms came to its end"
    other = [replace(each, cell=replace(each.cell, variant="no_decay")) for each in only]
    assert "fixbn.norms has no run yet to draw" in picture_text(study, other, tmp_path, quick=False)


def test_statistics_of_two_clients_are_drawn_channel_by_channel() -> None:
    study = find_study("fedwon.f2")
    kept = {"4": {"running_mean": [[3.0, 1.0, 2.0], [0.3, 0.1, 0.2]]}}
    played = [
        replace(each, records=tuple(replace(record, statistics=kept) for record in each.records))
        for each in measured(study)
        if each.cell.method == "fedbn"
    ]
    (axis,) = make_figure(study, played).axes
    assert axis.get_title() == "fedbn, norm 4, running_mean"
    # In the order of the first client's.
    assert [list(line.get_ydata()) for line in axis.get_lines()] == [[1.0, 2.0, 3.0], [0.1, 0.2, 0.3]]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_results_page", ROOT / "tools" / "make_results_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_results_is_current(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--check"]) == 0, capsys.readouterr().err
    for line in (ROOT / "docs" / "results.md").read_text().splitlines():
        if line.startswith("!["):
            assert (ROOT / "docs" / line.split("(")[1].rstrip(")")).exists(), f"{line}: run `make docs`"


def test_the_page_has_what_the_files_hold(tool: ModuleType, tmp_path: Path) -> None:
    library = Library(tmp_path)
    study = find_study("fixbn.t1")
    for cell in study.cells(variants=True):
        if cell.method == "fedavg_gn":
            for seed, final in enumerate((80.0, 84.0)):
                library.save(record(cell, seed, final))
    page = tool.page(tmp_path)
    assert "| [fixbn.t1](#fixbnt1) | partly | 0 of 4 | means 0 of 1 |" in page
    assert "| [fixbn.f1](#fixbnf1) | partly | 0 of 6 | no digits printed |" in page
    assert "| fixbn.norms | open | 0 of 7 |  |" in page
    assert "| method | paper | ours | difference | best round (chosen on test) | seeds |" in page
    assert "| fedavg_gn | 87.4 ± 1.2 | 82.0 ± 2.8 | -5.4 | 82.0 ± 2.8 | 2 |" in page
    assert "\n| method | ours | best round (chosen on test) | seeds |\n" in page  # where no digits were published
    assert "- open: centralized_gn, centralized_bn, fedavg_bn\n- open: fedavg_gn (2 of 3 seeds)\n" in page
    assert "beyond it fedavg_gn (-5.4)" in page
    assert "- open: 299 of 300 cells\n" in page
    assert "| fedavg_gn [lr_0_02] | 87.4 ± 1.2 | 82.0 ± 2.8 | -5.4 | 82.0 ± 2.8 | 2 |" in page
    assert "best round (chosen on test)" in page
    assert "- [lr_0_02]: the smaller learning rate that the paper names" in page
    assert "- command: `fednorm reproduce fixbn.t1`; played by `fednorm reproduce --next`" in page
    assert "- commit: 0123456789ab\n- runs: 4, 48 s in all" in page


def test_the_page_tells_of_runs_that_diverged(tool: ModuleType, tmp_path: Path) -> None:
    library = Library(tmp_path)
    config = find_study("fixbn.norms").cells(methods=["fixbn"])[0].config
    run: Any = {"method": config.method, "seed": 0, "diverged_in": 321, "why": "", "ran": {"precision": "fp32"}}
    library.save(Diverged(key_of(config), to_dict(config), run, {"commit": "0123456789abcdef"}))
    page = tool.page(tmp_path)
    assert "| [fixbn.norms](#fixbnnorms) | partly | 0 of 7 |" in page
    assert "| fixbn | 76.6 ± 0.7 | diverged in round 321 | 1 |" in page
    assert "- commit: 0123456789ab\n- runs: 1, 1 of which diverged, 0 s in all" in page


def test_a_stale_page_is_found(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "PAGE", tmp_path / "results.md")
    assert tool.main(["--check"]) == 1
    assert capsys.readouterr().err == "docs/results.md is out of date; run python tools/make_results_page.py\n"
