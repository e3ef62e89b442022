"""Pictures of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fednorm.errors import ConfigError, require
from fednorm.files import written_whole
from fednorm.running.records import RunResult

if TYPE_CHECKING:
    from fednorm.running.results import Result


# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GLOBAL = "global model"
TITLES = {
    "pooled": "Pooled test",
    "own_client": "Own-client test",
    "domains": "Mean over domains",
    "unseen": "Unseen clients",
}


def curves(result: Result, path: str | Path, title: str = "", protocols: tuple[str, ...] = tuple(TITLES)) -> Path:
    """Draw the score of every method by round, one panel a protocol: the mean over seeds, and their range as a band.

    On a clock, rounds are versions of the server's model, and a second line of panels has the same over virtual time.
    """
    require("matplotlib", "report", "a picture of the curves")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [name for name in protocols if all(name in run["curves"] for run in result.runs)]
    if not shown:
        raise ConfigError("there is no curve to draw: no round was scored by all runs in the same way")
    timed = all("time" in run["curves"] for run in result.runs)
    units = ("version", "time") if timed else ("round",)
    figure = Figure(figsize=(4.6 * len(shown), 4.1 * len(units)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(units), len(shown), sharey=True, squeeze=False)
    panels = [(grid[line][column], name, unit) for line, unit in enumerate(units) for column, name in enumerate(shown)]
    for axis, protocol, unit in panels:
        for number, method in enumerate(result.methods):
            runs = result.of(method)
            rounds = _times(runs) if unit == "time" else runs[0]["curves"]["round"]
            by_round = list(zip(*(run["curves"][protocol] for run in runs), strict=True))
            colour = COLOURS[number % len(COLOURS)]
            means = [sum(scores) / len(scores) for scores in by_round]
            # Past the last colour the same ones come back dotted.
            style = "--" if _is_joined(runs[0], protocol) else "-" if number < len(COLOURS) else ":"
            axis.plot(rounds, means, style, color=colour, label=method, linewidth=1.8)
            axis.fill_between(
                rounds, [min(s) for s in by_round], [max(s) for s in by_round], color=colour, alpha=0.15, linewidth=0
            )
        joined = any(_is_joined(run, protocol) for run in result.runs)
        axis.set_title(TITLES[protocol] + (" (dashed: not one global model)" if joined else ""), fontsize=11)
        axis.set_xlabel("virtual time" if unit == "time" else unit)
        if unit != "time":
            axis.xaxis.get_major_locator().set_params(integer=True)
        if result.percent:
            axis.set_ylim(0, 100)
        axis.margins(x=0.01)
        axis.grid(axis="y", color="0.9", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    for line in grid:
        line[0].set_ylabel(f"{result.metric} (%)" if result.percent else result.metric)
    handles, labels = grid[-1][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
    if title:
        figure.suptitle(title, fontsize=12)
    path = Path(path)
    with written_whole(path) as draft:
        figure.savefig(draft, format=path.suffix[1:] or None)
    return path


def _times(runs: Sequence[RunResult]) -> list[float]:
    """When each version was made that was scored: the mean over seeds, whose clocks go much alike."""
    each = zip(*(run["curves"].get("time", []) for run in runs), strict=True)
    return [sum(times) / len(times) for times in each]


def _is_joined(run: RunResult, protocol: str) -> bool:
    """Whether a pooled score joins what clients keep for themselves: their averaged state, or all their models."""
    return protocol == "pooled" and run["final"].get("pooled", {}).get("how") != GLOBAL
