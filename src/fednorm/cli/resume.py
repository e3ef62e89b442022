"""`fednorm resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fednorm.cli.flags import AllowCode, Jobs, Json, Quiet, TensorBoard
from fednorm.cli.settings import Request, names_code, refuse_code


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder of a run or a comparison")],
    jobs: Jobs = 1,
    allow_code: AllowCode = False,
    json: Json = False,
    quiet: Quiet = False,
    tensorboard: TensorBoard = False,
) -> None:
    """Continue where a folder stopped; what comes out equals an uninterrupted run to the bit."""
    from fednorm.cli.play import finish, watch
    from fednorm.errors import ConfigError
    from fednorm.running.api import read_config, resume_folder
    from fednorm.running.comparison import resume_comparison
    from fednorm.running.folder import RunFolder
    from fednorm.running.results import Result

    if jobs < 1:
        raise ConfigError(f"--jobs {jobs} is out of range; give 1 or more")
    place = RunFolder(folder)
    config, comparison = read_config(place)
    refuse_code(config.model, f"'{place.config}'", allow_code)
    request = Request(
        config=config,
        methods=(),
        seeds=(),
        out=folder,
        jobs=jobs,
        dry_run=False,
        json=json,
        quiet=quiet,
        tensorboard=tensorboard,
        code_in_file=names_code(config.model),
    )

    def work(tell) -> Result:  # type: ignore[no-untyped-def]
        if comparison:
            return resume_comparison(place, jobs=jobs, on_event=tell)
        return resume_folder(place, on_round=lambda plan, row: tell(plan.method.name, plan.config.seed, row))

    runs = len(comparison["methods"]) * len(comparison["seeds"]) if comparison else 1
    finish(request, watch(request, folder, runs, work))
