"""`fednorm resume`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fednorm.cli.flags import AllowCode, Jobs, Json, Quiet, TensorBoard, Track, Use
from fednorm.cli.settings import Asked

if TYPE_CHECKING:
    from fednorm.running.records import OnRow
    from fednorm.running.results import Result


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder of a run or a comparison")],
    rounds: Annotated[
        int | None, typer.Option(metavar="N", help="train on to this many rounds; default: as many as it was meant to")
    ] = None,
    reschedule: Annotated[
        bool,
        typer.Option("--reschedule", help="with --rounds: let schedules and stages follow the new number from here on"),
    ] = False,
    use: Use = [],  # noqa: B006
    jobs: Jobs = 1,
    allow_code: AllowCode = False,
    json: Json = False,
    quiet: Quiet = False,
    tensorboard: TensorBoard = False,
    track: Track = [],  # noqa: B006 -- typer's own way to say "repeatable"
) -> None:
    """Continue where a folder stopped; what comes out equals an uninterrupted run to the bit."""
    from fednorm.cli.play import all_folders, finish, one_folder, watch
    from fednorm.running.config import updated
    from fednorm.running.consent import named_code
    from fednorm.running.folder import RunFolder
    from fednorm.running.given import config_in, read_stored
    from fednorm.running.resuming import resume as go_on

    stored = read_stored(RunFolder(folder))
    config, comparison = config_in(stored), stored.get("compare")
    asked = Asked(
        config=config if rounds is None else updated(config, {"rounds": rounds}),
        methods=(),
        seeds=(),
        out=folder,
        jobs=jobs,
        dry_run=False,
        json=json,
        quiet=quiet,
        tensorboard=tensorboard,
        track=tuple(track),
        code_in_file=bool(named_code(config)),
    )

    def work(tell: OnRow) -> Result:
        return go_on(
            folder, rounds=rounds, reschedule=reschedule, jobs=jobs, on_row=tell, use=use, allow_code=allow_code
        )

    folders = one_folder(asked, folder)
    if comparison:
        folders = all_folders(comparison["methods"], comparison["seeds"], folder)
    finish(asked, watch(asked, folder, folders, work))
