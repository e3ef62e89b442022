"""`fednorm data`: look at a data set, check its bytes, fetch it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from fednorm.cli.flags import Json, Quiet
from fednorm.cli.output import print_json, size_text
from fednorm.errors import ConfigError

app = typer.Typer(help="Look at a data set, check it, fetch it.", no_args_is_help=False)

Name = Annotated[str, typer.Argument(metavar="NAME", help="data set; `fednorm datasets` lists them")]
DataDir = Annotated[
    str | None, typer.Option("--data-dir", metavar="DIR", help="folder with the data sets; default: FEDNORM_DATA")
]


@app.command()
def info(name: Name, data_dir: DataDir = None, json: Json = False) -> None:
    """Say what a set is, under which terms, and whether it is here."""
    from fednorm.data.verify import describe

    facts = describe(name, data_dir)
    _print_facts(facts, json)


@app.command()
def verify(name: Name, data_dir: DataDir = None, json: Json = False) -> None:
    """Read a whole set and check its bytes, counts and labels."""
    from fednorm.data.verify import verify as check

    facts = check(name, data_dir)
    _print_facts(facts, json)
    if not facts["ok"]:
        raise ConfigError(f"{name}: {facts['problem']}")


@app.command()
def fetch(name: Name, data_dir: DataDir = None, quiet: Quiet = False) -> None:
    """Download a set from its home, checked against its published MD5; a broken download is continued."""
    from fednorm.data.fetch import fetch as download
    from fednorm.data.load import data_folder

    shown: dict[str, int] = {}

    def progress(path: str, done: int, total: int | None) -> None:
        percent = 100 * done // total if total else done // 10_000_000
        if percent // 10 != shown.get(path, -1):
            shown[path] = percent // 10
            whole = f" of {size_text(total)}" if total else ""
            print(f"{path}: {size_text(done)}{whole}", file=sys.stderr, flush=True)

    for path in download(name, data_folder(name, data_dir), None if quiet else progress):
        print(path)


def _print_facts(facts: dict[str, Any], json: bool) -> None:
    if json:
        print_json(facts)
        return
    for key, value in facts.items():
        if value not in ("", None, (), [], False):
            text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            print(f"{key.replace('_', ' ')}: {size_text(facts['bytes']) if key == 'bytes' else text}")
    if not facts["here"]:
        print("here: no")
