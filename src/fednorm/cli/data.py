"""`fednorm data`: look at a data set or at your own data, check it, fetch it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fednorm.cli import complete
from fednorm.cli.data_text import facts_text
from fednorm.cli.flags import Assignments, Json, Quiet, Use
from fednorm.cli.output import echo, print_json, size_text
from fednorm.cli.settings import resolve
from fednorm.errors import ConfigError

if TYPE_CHECKING:
    from fednorm.data.federation import Federation

app = typer.Typer(help="Look at a data set, check it, fetch it.", no_args_is_help=False)

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="data set; `fednorm datasets` lists them", autocompletion=complete.datasets),
]
AnyName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="data set, or your own: folder:DIR, table:FILE, npz:FILE",
        autocompletion=complete.any_data,
    ),
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
            echo(f"{path}: {size_text(done)}{whole}", file=sys.stderr, flush=True)

    for path in download(name, data_folder(name, data_dir), None if quiet else progress):
        echo(path)


Partition = Annotated[
    str | None,
    typer.Option(
        "--partition",
        metavar="HOW",
        help="such as iid or dir_client(alpha=0.1); default: shards",
        autocompletion=complete.partitions,
    ),
]
Clients = Annotated[int | None, typer.Option("--clients", metavar="N", help="number of clients; default: 5")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="seed of the deal")]
Target = Annotated[str | None, typer.Option("--target", metavar="COL", help="column of a table to be predicted")]
ClientColumn = Annotated[
    str | None, typer.Option("--client-column", metavar="COL", help="column of a table that names the client")
]
SplitColumn = Annotated[
    str | None, typer.Option("--split-column", metavar="COL", help="column of a table that says train or test")
]
ImageSize = Annotated[
    int | None, typer.Option("--image-size", metavar="N", help="pixels a side that images are brought to")
]


@app.command()
def check(
    name: AnyName,
    how: Partition = None,
    clients: Clients = None,
    seed: Seed = 0,
    target: Target = None,
    client_column: ClientColumn = None,
    split_column: SplitColumn = None,
    image_size: ImageSize = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="model that a run would take; default: by the data")
    ] = None,
    data_dir: DataDir = None,
    use: Use = [],  # noqa: B006
    assignments: Assignments = [],  # noqa: B006
    json: Json = False,
) -> None:
    """Look at the data of each client, and list all that a run would refuse; exit code 2 if there is anything."""
    from fednorm.views.data_check import checked

    columns = {"target": target, "client": client_column, "split": split_column, "size": image_size}
    flags = _flags(name, how, clients, seed, data_dir, **columns) | ({"model": model} if model else {})
    facts, problems = checked(
        lambda: resolve(file=None, assignments=assignments, flags=flags, use=use, allow_code=True)[0]
    )
    if json:
        print_json({**facts, "problems": problems})
    else:
        for line in (facts_text(facts) if facts else []) + [""] * bool(facts):
            echo(line)
        for problem in problems or ["a run would refuse nothing"]:
            echo(f"problem: {problem}" if problems else problem)
    if problems:
        many = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{name} has {many} that a run would refuse; they are listed above")


@app.command()
def partition(
    name: AnyName,
    how: Partition = None,
    clients: Clients = None,
    seed: Seed = 0,
    target: Target = None,
    client_column: ClientColumn = None,
    split_column: SplitColumn = None,
    image_size: ImageSize = None,
    picture: Annotated[
        str | None,
        typer.Option("--picture", metavar="FILE.png", help="draw who holds how much of which class or domain"),
    ] = None,
    use: Use = [],  # noqa: B006
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Deal a set to clients and show who holds what, without training."""
    from fednorm.data.client_facts import held
    from fednorm.data.summary import table
    from fednorm.errors import require
    from fednorm.running.extensions import with_extensions
    from fednorm.running.plan import build_federation

    if picture:
        require("matplotlib", "report", "drawing a picture")
    columns = {"target": target, "client": client_column, "split": split_column, "size": image_size}
    flags = _flags(name, how, clients, seed, data_dir, **columns)
    config, _ = resolve(file=None, assignments=[], flags=flags, use=use, allow_code=True)
    federation = build_federation(with_extensions(config))
    entries = held(federation)
    if picture:
        _draw(name, data_dir, federation, picture)
    if json:
        print_json(entries)
        return
    echo(table(entries))
    if picture:
        echo(f"picture: {picture}")


def _flags(
    name: str, how: str | None, clients: int | None, seed: int, data_dir: str | None, **columns: object
) -> dict[str, str]:
    """What was asked for, by field, as a run's flags are read."""
    given = {"name": name, "partition": how, "clients": clients, "dir": data_dir, **columns}
    fields = {f"data.{field}": str(value) for field, value in given.items() if value is not None}
    return {**fields, "seed": str(seed)}


def _draw(name: str, data_dir: str | None, federation: Federation, path: str) -> None:
    """By domain where the set has domains, else by class."""
    from fednorm.data.load import load_dataset
    from fednorm.data.picture import domain_counts, domain_picture, label_picture
    from fednorm.data.registry import DATASETS

    if federation.task != "classification":
        raise ConfigError(f"a picture shows classes, but the task of {name} is {federation.task}; leave out --picture")
    image_set = None if name.replace("-", "_") not in DATASETS else load_dataset(name, data_dir)
    if image_set is None or image_set.train_domain is None:
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
            echo(f"{key.replace('_', ' ')}: {size_text(facts['bytes']) if key == 'bytes' else text}")
    if not facts["here"]:
        echo("here: no")
