"""The picture of a study, drawn from its results."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fednorm.errors import ConfigError, require
from fednorm.files import disk_errors
from fednorm.studies.measured import Measured
from fednorm.studies.panels import KINDS, Axes, Panel
from fednorm.studies.study import Study, cell_label

QUICK = "quick run: not the paper's setting"
_COLUMNS = 5
_WIDTH, _HEIGHT = 3.3, 2.7
"""Inches of a panel."""
_TOP = 0.9
"""Inches for titles and legend."""


def draw(study: Study, results: Sequence[Measured], path: str | Path, *, quick: bool = False) -> Path:
    """Draw what the recipe's figure asks for, of the main reading and of the cells that have a run."""
    figure = make_figure(study, results, quick=quick)
    path = Path(path)
    with disk_errors(path):
        # The name of matplotlib's version would make the file differ from one machine to the next.
        figure.savefig(path, metadata={"Software": None})
    return path


def make_figure(study: Study, results: Sequence[Measured], *, quick: bool = False) -> Any:
    """The picture as matplotlib's figure: a block of panels for each kind, and one legend below."""
    require("matplotlib", "report", "a picture of a study")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = panel_rows(study, results)
    wide = max(map(_columns, rows))
    tall = [math.ceil(len(panels) / wide) for panels in rows]
    figure = Figure(figsize=(_WIDTH * max(wide, 2), _HEIGHT * sum(tall) + _TOP), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    unit = _unit(results)
    parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=tall)[:, 0]
    for part, panels, lines in zip(parts, rows, tall, strict=True):
        grid = part.subplots(lines, wide, squeeze=False).reshape(-1)
        for number, (axis, panel) in enumerate(zip(grid, panels, strict=False)):
            panel.fill(axis)
            _finish(axis, panel)
            if panel.scores and number % wide == 0:
                axis.set_ylabel(unit)
        for axis in grid[len(panels) :]:
            axis.set_visible(False)
        maps = [axis for axis in grid[: len(panels)] if axis.images]
        if maps:  # all of a block have the same colours
            part.colorbar(maps[0].images[0], ax=maps).set_label(unit, fontsize=8)
    lines = [QUICK] if quick else []
    lines += [f"{study.id}: {study.recipe.about}", *_without(results)]
    figure.suptitle("\n".join(lines), fontsize=10, wrap=True)
    legends = [axis.get_legend_handles_labels() for axis in figure.axes]
    named = {label: handle for handles, labels in legends for handle, label in zip(handles, labels, strict=True)}
    if named:
        columns = min(2 * max(wide, 2), max(1, int(figure.get_figwidth() / _entry_width(named))))
        figure.legend(
            list(named.values()), list(named), loc="outside lower center", ncols=columns, frameon=False, fontsize=8
        )
    return figure


def _without(results: Sequence[Measured]) -> list[str]:
    """Whose means are over fewer seeds than were played, in a line."""
    lost = [
        f"{cell_label(each.cell)} ({len(each.diverged)} of {len(each.played)})"
        for each in results
        if each.diverged and not each.cell.variant
    ]
    return [f"without seeds that diverged: {', '.join(lost)}"] if lost else []


def _entry_width(labels: Iterable[str]) -> float:
    """Inches that a column of a legend takes: its longest label in 8 points, with a line before it."""
    return 0.6 + 0.067 * max(map(len, labels))


def picture_text(study: Study, results: Sequence[Measured], folder: Path, *, quick: bool) -> str:
    """Draw a study into a folder and say where, or why not, in a line."""
    if importlib.util.find_spec("matplotlib") is None:
        return 'no picture: pip install "fednorm[report]"'
    try:
        panel_rows(study, results)
    except ConfigError as why:
        return f"no picture: {why}"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    name = f"{study.id}-quick.png" if quick else f"{study.id}.png"
    return f"picture: {draw(study, results, folder / name, quick=quick)}"


def panel_rows(study: Study, results: Sequence[Measured]) -> list[list[Panel]]:
    """The panels of every kind that the recipe names and for which there are results."""
    kinds = study.recipe.figure.get("kind", "bars")
    played = [each for each in results if each.records and not each.cell.variant]
    if not played and any(each.diverged for each in results if not each.cell.variant):
        raise ConfigError(f"no run of {study.id} came to its end")
    if not played:
        raise ConfigError(f"{study.id} has no run yet to draw; play it with: fednorm reproduce {study.id}")
    rows = [KINDS[kind](study, played) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    if not any(rows):
        raise ConfigError(f"{study.id} has too few runs yet to draw; play more with: fednorm reproduce {study.id}")
    return [panels for panels in rows if panels]


def _columns(panels: Sequence[Panel]) -> int:
    """Columns that leave the last line as full as can be."""
    return math.ceil(len(panels) / math.ceil(len(panels) / _COLUMNS))


def _unit(results: Sequence[Measured]) -> str:
    run = next(record.run for each in results for record in each.records)
    return f"{run['metric']} (%)" if run.get("percent", True) else run["metric"]


def _finish(axis: Axes, panel: Panel) -> None:
    axis.set_title(panel.title, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    if not axis.images:
        axis.grid(axis="y", color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.margins(x=0.02)
