"""`fednorm resume`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fednorm.cli.flags import AllowCode, Jobs, Json, Quiet, TensorBoard, Track
from fednorm.cli.settings import Asked, names_code, refuse_code

if TYPE_CHECKING:
    from fednorm.running.records import OnRow
    from fednorm.running.results import Result


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder of a run or a comparison")],
    jobs: Jobs = 1,
    allow_code: AllowCode = False,
    json: Json = False,
    quiet: Quiet = False,
    tensorboard: TensorBoard = False,
    track: Track = [],  # noqa: B006 -- typer's own way to say "repeatable"
) -> None:
    """Continue where a folder stopped; what comes out equals an uninterrupted run to the bit."""
    from fednorm.cli.play import all_folders, finish, one_folder, watch
    from fednorm.running.api import read_config, resume_folder
    from fednorm.running.comparison import resume_comparison
    from fednorm.running.folder import RunFolder

    run = RunFolder(folder)
    config, comparison = read_config(run)
    refuse_code(config.model, f"'{run.config}'", allow_code)
    asked = Asked(
        config=config,
        methods=(),
        seeds=(),
        out=folder,
        jobs=jobs,
        dry_run=False,
        json=json,
        quiet=quiet,
        tensorboard=tensorboard,
        track=tuple(track),
        code_in_file=names_code(config.model),
    )

    def work(tell: OnRow) -> Result:
        return resume_comparison(run, jobs=jobs, on_row=tell) if comparison else resume_folder(run, on_row=tell)

    folders = one_folder(asked, folder)
    if comparison:
        folders = all_folders(comparison["methods"], comparison["seeds"], folder)
    finish(asked, watch(asked, folder, folders, work))
