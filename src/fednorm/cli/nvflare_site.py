"""`fednorm nvflare export-site`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fednorm.cli.output import echo, say
from fednorm.errors import require, unknown


def export_site(
    state: Annotated[Path, typer.Argument(metavar="STATE", help="file that the site or device keeps its state in")],
    model: Annotated[Path, typer.Option("--model", metavar="FILE", help="the run's global model, as safetensors")],
    setup: Annotated[
        Path, typer.Option("--setup", metavar="FILE", help="a device's setup, or config_fed_client.json of the job")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="default: STATE with .safetensors behind")
    ] = None,
    which: Annotated[
        str, typer.Option(metavar="accepted|last", help="with the work the server accepted, or all that was done")
    ] = "accepted",
) -> None:
    """Write a site's own model, from its own state file and the global model; nothing leaves the site."""
    if which not in ("accepted", "last"):
        raise unknown("state", which, ["accepted", "last"])
    require("nvflare", "nvflare", "fednorm nvflare")
    from fednorm.nvflare.personal import export_personal, read_setup

    target = output or state.with_name(f"{state.name}.safetensors")
    found = export_personal(read_setup(setup), state, model, target, which=which)
    if found.open:
        say("the site has done work that it does not know to be accepted; --which last exports it")
    say(f"{len(found.tree)} entries, {len(found.local)} of them the site's own, after exchange {found.exchange}")
    echo(target)
