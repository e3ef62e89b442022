"""Write docs/settings.md: every field of a config, every way to divide data, and a recipe with comments."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fednorm.data.partition import PARTITIONS
from fednorm.running import config
from fednorm.running.config import RunConfig
from fednorm.running.field_texts import field_texts

ROOT = Path(__file__).resolve().parent.parent
PAGE, RECIPE = ROOT / "docs" / "settings.md", ROOT / "examples" / "compare.toml"
HEAD = """# Settings

This page is written by `make docs` from `src/fednorm/running/config.py` and the registered partitions.

A run is one config: every field has a default, and `config.json` in the run's folder holds them all. A field is set

- in a TOML file, `fednorm run --config FILE`: `lr = 0.1` below `[train]`;
- with `--set train.lr=0.1`, as often as needed; fields of every day have a flag of their own, here `--lr 0.1`
  ([command line](cli.md));
- from Python: `fednorm.run(lr=0.1)`, or `fednorm.run(**{"train.lr": 0.1})` where a short name is not clear.

Later ones win: defaults, the file, `--set`, flags. `none` on the command line takes a value away again. A field that
does not exist, a value of the wrong kind or out of range is refused by name before anything is written, and `--dry-run`
prints the whole config without running it, as TOML that can be saved and used.
"""

PARTITIONED = """\
How a set is dealt to clients: `--partition NAME` or `--partition 'NAME(option=value)'`. Every deal is a function of the
labels, the number of clients and the seed; `fednorm data partition SET --partition NAME` shows it, as a picture too,
before anything is trained. `data.min_size` is the fewest examples a client may get.
"""


def page() -> str:
    """docs/settings.md."""
    return "\n".join([HEAD, *_sections(), _partitions(), _recipe()])


def _sections() -> list[str]:
    texts, hints = field_texts(config), get_type_hints(RunConfig)
    nested = {f.name: hints[f.name] for f in fields(RunConfig) if _is_section(hints[f.name])}
    parts = [_section("The run itself", RunConfig, "", texts["RunConfig"])]
    return parts + [_section(f"[{name}]", cls, f"{name}.", texts[cls.__name__]) for name, cls in nested.items()]


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and is_dataclass(hint)


def _section(title: str, cls: Any, prefix: str, texts: Mapping[str, str]) -> str:
    hints, made = get_type_hints(cls), cls()
    rows = [
        f"| `{prefix}{each.name}` | {_takes(hints[each.name])} | {_shown(getattr(made, each.name))} "
        f"| {_cell(texts[each.name])} |"
        for each in fields(cls)
        if not _is_section(hints[each.name])
    ]
    table = ["| field | takes | default | meaning |\n|---|---|---|---|", *rows, ""]
    return "\n".join([f"## {title}\n", f"{' '.join((cls.__doc__ or '').split())}\n", *table])


def _takes(hint: Any) -> str:
    """What a field takes, in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in inner)
    if origin is tuple:
        return "several, with commas"
    if origin in (Union, types.UnionType):
        return " or ".join(_takes(option) for option in inner)
    words = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text", type(None): "`none`"}
    return words[hint]


def _shown(value: Any) -> str:
    """A default as TOML would have it."""
    if isinstance(value, tuple):
        return "-" if not value else f"`{', '.join(map(str, value))}`"
    return "`none`" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _partitions() -> str:
    rows = [
        f"| `{name}` | {_options(info.options)} | {_cell(_first(inspect.getdoc(info.function) or info.summary))} |"
        for name, info in PARTITIONS.items()
    ]
    return "\n".join(
        [
            "## Partitions\n",
            PARTITIONED,
            "| partition | options | what it does |\n|---|---|---|",
            *rows,
            "",
        ]
    )


def _options(options: Mapping[str, object]) -> str:
    return ", ".join(f"`{name}={_default(value)}`" for name, value in options.items()) or "-"


def _default(value: object) -> str:
    return "none" if value is None else str(value)


def _first(text: str) -> str:
    """The first paragraph."""
    return " ".join(text.split("\n\n")[0].split())


def _recipe() -> str:
    return "\n".join(
        [
            "## A worked recipe\n",
            "[examples/compare.toml](../examples/compare.toml), played by `fednorm compare --config "
            "examples/compare.toml`:\n",
            f"```toml\n{RECIPE.read_text(encoding='utf-8').rstrip()}\n```",
            "",
        ]
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
