"""Write docs/results.md and its pictures from the files in studies/results: the papers' numbers beside ours.

python tools/make_results_page.py            # the page, and a picture for every study that has runs
python tools/make_results_page.py --check    # exit code 1 where the page is not what the files give
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fednorm.errors import ConfigError
from fednorm.studies.beside import COLUMNS, NUMBERS, sentences, table_rows
from fednorm.studies.figures import draw, panel_rows
from fednorm.studies.library import Diverged, Library, Record
from fednorm.studies.measured import Measured, agreement, measured, ranking
from fednorm.studies.queue import Standing, standing
from fednorm.studies.study import Study, all_studies, cell_label

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURES, RESULTS = ROOT / "docs" / "results.md", ROOT / "docs" / "img", ROOT / "studies" / "results"
NAMED = 8
"""Missing cells up to which they are named."""
HEAD = """# Results

This page is written by `make docs` from the files in `studies/results` alone: one file a run and seed, with its config,
its curve, its commit, its command and the machine it ran on. What was tried where we differ from a paper is in
[studies/NOTES.md](../studies/NOTES.md).

`paper` is what was published, with its spread where there is one; `ours` is the score after the last round, mean and
sample standard deviation over the seeds. `best round` is the mean of each seed's best scored round: it is **chosen on
test**, stands here only because a paper may have done so, and is no result. A table has the cells that have runs;
a reading other than the main one is named in brackets behind its method. A run that diverged says in which round; a
mean is over the other seeds then, and is not set against the paper.

`beside the paper` in the list below: how many of our means lie within the paper's spread around the published ones, or
within ours where it prints none, and how many pairs of methods that the paper tells apart rank here as they do there.
For most figures papers print no digits, so there is nothing to compare; they are drawn all the same.

In pictures a line is the mean over the seeds and the band behind it their range; whiskers are standard deviations, and
are absent where there is one seed or a paper gives none. Dotted lines are what was published.

`fednorm reproduce --next` plays what is open, in the order of this list.
"""


def page(folder: Path = RESULTS) -> str:
    """docs/results.md."""
    library, studies = Library(folder), all_studies()
    parts = [HEAD, _overview([standing(study, library) for study in studies], library)]
    for study in studies:
        results = played(study, library)
        if results:
            parts.append("\n".join(_section(study, results, library)))
    return "\n".join(parts)


def played(study: Study, library: Library) -> list[Measured]:
    """The cells of a study that have runs, other readings last."""
    return [each for each in measured(study.cells(variants=True), library) if each.played]


def _overview(standings: Sequence[Standing], library: Library) -> str:
    rows = [
        f"| {_linked(each)} | {each.state} | {each.done} of {each.cells} | {_verdict(each, library)} "
        f"| {each.study.recipe.about} |"
        for each in standings
    ]
    heading = ["| study | state | cells | beside the paper | what it asks |", "|---|---|--:|---|---|"]
    return "\n".join([*heading, *rows, ""])


def _verdict(each: Standing, library: Library) -> str:
    """Whether our numbers are the paper's, as far as there are any."""
    if not each.begun:
        return ""
    if not each.study.experiment.cells:
        return "no digits printed"
    results = measured(each.study.cells(), library)
    means, order = agreement(results), ranking(results)
    told = [f"means {len(means.within)} of {means.compared}"] if means.compared else []
    told += [f"order {order.agree} of {order.pairs}"] if order.pairs else []
    return ", ".join(told)


def _linked(each: Standing) -> str:
    """The name of a study, with a link where the page has a section on it."""
    id = each.study.id
    return f"[{id}](#{id.replace('.', '').lower()})" if each.begun else id


def _section(study: Study, results: Sequence[Measured], library: Library) -> Iterator[str]:
    yield f"## {study.id}\n"
    yield f"{study.recipe.about}\n"
    if drawable(study, results):
        yield f"![{study.id}](img/{picture_of(study).name})\n"
    yield from _table(results)
    yield ""
    main = [each for each in results if not each.cell.variant]
    yield from (f"- {text}" for text in sentences(study, main, quick=False))
    yield from (f"- open: {text}" for text in _open(study, library))
    shown = {each.cell.variant: study.recipe.variants[each.cell.variant] for each in results if each.cell.variant}
    yield from (f"- [{name}]: {variant['about']}" for name, variant in shown.items())
    yield from (f"- {text}" for text in _origins(study, results))
    yield ""


def _table(results: Sequence[Measured]) -> Iterator[str]:
    """The table, less the columns that have nothing to say in it."""
    rows = table_rows(results)
    kept = [number for number in range(len(COLUMNS)) if any(row[number] not in ("", "-") for row in rows)]
    names = [COLUMNS[number] for number in kept]
    yield f"| {' | '.join(names).replace('best round', 'best round (chosen on test)')} |"
    yield f"|{'|'.join('--:' if COLUMNS[number] in NUMBERS else '---' for number in kept)}|"
    yield from (f"| {' | '.join(row[number] for number in kept)} |" for row in rows)


def _open(study: Study, library: Library) -> Iterator[str]:
    """Cells of the main reading that have no run, and those that lack seeds."""
    of_cells = measured(study.cells(), library)
    missing = [cell_label(each.cell) for each in of_cells if not each.played]
    if missing:
        yield ", ".join(missing) if len(missing) <= NAMED else f"{len(missing)} of {len(of_cells)} cells"
    seeds = len(study.recipe.seeds)
    begun = [(cell_label(each.cell), len(each.played)) for each in of_cells if each.played]
    short = [f"{label} ({count} of {seeds} seeds)" for label, count in begun if count < seeds]
    if short:
        yield ", ".join(short)


def picture_of(study: Study) -> Path:
    """The file of a study's picture."""
    return PICTURES / f"results_{study.id}.png"


def drawable(study: Study, results: Sequence[Measured]) -> bool:
    """Whether there is something to draw: a figure of single clients' statistics, or of one point, has nothing."""
    try:
        return bool(panel_rows(study, results))
    except ConfigError:
        return False


def _origins(study: Study, results: Sequence[Measured]) -> Iterator[str]:
    """Commands, commits and seconds of the runs."""
    found = [outcome for each in results for outcome in (*each.played, *each.others)]
    records = list({outcome.file_name: outcome for outcome in found}.values())
    played_by = sorted({str(record.environment.get("command", "")) for record in records})
    yield f"command: `fednorm reproduce {study.id}`; played by {', '.join(f'`{text}`' for text in played_by)}"
    commits = sorted({str(record.environment.get("commit", "unknown"))[:12] for record in records})
    yield f"commit: {', '.join(commits)}"
    lost = sum(isinstance(record, Diverged) for record in records)
    seconds = sum(record.run["seconds"] for record in records if isinstance(record, Record))
    yield f"runs: {len(records)}{f', {lost} of which diverged' if lost else ''}, {seconds:,.0f} s in all"


def draw_all(folder: Path = RESULTS) -> list[Path]:
    """A picture for every study that has something to draw."""
    library = Library(folder)
    found = [(study, played(study, library)) for study in all_studies()]
    return [draw(study, results, picture_of(study)) for study, results in found if drawable(study, results)]


def main(arguments: Sequence[str]) -> int:
    """Write the page and its pictures, or say whether the page is current."""
    text = page()
    if "--check" in arguments:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print("docs/results.md is out of date; run python tools/make_results_page.py", file=sys.stderr)
        return 1
    draw_all()
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
