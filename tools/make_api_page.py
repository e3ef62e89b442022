"""Write docs/python_api.md: an introduction, and every public name with its signature and what it says of itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import fednorm

PAGE = Path(__file__).resolve().parent.parent / "docs" / "python_api.md"
GROUPS = {
    "running": "Runs and results",
    "views": "Runs and results",
    "data": "Data",
    "models": "Models and tasks",
    "scoring": "Models and tasks",
    "methods": "Methods and their parts",
    "core": "Methods and their parts",
    "engines": "Runs and results",
    "halves": "Own loops and own transports",
    "errors": "Errors",
}
"""The title under which a name is found, by the room it comes from."""
WIDTH = 100

INTRODUCTION = """\
# Python API

This page is written by `make docs` from the code. Public names are those of `fednorm.__all__`; everything else may
change without notice. `import fednorm` is quick: torch is imported when a name is first used.

## A run, a comparison

Everything has a default, and every field of the config ([settings](settings.md)) is a keyword:

```python
import fednorm

result = fednorm.run(method="fixbn(at=0.5)", model="mlp_bn", rounds=4, local_steps=2, train_limit=500)
print(result)  # a table; str(result) has it as text
print(result.final())  # the score of the global model on the pooled test
print(result.runs[0]["final"]["own_client"]["per_client"])  # what each client's own model makes of its own data
print(result.curves["round"], result.curves["pooled"])
```

`result.runs` holds a [RunResult](records.md#runresult) for every run. With your own data and models:
[own data](own_data.md).

## Watching a run, and stopping it early

`on_row` is called after every round with a `RunId(method, seed)` and the round's [row](records.md#roundrow), a plain
dict. Whatever it does, it cannot change the numbers. Raising `fednorm.Stop` in it ends the run after this round: what
was played is committed, the result has it, and a folder can be resumed later.

```python
import fednorm


def stop_when_good(run, row):
    scores = row.get("eval")  # not every round is scored; see eval.every
    if scores:
        print(run.method, run.seed, row["round"], row["train_loss"], scores["pooled"]["accuracy"])
    if scores and scores["pooled"]["accuracy"] > 30:
        raise fednorm.Stop


settings = {"model": "mlp_bn", "rounds": 40, "local_steps": 5, "train_limit": 1000, "every": 1}
result = fednorm.run(method="fedavg", on_row=stop_when_good, **settings)
assert result.runs[0]["rounds_done"] < 40
```

Any other exception ends the run as well and reaches you as it is; a folder then holds the last checkpoint. Trackers
are such observers: `--track tensorboard`, `--track wandb` and `--track mlflow` of the command line are told the same
rows."""


def page() -> str:
    """docs/python_api.md."""
    homes: dict[str, str] = vars(fednorm)["_HOME"]
    named: dict[str, list[str]] = {title: [] for title in GROUPS.values()}
    for name in sorted(homes, key=str.lower):
        named[GROUPS[homes[name].split(".")[0]]].append(name)
    parts = [INTRODUCTION]
    for title, names in named.items():
        parts += [f"## {title}", *map(entry, names)] if names else []
    return "\n\n".join(parts) + "\n"


def entry(name: str) -> str:
    """One public name."""
    value = getattr(fednorm, name)
    parts = [f"### {name}"]
    if isinstance(value, ModuleType):
        parts += [told(value), "\n".join(bullets(value))]
    elif isinstance(value, type) and issubclass(value, Enum):
        parts += [told(value), ", ".join(f"`{each.name}`" for each in value)]
    elif isinstance(value, type):
        parts += [code(f"class {name}", value), told(value), "\n".join(bullets(value))]
    else:
        parts += [code(name, value), told(value)]
    return "\n\n".join(filter(None, parts))


def code(name: str, value: Any) -> str:
    """A signature as a block."""
    return f"```\n{signature(name, value)}\n```"


def signature(name: str, value: Any, width: int = WIDTH) -> str:
    """How something is called, one argument a line where it is longer than `width`."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    if isinstance(value, type) and issubclass(value, BaseException):
        return name
    kept = [each for each in found.parameters.values() if each.name not in ("self", "cls")]
    returns = "" if isinstance(value, type) else f" -> {_plain(found.return_annotation)}"
    texts = [_argument(each) for each in kept]
    first_keyword = [at for at, each in enumerate(kept) if each.kind is each.KEYWORD_ONLY][:1]
    if first_keyword and not any(each.kind is each.VAR_POSITIONAL for each in kept):
        texts.insert(first_keyword[0], "*")
    line = f"{name}({', '.join(texts)}){returns}"
    return line if len(line) <= width else f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){returns}"


def _argument(each: inspect.Parameter) -> str:
    stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
    text = stars + each.name + ("" if each.annotation is each.empty else f": {_plain(each.annotation)}")
    if each.default is each.empty:
        return text
    # What a dataclass makes anew has no text that is the same everywhere.
    default = repr(each.default)
    return f"{text} = {'...' if default.startswith('<') else default}"


def _plain(annotation: Any) -> str:
    """An annotation without the modules of its types."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)


def told(value: Any) -> str:
    """What it says of itself, without examples."""
    text = inspect.getdoc(value) or ""
    return "\n\n".join(part for part in text.split("\n\n") if not part.lstrip().startswith(">>>")).strip()


def bullets(value: Any) -> Iterator[str]:
    """Public methods and properties of a class, or functions of a module, with their first sentence."""
    for name, each in vars(value).items():
        each = each.__func__ if isinstance(each, staticmethod | classmethod) else each
        text = inspect.getdoc(each)
        home = value.__name__ if inspect.ismodule(value) else value.__module__
        if name.startswith("_") or not text or getattr(each, "__module__", home) != home:
            continue
        if isinstance(each, property):
            yield f"- `{name}`: {_sentence(text)}"
        elif inspect.isfunction(each):
            yield f"- `{signature(name, each, width=10_000)}`: {_sentence(text)}"


def _sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
