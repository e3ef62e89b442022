"""`fednorm data`: look at a data set, check its bytes, fetch it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fednorm.cli import complete
from fednorm.cli.flags import Json, Quiet, Use
from fednorm.cli.output import print_json, size_text
from fednorm.errors import ConfigError

if TYPE_CHECKING:
    from fednorm.data.federation import Federation

app = typer.Typer(help="Look at a data set, check it, fetch it.", no_args_is_help=False)

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="data set; `fednorm datasets` lists them", autocompletion=complete.datasets),
]
DataDir = Annotated[
    str | None, typer.Option("--data-dir", metavar="DIR", help="folder with the data sets; default: FEDNORM_DATA")
]


@app.command()
def info(name: Name, data_dir: DataDir = None, json: Json = False) -> None:
    """Say what a set is, under which terms, and whether it is here."""
    from fednorm.data.verify import describe_dataset

    facts = describe_dataset(name, data_dir)
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


@app.command()
def partition(
    name: Name,
    how: Annotated[
        str,
        typer.Option(
            "--partition",
            metavar="HOW",
            help="such as iid or dir_client(alpha=0.1)",
            autocompletion=complete.partitions,
        ),
    ] = "shards",
    clients: Annotated[int, typer.Option("--clients", metavar="N", help="number of clients")] = 5,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="seed of the deal")] = 0,
    picture: Annotated[
        str | None,
        typer.Option("--picture", metavar="FILE.png", help="draw who holds how much of which class or domain"),
    ] = None,
    use: Use = [],  # noqa: B006
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Deal a set to clients and show who holds what, without training."""
    from fednorm.data.summary import summary, table
    from fednorm.errors import require
    from fednorm.running.config import DataConfig, RunConfig
    from fednorm.running.extensions import load
    from fednorm.running.plan import build_federation

    if picture:
        require("matplotlib", "report", "drawing a picture")
    load(use)
    data = DataConfig(name=name, dir=data_dir, partition=how, clients=clients)
    federation = build_federation(RunConfig(data=data, seed=seed))
    rows = [rows.numpy() for rows in federation.clients]
    entries = summary(rows, federation.y.numpy(), federation.num_classes)
    if picture:
        _draw(name, data_dir, federation, picture)
    if json:
        print_json(entries)
        return
    print(table(entries))
    if picture:
        print(f"picture: {picture}")


def _draw(name: str, data_dir: str | None, federation: Federation, path: str) -> None:
    """By domain where the set has domains, else by class."""
    from fednorm.data.load import load_dataset
    from fednorm.data.picture import domain_counts, domain_picture, label_picture
    from fednorm.data.registry import DATASETS

    if name.replace("-", "_") not in DATASETS:
        label_picture(federation, path)
        return
    image_set = load_dataset(name, data_dir)
    if image_set.train_domain is None:
        label_picture(federation, path)
        return
    counts = domain_counts(federation, image_set.train_domain.numpy(), len(image_set.domain_names))
    domain_picture(counts, image_set.domain_names, federation, path)


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
