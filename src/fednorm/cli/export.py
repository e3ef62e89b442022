"""`fednorm export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fednorm.cli.flags import AllowCode, Use
from fednorm.cli.output import echo
from fednorm.errors import unknown


def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    client: Annotated[
        str | None, typer.Option(metavar="ID|NAME", help="this client's model; default: the global")
    ] = None,
    which: Annotated[
        str, typer.Option(metavar="last|best", help="after the last round, or the best by validation (--keep best)")
    ] = "last",
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="default: in RUN")] = None,
    fold: Annotated[
        bool, typer.Option("--fold", help="for inference: BatchNorm and standardised weights folded into plain layers")
    ] = False,
    use: Use = [],  # noqa: B006
    allow_code: AllowCode = False,
) -> None:
    """Write a run's model as a plain safetensors file."""
    if which not in ("last", "best"):
        raise unknown("model", which, ["last", "best"])
    from fednorm.views.export import export as write

    echo(write(folder, output, client=client, which=which, fold=fold, use=use, allow_code=allow_code))
