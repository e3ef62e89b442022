"""The table of a study: the paper's numbers, ours, and what is to be said of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fednorm.running.on_clock import names_strategy
from fednorm.running.results import Spread
from fednorm.studies.library import Diverged, Outcome
from fednorm.studies.measured import Agreement, Measured, Ranking, agreement, curve_of, final_of, ranking
from fednorm.studies.published import PublishedCell, method_label
from fednorm.studies.study import Study, StudyCell

COLUMNS = ("method", "setting", "paper", "ours", "difference", "best round", "seeds")
OF_PAPER = ("paper", "difference")
"""Columns that a quick run has not: it is not set against the paper."""
NUMBERS = ("paper", "ours", "difference", "best round", "seeds")
_SHOWN = 3
"""Pairs that are named where methods rank otherwise; `--json` has all."""
QUICK = "quick run: a small budget on embedded data, not the paper's setting"
DIVERGED = "a method of which a seed diverged is not set against the paper; a mean is over the seeds that did not"
PEAK = "best round: chosen on test data, for comparison with papers that may have done so; never a result of its own"


def table_rows(results: Sequence[Measured]) -> list[list[str]]:
    """One row a cell."""
    return [
        [
            _reading(each),
            setting_text(each.cell.setting),
            published_text(each.cell.published),
            ours_text(each),
            "-" if each.difference is None else f"{each.difference:+.1f}",
            _text(each.peak),
            str(len(each.played)),
        ]
        for each in results
    ]


def ours_text(each: Measured) -> str:
    """The mean of a cell with its spread, and which seeds it is without because they diverged."""
    told = [str(each.ours)] if each.ours else []
    if each.diverged:
        of = f"{len(each.diverged)} of {len(each.played)} seeds " if len(each.played) > 1 else ""
        told.append(f"{of}{diverged_text(*each.diverged)}")
    return ", ".join(told) or "-"


def diverged_text(*runs: Diverged) -> str:
    """Where runs diverged."""
    what = "version" if names_strategy(runs[0].run["method"]) else "round"
    places = sorted({run.run["diverged_in"] for run in runs})
    return f"diverged in {what}{'s' if len(places) > 1 else ''} {', '.join(map(str, places))}"


def published_text(cell: PublishedCell | None) -> str:
    """A published number with its spread.

    >>> published_text(PublishedCell("fixbn", {}, 76.56, 0.66)), published_text(None)
    ('76.6 ± 0.7', '-')
    """
    if cell is None:
        return "-"
    return f"{cell.mean:.1f}" + ("" if cell.std is None else f" ± {cell.std:.1f}")


def setting_text(setting: Mapping[str, Any]) -> str:
    """A setting in a line.

    >>> setting_text({"domain": "mnist", "fraction": 0.1}), setting_text({})
    ('domain mnist, fraction 0.1', '')
    """
    return ", ".join(f"{key} {value}" for key, value in setting.items())


def sentences(study: Study, results: Sequence[Measured], quick: bool) -> Iterator[str]:
    """What is to be said below the table."""
    if quick:
        yield QUICK
        yield stand_in_text(results)
    elif any(each.cell.published for each in results):
        yield from agreement_text(agreement(results))
        yield ranking_text(ranking(results))
    else:
        yield "no digits were published for this: there is nothing to set ours against"
    missing = sum(not each.played for each in results)
    if missing:
        yield f"{missing} of {len(results)} cells have no run yet"
    if any(each.diverged for each in results):
        yield DIVERGED
    if any(each.peak for each in results):
        yield PEAK
    ran = sorted({f"{record.device}, {record.precision}" for each in results for record in each.played})
    times = {setting_text(each.cell.setting): each.cell.time for each in results if each.cell.time is not None}
    if ran and times:
        yield "ours: at virtual time " + ", ".join(f"{time:g} ({setting})" for setting, time in times.items())
    if ran:
        yield f"ours: {'' if times else 'after the last round, '}on {'; '.join(ran)}"
    for each in results:
        for other in each.others:
            yield precision_text(each, other)
    yield f"paper: {study.experiment.where}"
    for note in study.experiment.notes:
        yield f"note: {note}"
    if study.experiment.inferred:
        yield f"not stated in the paper: {'; '.join(study.experiment.inferred)}"


def stand_in_text(results: Sequence[Measured]) -> str:
    """What a quick run really plays, since methods and settings go by the paper's names."""
    played = {f"{each.cell.config.model} on {each.cell.config.data.name}" for each in results}
    return f"played: {', '.join(sorted(played))}; settings above name the paper's cells, not what stands in for them"


def agreement_text(found: Agreement) -> Iterator[str]:
    """How many means agree with the paper's, and which do not, in a line; nothing where no spread is known."""
    if found.compared:
        told = [f"{_named(each, each.cell.describing)} ({each.difference:+.1f})" for each in found.beyond[:_SHOWN]]
        told += [f"{len(found.beyond) - _SHOWN} more"] if len(found.beyond) > _SHOWN else []
        reach = "within the paper's spread, or within ours where it prints none"
        beyond = f"; beyond it {'; '.join(told)}" if told else ""
        yield f"means: {len(found.within)} of {found.compared} {reach}{beyond}"


def _named(each: Measured, without: frozenset[str] = frozenset()) -> str:
    """A cell in a line, less the keys of its setting that are not asked for."""
    setting = setting_text({key: value for key, value in each.cell.setting.items() if key not in without})
    return f"{_reading(each)}{', ' if setting else ''}{setting}"


def _reading(each: Measured) -> str:
    """A method, and in brackets which other reading of the paper it is."""
    return each.cell.method + (f" [{each.cell.variant}]" if each.cell.variant else "")


def precision_text(shown: Measured, other: Outcome) -> str:
    """The same seed in two precisions, in a line."""
    same = [outcome for outcome in shown.played if outcome.seed == other.seed]
    pair = [f"{outcome.precision} {_final_text(outcome, shown.cell)}" for outcome in (*same, other)]
    return f"{_named(shown)}, seed {other.seed}: {', '.join(pair)}"


def _final_text(outcome: Outcome, cell: StudyCell) -> str:
    if isinstance(outcome, Diverged):
        return diverged_text(outcome)
    return f"{final_of(outcome, cell):.1f}"


def ranking_text(found: Ranking) -> str:
    """Whether the order of methods is the paper's, in a line.

    >>> ranking_text(Ranking(3, ())), ranking_text(Ranking(0, ()))
    ('order of methods: as in the paper (3 of 3 pairs)', 'order of methods: no pair to compare')
    """
    if not found.pairs:
        return "order of methods: no pair to compare"
    if not found.differ:
        return f"order of methods: as in the paper ({found.agree} of {found.pairs} pairs)"
    shown = "; ".join(found.differ[:_SHOWN])
    more = f"; and {len(found.differ) - _SHOWN} more" if len(found.differ) > _SHOWN else ""
    return f"order of methods: {found.agree} of {found.pairs} pairs as in the paper; {shown}{more}"


def to_json(study: Study, results: Sequence[Measured], quick: bool) -> dict[str, Any]:
    """The table as JSON values, with every seed."""
    found = ranking(results)
    return {
        "id": study.id,
        "where": study.experiment.where,
        "quick": quick,
        "cells": [_cell_json(each) for each in results],
        "ranking": None if quick else {"agree": found.agree, "pairs": found.pairs, "differ": list(found.differ)},
        "notes": list(sentences(study, results, quick)),
    }


def _cell_json(each: Measured) -> dict[str, Any]:
    cell, ours, peak = each.cell, each.ours, each.peak
    return {
        "method": cell.method,
        "label": method_label(cell.method),
        "expression": cell.config.method,
        "setting": dict(cell.setting),
        "variant": cell.variant,
        "paper": None if cell.published is None else {"mean": cell.published.mean, "std": cell.published.std},
        "ours": None if ours is None else {"mean": ours.mean, "std": ours.std, "n": ours.count},
        "difference": each.difference,
        "chosen_on_test": None if peak is None else {"mean": peak.mean, "std": peak.std, "n": peak.count},
        "runs": [
            {
                "seed": record.seed,
                "final": final_of(record, cell),
                "curve": {"round": record.run["curves"]["round"], "score": curve_of(record, cell)},
                "seconds": record.run["seconds"],
                **_origin_json(record),
            }
            for record in each.records
        ],
        "diverged": [
            {
                "seed": run.seed,
                "round": run.run["diverged_in"],
                "why": run.run["why"],
                **_origin_json(run),
            }
            for run in each.diverged
        ],
    }


def _origin_json(outcome: Outcome) -> dict[str, Any]:
    """Where a run was played, and how."""
    return {
        "device": outcome.device,
        "precision": outcome.precision,
        "commit": outcome.environment.get("commit"),
        "command": outcome.environment.get("command"),
    }


def _text(value: Spread | None) -> str:
    return "-" if value is None else str(value)
