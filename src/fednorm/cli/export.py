"""`fednorm export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fednorm.cli.flags import AllowCode
from fednorm.cli.settings import refuse_code


def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    client: Annotated[
        str | None, typer.Option(metavar="ID|NAME", help="this client's model; default: the global")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="default: in RUN")] = None,
    fold: Annotated[
        bool, typer.Option("--fold", help="for inference: BatchNorm and standardised weights folded into plain layers")
    ] = False,
    allow_code: AllowCode = False,
) -> None:
    """Write a run's model as a plain safetensors file."""
    from fednorm.running.api import read_config
    from fednorm.running.folder import RunFolder
    from fednorm.views.export import export as write

    run = RunFolder(folder)
    refuse_code(read_config(run)[0].model, f"'{run.config}'", allow_code)
    print(write(folder, output, client=client, fold=fold))
