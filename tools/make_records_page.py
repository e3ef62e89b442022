"""Write docs/records.md: what a run leaves behind, from the records that the code itself uses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NotRequired, Required, get_args, get_origin, get_type_hints

from fednorm.running import records
from fednorm.running.field_texts import field_texts

PAGE = Path(__file__).resolve().parent.parent / "docs" / "records.md"
HEAD = """# Records: what a run leaves behind

This page is written by `make docs` from `src/fednorm/running/records.py`.

## Files of a run's folder

| file | content |
|---|---|
| `config.json` | every field of the config; under `given`, which of its parts were Python objects, with digests of \
data that were; digests of the files in `use` |
| `env.json` | versions of fednorm, Python and torch, commit, platform, cores, threads, GPU, command, start |
| `metrics.jsonl` | a [RoundRow](#roundrow) a line; a run that is resumed first brings it to its last checkpoint |
| `result.json` | what came out, a [ResultFile](#resultfile); written last, so a run that has it has ended, or was \
stopped by `fednorm.Stop` |
| `model.safetensors` | the final global model: all entries of its state dict; method and model in the metadata |
| `best.safetensors` | with `--keep best`: the global model of the round that was best on the validation data |
| `round-N.safetensors` | with `--keep-every N`: the global model after that round |
| `state.sqlite` | what `fednorm resume` continues from; private to fednorm, `fednorm export` reads it |
| `tensorboard/`, `wandb/`, `mlruns/` | what trackers wrote (`--track`) |
| `tracking.json` | ids of the run with W&B and MLflow, so that a resumed run goes on there |
| `.lock` | the process that works in the folder |
| `*.part` | a file that is being written; it takes its name when it is whole |

A comparison has `config.json` (with its methods and seeds under `compare`), `env.json`, `result.json` with all runs,
a folder for each run, named `METHOD-seedN`, and `curves.png` if matplotlib is there. `--json` adds `folder`, `seen`
(one sentence on the pooled test) and `picture` to what it prints.

## The same in Python

`fednorm.run(..., on_row=tell)` and `fednorm.compare(..., on_row=tell)` call `tell(run, row)` after every round: `run`
is a `RunId(method, seed)`, `row` a `RoundRow`. Raising `fednorm.Stop` in it ends that run after the round: all is
committed, the result has what was done and says so, and `fednorm.resume` goes on. The `runs` of what they return are
`RunResult`s. Records are plain dicts at run time; their types are in `fednorm.running.records`.
[Python API](python_api.md) has an example.
"""
TAIL = """## What stays compatible

- Within a version fields may be added, so pass over those you do not know; names and meanings stay.
- A field that is renamed, removed or gets another meaning makes a new version.
- Files of the version before are opened, and upgraded in memory by `read_row` and `read_result` of
  `fednorm.running.records`. A newer version is refused by its number, with exit code 2.
- `state.sqlite` has a version of its own: the version before is brought up when it is opened, a newer one refused.
"""
ROW = ("RoundRow", "Scores", "ProtocolScores", "MetricFacts")
RESULT = (
    "ResultFile",
    "MadeFrom",
    "RunResult",
    "Ran",
    "BestRound",
    "Peak",
    "Curves",
    "Bytes",
    "TableLine",
    "MeanOverSeeds",
)
SHOWN = (*ROW, *RESULT)


def page() -> str:
    """docs/records.md."""
    texts = field_texts(records)
    sections = [_section(getattr(records, name), texts[name]) for name in SHOWN]
    return "\n".join([HEAD, "## Records\n", *sections, _history(), TAIL])


def _section(cls: Any, texts: dict[str, str]) -> str:
    hints = get_type_hints(cls, include_extras=True)
    rows = [
        f"| `{name}` | {_type(hints[name])} | {_there(cls, hints[name])} | {_cell(text)} |"
        for name, text in texts.items()
    ]
    table = ["| field | type | | meaning |\n|---|---|---|---|", *rows, ""]
    return "\n".join([f"### {cls.__name__}\n", f"{_one_line(cls.__doc__)}\n", *table])


def _type(hint: Any) -> str:
    """A type as Python writes it, with links to the records in it."""
    inner = get_args(hint)[0] if get_origin(hint) in (NotRequired, Required) else hint
    text = inner.__name__ if isinstance(inner, type) and not get_args(inner) else str(inner)
    text = text.replace("fednorm.running.records.", "").replace("NoneType", "null").replace("None", "null")
    found = re.search("|".join(sorted(SHOWN, key=len, reverse=True)), text)
    code = _cell(f"`{text}`")
    return f"[{code}](#{found[0].lower()})" if found else code


def _there(cls: Any, hint: Any) -> str:
    origin = get_origin(hint)
    always = origin is Required or (cls.__total__ and origin is not NotRequired)
    return "always" if always else "may be absent"


def _history() -> str:
    rows = [
        f"| {what} | {version} | {_cell(text)} |"
        for what, history in (("row", records.ROW_HISTORY), ("result.json", records.RESULT_HISTORY))
        for version, text in history.items()
    ]
    written = f"This fednorm writes rows of version {records.ROW_VERSION}, results of version {records.RESULT_VERSION}."
    return "\n".join(["## Versions\n", written, "\n| record | version | what changed |\n|---|---|---|", *rows, ""])


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
