"""What the pictures of studies consist of: panels of curves, bars, heat maps, scores along an axis, and probes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fednorm.errors import ConfigError
from fednorm.running.over_time import is_timed
from fednorm.running.pictures import COLOURS
from fednorm.running.results import Spread
from fednorm.studies.beside import setting_text
from fednorm.studies.library import Record
from fednorm.studies.measured import Measured, curve_of
from fednorm.studies.study import Study, StudyCell

Axes = Any
"""matplotlib's, which is imported only when something is drawn."""
_HANGING: Mapping[str, Any] = {"ha": "right", "rotation_mode": "anchor", "fontsize": 8}
"""Names that hang below their bars, and end there."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes: what stands above it, and how it is filled."""

    title: str
    fill: Callable[[Axes], None]
    scores: bool = True
    """whether what goes up is the score"""


Kind = Callable[[Study, Sequence[Measured]], list[Panel]]


def curve_panels(study: Study, results: Sequence[Measured]) -> list[Panel]:
    """The score by round: a panel a setting and a line a method, or with `lines` the other way round.

    The line is the mean over seeds, the band their range, the dotted line what was published.
    """
    shown = _where(study, _whole(results))
    by_axis: str = study.recipe.figure.get("lines", "")
    if not by_axis:
        groups = _grouped(shown, _setting)
        return [Panel(title, lambda axis, some=some: _curves(axis, study, some)) for title, some in groups.items()]
    values = list(study.recipe.axes[by_axis])
    groups = _grouped(shown, lambda cell: _joined(cell.method, _setting(cell, frozenset({by_axis}))))
    return [
        Panel(title, lambda axis, some=some: _curves_by_steps(axis, some, by_axis, values))
        for title, some in groups.items()
    ]


def _curves(axis: Axes, study: Study, results: Sequence[Measured]) -> None:
    for each in results:
        style = _style(study, each.cell.method)
        rounds = each.records[0].run["curves"]["round"]
        _band(axis, rounds, [curve_of(record, each.cell) for record in each.records], style)
        if each.cell.published is not None:
            axis.axhline(each.cell.published.mean, color=style["color"], linestyle=":", linewidth=0.9)
    if any(each.cell.published for each in results):
        _dotted(axis, "published mean")
    _rounds(axis, results)


def time_panels(study: Study, results: Sequence[Measured]) -> list[Panel]:
    """The score over virtual time, a panel a setting and a line a method; seeds as in curves, at their mean times."""
    groups = _grouped(_where(study, _whole(results)), _setting)
    return [Panel(title, lambda axis, some=some: _over_time(axis, study, some)) for title, some in groups.items()]


def _over_time(axis: Axes, study: Study, results: Sequence[Measured]) -> None:
    for each in results:
        times = zip(*(record.run["curves"].get("time", []) for record in each.records), strict=True)
        x = [sum(seeds) / len(seeds) for seeds in times]
        _band(axis, x, [curve_of(record, each.cell) for record in each.records], _style(study, each.cell.method))
        if each.cell.time is not None:
            axis.axvline(each.cell.time, color="0.6", linestyle=":", linewidth=0.9)
    if any(each.cell.time is not None for each in results):
        _dotted(axis, "when the score is read")
    axis.set_xlabel("virtual time")


def _curves_by_steps(axis: Axes, results: Sequence[Measured], by_axis: str, values: Sequence[str]) -> None:
    """Against the steps a client has taken, so that runs with different rounds share an axis."""
    for each in results:
        value = str(each.cell.setting[by_axis])
        style = {"color": COLOURS[values.index(value) % len(COLOURS)], "label": f"{_spoken(by_axis)} {value}"}
        steps = [done * (each.cell.config.train.local_steps or 1) for done in each.records[0].run["curves"]["round"]]
        _band(axis, steps, [curve_of(record, each.cell) for record in each.records], style)
    axis.set_xlabel("steps of a client")


def bar_panels(study: Study, results: Sequence[Measured]) -> list[Panel]:
    """What was published beside ours, a panel a setting; of domains only their average, where there is one.

    A quick run has nothing of the paper beside it.
    """
    shown = [each for each in results if each.cell.published is not None] or results
    averages = [each for each in shown if each.cell.selected == "average"]
    groups = _grouped(averages or shown, lambda cell: _setting(cell, domain=not averages))
    return [Panel(title, lambda axis, some=some: _bars(axis, some)) for title, some in groups.items()]


_USUAL_BARS = 4
"""Pairs of bars that fill a picture; fewer are no wider."""


def _bars(axis: Axes, results: Sequence[Measured]) -> None:
    told = [(cell.mean, _whisker(cell.std)) for each in results if (cell := each.cell.published)]
    ours = [(each.ours.mean, _whisker(_std(each.ours))) for each in results if each.ours]
    places = range(len(results))
    kinds = [("0.75", "published", told)] if told else []
    kinds += [(COLOURS[0], "ours, last round", ours)]
    for number, (colour, label, bars) in enumerate(kinds):
        means, spreads = zip(*bars, strict=True)
        at = [place + 0.4 * (number - (len(kinds) - 1) / 2) for place in places]
        axis.bar(at, means, 0.38, yerr=spreads, color=colour, label=label, capsize=2)
    axis.set_xticks(list(places), [each.cell.method for each in results], rotation=35, **_HANGING)
    spare = max(0, _USUAL_BARS - len(places)) / 2
    axis.set_xlim(-0.5 - spare, len(places) - 0.5 + spare)


def heat_panels(study: Study, results: Sequence[Measured]) -> list[Panel]:
    """The mean score over two axes, a map for each method and each value of the other axes.

    All maps have the values that any of them has, so that a place means the same in each.
    """
    x, y = study.recipe.figure["x"], study.recipe.figure["y"]
    scores = [each.ours.mean for each in results if each.ours]
    limits = (min(scores), max(scores))
    groups = _grouped(results, lambda cell: _joined(cell.method, _setting(cell, frozenset({x, y}))))
    columns, rows = ((key, _present(study, results, key)) for key in (x, y))
    return [
        Panel(title, lambda axis, some=some: _heat(axis, some, columns, rows, limits), False)
        for title, some in groups.items()
    ]


def _present(study: Study, results: Sequence[Measured], axis: str) -> list[str]:
    """The values of an axis that results have, in the recipe's order."""
    found = {str(each.cell.setting[axis]) for each in results}
    return [value for value in study.recipe.axes[axis] if value in found]


def _heat(
    axis: Axes,
    results: Sequence[Measured],
    x: tuple[str, list[str]],
    y: tuple[str, list[str]],
    limits: tuple[float, float],
) -> None:
    (across, columns), (down, rows) = x, y
    at = {(str(e.cell.setting[across]), str(e.cell.setting[down])): e.ours.mean for e in results if e.ours}
    grid = [[at.get((column, row), float("nan")) for column in columns] for row in rows]
    axis.imshow(grid, cmap="cividis", vmin=limits[0], vmax=limits[1], aspect="auto")
    middle = sum(limits) / 2
    for (column, row), score in at.items():
        place = (columns.index(column), rows.index(row))
        axis.text(*place, f"{score:.0f}", ha="center", va="center", color="white" if score < middle else "black")
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xlabel(_spoken(across))
    axis.set_ylabel(_spoken(down))


def axis_panels(study: Study, results: Sequence[Measured]) -> list[Panel]:
    """The score along an axis, a line a method, a panel for each value of the other axes; bars are the spread.

    Crosses are what was published. Once there are several places along the axis, those are drawn too that may have more
    and have one so far.
    """
    x = study.recipe.figure["x"]
    values = list(study.recipe.axes[x])

    def grouped(results: Sequence[Measured]) -> dict[str, list[Measured]]:
        return _grouped(_whole(results), lambda cell: _setting(cell, frozenset({x})))

    def places(results: Sequence[Measured]) -> int:
        return len({str(each.cell.setting[x]) for each in results})

    groups, possible = grouped(results), grouped([Measured(cell, ()) for cell in study.cells()])
    if max(map(places, groups.values()), default=0) < 2:
        return []
    return [
        Panel(title, lambda axis, some=some: _along(axis, study, some, x, values))
        for title, some in groups.items()
        if places(possible[title]) > 1
    ]


def _along(axis: Axes, study: Study, results: Sequence[Measured], x: str, values: Sequence[str]) -> None:
    present = [value for value in values if any(str(each.cell.setting[x]) == value for each in results)]
    for method in dict.fromkeys(each.cell.method for each in results):
        own = [each for each in results if each.cell.method == method]
        places = [present.index(str(each.cell.setting[x])) for each in own]
        spreads = [each.ours for each in own if each.ours]
        style = _style(study, method)
        whiskers = [_whisker(_std(each)) for each in spreads]
        axis.errorbar(places, [each.mean for each in spreads], whiskers, marker="o", capsize=2, **style)
        told = [(p, each.cell.published.mean) for p, each in zip(places, own, strict=True) if each.cell.published]
        if told:
            axis.plot(*zip(*told, strict=True), "x", color=style["color"], label=f"{method}, published")
    axis.set_xticks(range(len(present)), present, fontsize=8)
    axis.set_xlabel(_spoken(x))


def probe_panels(study: Study, results: Sequence[Measured]) -> list[Panel]:
    """What probes saw by round, and the training loss: the mean over clients and seeds, with the range of the seeds."""
    panels = []
    fixed = frozenset(study.recipe.figure.get("where", {}))
    for title, some in _grouped(_where(study, results), lambda cell: _setting(cell, fixed)).items():
        names = dict.fromkeys(name for each in some for record in each.records for name in probe_curves(record))
        panels += [
            Panel(_joined(name, title), lambda axis, some=some, name=name: _probes(axis, study, some, name), False)
            for name in names
        ]
        told, loss = _loss_shown(some)
        panels.append(
            Panel(_joined(told, title), lambda axis, some=some, loss=loss: _losses(axis, study, some, loss), False)
        )
    return panels


def _loss_shown(results: Sequence[Measured]) -> tuple[str, str]:
    """The training loss that all runs have, in words and by its key: weighted as in the paper, but for older files."""
    if all("weighted" in record.train_loss for each in results for record in each.records):
        return "training loss by examples", "weighted"
    return "training loss", "loss"


def probe_curves(record: Record) -> dict[str, tuple[list[int], list[float]]]:
    """Rounds and values of every probe."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in record.probes:
        for name, value in row["probes"].items():
            rounds, values = found.setdefault(name, ([], []))
            rounds.append(row["round"])
            values.append(value)
    return found


def _probes(axis: Axes, study: Study, results: Sequence[Measured], name: str) -> None:
    for each in results:
        seen = [curves[name] for record in each.records if name in (curves := probe_curves(record))]
        if seen:
            _band(axis, seen[0][0], [values for _, values in seen], _style(study, each.cell.method))
    _rounds(axis, results)


def _losses(axis: Axes, study: Study, results: Sequence[Measured], loss: str) -> None:
    for each in results:
        rounds = each.records[0].train_loss["round"]
        _band(axis, rounds, [record.train_loss[loss] for record in each.records], _style(study, each.cell.method))
    _rounds(axis, results)


def statistic_panels(study: Study, results: Sequence[Measured]) -> list[Panel]:
    """Channel by channel, the running statistics of some clients of the first seed, where they have their own."""
    kept = [(each.cell.method, each.records[0]) for each in results if each.records[0].statistics]
    if not kept:
        why = f"{study.id} shows statistics of single clients, which none of its runs kept"
        raise ConfigError(f"{why}; move their files elsewhere and play it anew")
    return [
        Panel(f"{method}, norm {layer}, {part}", lambda axis, v=values, r=record: _channels(axis, study, r, v), False)
        for method, record in kept
        for layer, parts in record.statistics.items()
        for part, values in parts.items()
    ]


def _channels(axis: Axes, study: Study, record: Record, values: Sequence[Sequence[float]]) -> None:
    """One line a client; channels in the order of the first client's, since their numbers mean nothing."""
    order = sorted(range(len(values[0])), key=values[0].__getitem__)
    for number, (client, own) in enumerate(zip(study.recipe.figure["clients"], values, strict=True)):
        name = record.client_domains[client] if record.client_domains else f"client {client}"
        size = {"linewidth": 1.6, "zorder": 3} if number == 0 else {"linewidth": 0.5}
        axis.plot([own[at] for at in order], color=COLOURS[number % len(COLOURS)], label=name, **size)
    axis.set_xlabel("channel, sorted by the first client")


KINDS: Mapping[str, Kind] = {
    "curves": curve_panels,
    "time": time_panels,
    "bars": bar_panels,
    "heatmap": heat_panels,
    "by_axis": axis_panels,
    "probes": probe_panels,
    "statistics": statistic_panels,
}


def _whole(results: Sequence[Measured]) -> list[Measured]:
    """Results of all domains together: curves of single ones are not kept."""
    return [each for each in results if each.cell.selected in (None, "average")]


def _where(study: Study, results: Sequence[Measured]) -> list[Measured]:
    """Results whose setting is among those that the recipe wants in curves and probes."""
    wanted: Mapping[str, list[str]] = study.recipe.figure.get("where", {})
    return [each for each in results if all(str(each.cell.setting[key]) in some for key, some in wanted.items())]


def _setting(cell: StudyCell, without: frozenset[str] = frozenset(), domain: bool = False) -> str:
    """A setting in a line, less what only says what the method does, and less the domain unless asked for."""
    left_out = without | cell.describing | (frozenset() if domain else frozenset({cell.score.select}))
    return setting_text({_spoken(key): value for key, value in cell.setting.items() if key not in left_out})


def _spoken(name: str) -> str:
    """The name of an axis as people write it."""
    return name.replace("_", " ")


def _joined(*texts: str) -> str:
    return ", ".join(filter(None, texts))


def _grouped(results: Sequence[Measured], title: Callable[[StudyCell], str]) -> dict[str, list[Measured]]:
    groups: dict[str, list[Measured]] = {}
    for each in results:
        groups.setdefault(title(each.cell), []).append(each)
    return groups


def _style(study: Study, method: str) -> dict[str, Any]:
    """The colour of a method and its name; past the last colour the same ones come back dashed."""
    number = list(study.recipe.methods).index(method)
    line = "-" if number < len(COLOURS) else "--"
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": line, "label": method}


def _rounds(axis: Axes, results: Sequence[Measured]) -> None:
    """Rounds along an axis, or on a clock versions, of which there are no halves."""
    axis.set_xlabel("version" if any(is_timed(record.run) for each in results for record in each.records) else "round")
    axis.xaxis.get_major_locator().set_params(integer=True)


def _dotted(axis: Axes, label: str) -> None:
    """An entry of the legend for dotted lines, whatever their colours."""
    axis.plot([], [], ":", color="0.4", linewidth=0.9, label=label)


def _std(found: Spread) -> float | None:
    """The deviation over seeds; one seed has none."""
    return found.std if found.count > 1 else None


def _whisker(std: float | None) -> float:
    """Half a whisker: none is drawn where no deviation is known, since one of no length would say that it is 0."""
    return math.nan if std is None else std


def _band(axis: Axes, x: Sequence[float], seeds: Sequence[Sequence[float]], style: Mapping[str, Any]) -> None:
    """A line of means with the range of the seeds behind it."""
    by_round = list(zip(*seeds, strict=True))
    axis.plot(x, [sum(scores) / len(scores) for scores in by_round], linewidth=1.6, **style)
    low, high = [min(scores) for scores in by_round], [max(scores) for scores in by_round]
    axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
