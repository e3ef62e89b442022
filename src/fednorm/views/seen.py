"""What a comparison showed: one sentence, and a picture of its curves."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fednorm.running.config import RunConfig
from fednorm.running.pictures import GLOBAL, TITLES, curves
from fednorm.running.records import number_text
from fednorm.running.results import Result, cell_text


def what_was_seen(result: Result) -> str | None:
    """One sentence from the pooled column: the best and the worst global model of a federation, and what was possible.

    Methods that keep state on the clients are left out: their pooled cell is not the score of one model they made.
    None where there are no two to compare.
    """
    lines = [line for line in result.table() if "pooled" in line and line["how"] == GLOBAL]
    pooled = {line["method"]: line["pooled"] for line in lines}
    federated = sorted((line["method"] for line in lines if line["bytes_per_round"]), key=lambda m: pooled[m]["mean"])
    if len(federated) < 2:
        return None
    worst, best = federated[0], federated[-1]
    if not result.higher_is_better:
        worst, best = best, worst

    def told(method: str) -> str:
        return cell_text(pooled[method], result.percent)

    sentence = (
        f"On the pooled test, among federated methods with one global model, {best} came out best ({told(best)}) and "
        f"{worst} worst ({told(worst)})"
    )
    for central in (line["method"] for line in lines if not line["bytes_per_round"]):
        above = {method: pooled[central]["mean"] - pooled[method]["mean"] for method in (best, worst)}
        gaps = [f"{_distance(gap, result.percent)} {method}" for method, gap in above.items()]
        sentence += f"; {central} training reached {told(central)}, {' and '.join(gaps)}"
    return f"{sentence}."


def _distance(gap: float, percent: bool) -> str:
    """How far a score is above another.

    >>> _distance(-1.25, True), _distance(0.5, False)
    ('1.2 points below', '0.5 above')
    """
    return f"{number_text(abs(gap), percent)}{' points' if percent else ''} {'above' if gap >= 0 else 'below'}"


def draw_curves(result: Result, config: RunConfig, folder: Path) -> str | None:
    """Draw the curves of a comparison into its folder; None where matplotlib is not there, or nothing to draw."""
    data = config.data
    title = f"{data.name}, {data.clients} clients ({data.partition}), {config.model}"
    drawn = any(all(name in run["curves"] for run in result.runs) for name in TITLES)
    if not drawn or importlib.util.find_spec("matplotlib") is None:
        return None
    return str(curves(result, folder / "curves.png", title))
