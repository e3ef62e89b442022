"""What a comparison showed: one sentence, and a picture of its curves."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fednorm.data.from_files.source import find_source
from fednorm.running.config import RunConfig
from fednorm.running.over_time import is_timed, score_at
from fednorm.running.pictures import GLOBAL, TITLES, curves
from fednorm.running.records import number_text
from fednorm.running.results import Result, Spread, cell_text, spread


def what_was_seen(result: Result) -> str | None:
    """One sentence from the pooled column: the best and the worst global model of a federation, and what was possible.

    Methods that keep state on the clients are left out: their pooled cell is not the score of one model they made. On a
    clock all are looked at when the first of them ended, which is said where one had no score by then. None where there
    are no two to compare.
    """
    lines = [line for line in result.table() if "pooled" in line and line["how"] == GLOBAL]
    pooled, when = {line["method"]: line["pooled"] for line in lines}, ""
    if lines and all(is_timed(run) for run in result.runs):
        time = min(run["curves"].get("time", [0.0])[-1] for run in result.runs)
        by_then = {method: [score_at(run, time) for run in result.of(method)] for method in pooled}
        known = {method: [score for score in scores if score is not None] for method, scores in by_then.items()}
        late = [method for method in pooled if len(known[method]) < len(by_then[method])]
        if late:
            warning = (
                f"At virtual time {time:.4g}, when the first method ended, {' and '.join(late)} had no score yet: the "
                "scores above are of different times. Score more often (eval.every), or play more versions of it."
            )
            return warning if len(pooled) > 1 else None
        pooled = {method: _cell(spread(scores)) for method, scores in known.items()}
        when = f" at virtual time {time:.4g}"
    federated = sorted((line["method"] for line in lines if line["bytes_per_round"]), key=lambda m: pooled[m]["mean"])
    if len(federated) < 2:
        return None
    worst, best = federated[0], federated[-1]
    if not result.higher_is_better:
        worst, best = best, worst

    def told(method: str) -> str:
        return cell_text(pooled[method], result.percent)

    sentence = (
        f"On the pooled test{when}, among federated methods with one global model, {best} came out best ({told(best)}) "
        f"and {worst} worst ({told(worst)})"
    )
    for central in (line["method"] for line in lines if not line["bytes_per_round"]):
        above = {method: pooled[central]["mean"] - pooled[method]["mean"] for method in (best, worst)}
        gaps = [f"{_distance(gap, result.percent)} {method}" for method, gap in above.items()]
        sentence += f"; {central} training reached {told(central)}, {' and '.join(gaps)}"
    return f"{sentence}."


def _cell(scores: Spread) -> dict[str, float]:
    return {"mean": scores.mean, "std": scores.std, "n": scores.count}


def _distance(gap: float, percent: bool) -> str:
    """How far a score is above another.

    >>> _distance(-1.25, True), _distance(0.5, False)
    ('1.2 points below', '0.5 above')
    """
    return f"{number_text(abs(gap), percent)}{' points' if percent else ''} {'above' if gap >= 0 else 'below'}"


def draw_curves(result: Result, config: RunConfig, folder: Path) -> str | None:
    """Draw the curves of a comparison into its folder; None where matplotlib is not there, or nothing to draw."""
    data, source = config.data, find_source(config.data.name)
    name, how = (source.path.name, "") if source else (data.name, f" ({data.partition})")
    title = f"{name}, {data.clients} clients{how}, {config.model}"
    drawn = any(all(name in run["curves"] for run in result.runs) for name in TITLES)
    if not drawn or importlib.util.find_spec("matplotlib") is None:
        return None
    return str(curves(result, folder / "curves.png", title))
