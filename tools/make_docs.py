"""Write the generated pages of docs/: the command line's, from the same objects that print `--help`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fednorm.cli import app

DOCS = Path(__file__).resolve().parent.parent / "docs"
HEAD = """# Command line

This page is written by `make docs` from the help of the commands.

Order of settings: defaults, then the TOML file of `--config`, then `--set`, then flags; later ones win.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a bug in fednorm: the traceback is printed, please report it |
| 2 | bad input, config or checkpoint, or own code that fails: one line says what and where |
| 3 | training diverged |
| 4 | too few usable clients (quorum) |
| 5 | the disk is full or refuses |
| 6 | the folder is in use by another process |
| 130, 143 | stopped by Ctrl-C or SIGTERM; `fednorm resume DIR` goes on |

`--debug`, anywhere on the line, or the environment variable `FEDNORM_DEBUG=1` shows the traceback behind an error: of a
model or a method of your own, where in your code it failed.

Recipes, run folders and data may come from others. Code that they name runs with `--allow-code` alone, nothing is
imported from the folder one is in unless `--use` or `--model` names it, links inside a run's folder are not followed,
and what they say does nothing to a terminal. A file of data that would unpack to more than 256 MiB and a hundred times
its own size is refused; the environment variable `FEDNORM_MAX_GB=8` allows 8 GB for each instead.

`fednorm --install-completion` teaches your shell to complete commands, flags, and the names of methods, models, data
sets, partitions and fields; `--show-completion` prints the script instead.

Tables are laid out for the terminal: words stay whole, and columns for which there is no room are left out by name. A
file or a pipe has no width, so lines are never broken there; `COLUMNS=80 fednorm methods | less` gives them one.

`--track tensorboard`, `--track wandb` and `--track mlflow` follow runs beside their folder, each with its extra
(`pip install "fednorm[wandb]"`); all are told the same numbers, round by round, and a tracker that fails warns once
while the run goes on. W&B works offline where nobody is logged in or WANDB_MODE says so, and `wandb sync` sends it
later; MLflow writes into the run's folder unless MLFLOW_TRACKING_URI names a server. A resumed run goes on under the
same ids.
"""


def cli_page() -> str:
    """docs/cli.md."""
    return "\n".join([HEAD, *_sections(typer.main.get_command(app), "fednorm")])


def _sections(command: Any, path: str) -> list[str]:
    inner = getattr(command, "commands", {})
    if inner:
        return [section for name, each in inner.items() for section in _sections(each, f"{path} {name}")]
    usage = " ".join([path, *(_metavar(p) for p in command.params if p.param_type_name == "argument"), "[OPTIONS]"])
    rows = [f"| {_names(p)} | {_cell(p.help)} |" for p in command.params if p.name != "help"]
    lines = [f"## {path}\n", f"{command.help}\n", f"```\n{usage}\n```\n"]
    return [*lines, "| option | meaning |\n|---|---|", *rows, ""]


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_metavar(parameter)}`"
    takes = "" if parameter.is_flag else f" {_metavar(parameter)}"
    return ", ".join(f"`{name}{takes}`" for name in parameter.opts).replace("|", "\\|")


def _metavar(parameter: Any) -> str:
    return parameter.metavar or parameter.name.upper()


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


if __name__ == "__main__":
    (DOCS / "cli.md").write_text(cli_page())
