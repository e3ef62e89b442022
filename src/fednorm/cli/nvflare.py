"""`fednorm nvflare`: a run in NVFlare's simulator, as a job for its servers, and what they must permit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fednorm.cli.flags import AllowCode, Assignments, Json, Out, Quiet, Use, option
from fednorm.cli.nvflare_site import export_site
from fednorm.cli.output import Stopped, echo, print_json, print_scores, print_table, progress_stream, say, size_text
from fednorm.cli.settings import resolve
from fednorm.errors import ConfigError, require

if TYPE_CHECKING:
    from fednorm.running.config import RunConfig
    from fednorm.running.results import Result

app = typer.Typer(help="Runs on NVIDIA FLARE.", no_args_is_help=False)
app.command(name="export-site")(export_site)
_HERE = "fednorm nvflare"
RunFile = Annotated[
    Path, typer.Argument(metavar="RUN.toml", help="TOML file with fields, as of `fednorm run --config`")
]
RunId = Annotated[
    str | None,
    option(
        "--run-id", metavar="NAME", help="continue the run of this name, or begin it; default: start clean", panel="Run"
    ),
]
StateDir = Annotated[
    str | None,
    option(
        "--state-dir", metavar="DIR", help="folder that keeps state; default: below NVFlare's workspace", panel="Run"
    ),
]


def _config(file: Path | None, assignments: list[str], use: list[str], allow_code: bool) -> RunConfig:
    """What a file asks for; first of all that there is an NVFlare to ask it of."""
    require("nvflare", "nvflare", _HERE)
    return resolve(file=file, assignments=assignments, flags={}, use=use, allow_code=allow_code)[0]


@app.command()
def run(
    file: RunFile,
    check: Annotated[
        bool,
        option("--check", help="also play it in the sequential engine; exit code 1 where a bit differs", panel="Run"),
    ] = False,
    threads: Annotated[
        int | None, option("--threads", metavar="N", help="sites that work at a time; default: all", panel="Run")
    ] = None,
    run_id: RunId = None,
    state_dir: StateDir = None,
    out: Out = None,
    assignments: Assignments = [],  # noqa: B006
    use: Use = [],  # noqa: B006
    allow_code: AllowCode = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Play a run in NVFlare's simulator: a server and every site as processes on this machine."""
    config = _config(file, assignments, use, allow_code)
    from fednorm.cli.play import fresh
    from fednorm.nvflare.same import refuse_incomparable
    from fednorm.nvflare.simulate import simulate
    from fednorm.running.observers import watching
    from fednorm.running.stopping import Interrupted

    if threads is not None and threads < 1:
        raise ConfigError(f"--threads {threads} is out of range; give 1 or more")
    if check:
        refuse_incomparable(config)
    if run_id is not None and state_dir is None:
        raise ConfigError(f"--run-id {run_id} needs a place that outlives the simulator; give --state-dir DIR")
    place = out or fresh(f"nvflare-{config.method}")
    kept = None if state_dir is None else str(Path(state_dir).absolute())
    stream = progress_stream(quiet, json)
    if stream:
        echo("NVFlare's simulator starts; its first round takes a while", file=stream, flush=True)
    try:
        with watching(config.rounds, stream=stream) as tell:
            result = simulate(config, place, threads=threads, run_id=run_id, state_dir=kept, on_row=tell)
    except Interrupted as stop:
        again = "nothing of it is kept; a run with --run-id can be continued"
        if run_id is not None:
            again = f"continue with the same --run-id {run_id} and --state-dir {state_dir}"
        raise Stopped(f"stopped; {again}", stop.exit_code) from None
    compared = _compared(config, result, place) if check else []
    if json:
        print_json({**result.to_json(), "folder": result.folder, **({"check": compared} if check else {})})
    else:
        print_scores(result)
        echo(f"folder: {result.folder}")
        for each in compared:
            differs = f"differs from the sequential engine, first in '{each['entry']}'"
            echo(
                f"{each['holder']}: {'same bits' if each['same'] else differs}",
                file=None if each["same"] else sys.stderr,
            )
    return int(not all(each["same"] for each in compared))


def _compared(config: RunConfig, result: Result, out: Path) -> list[dict[str, Any]]:
    from fednorm.nvflare.same import compare_with_sequential

    found = compare_with_sequential(config, out, result.runs[0].get("client_names", []))
    return [{"holder": each.holder, "same": each.is_same, "entry": each.entry} for each in found]


@app.command()
def export(
    file: RunFile,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder in which the job's own is made")],
    name: Annotated[str, option("--name", metavar="NAME", help="name of the job", panel="Run")] = "fednorm",
    sites: Annotated[
        str | None,
        option(
            "--sites", metavar="NAMES", help="all sites, with commas between; default: site-1,site-2,...", panel="Run"
        ),
    ] = None,
    run_id: RunId = None,
    state_dir: StateDir = None,
    assignments: Assignments = [],  # noqa: B006
    use: Use = [],  # noqa: B006
    allow_code: AllowCode = False,
) -> None:
    """Write a job for `nvflare job submit`."""
    config = _config(file, assignments, use, allow_code)
    from fednorm.files import disk_errors
    from fednorm.nvflare.permission import ALLOWED, code_paths
    from fednorm.nvflare.recipe import Recipe

    job = folder / name
    if job.exists():
        raise ConfigError(f"'{job}' exists already; choose another DIR or --name")
    named = [site.strip() for site in (sites or "").split(",") if site.strip()]
    recipe = Recipe(config=config, name=name, sites=named, run_id=run_id, state_dir=state_dir)
    with disk_errors(job):
        recipe.export(str(folder))
    echo(f"job: {job}")
    needed = ", ".join(f'"{path}"' for path in (ALLOWED, *code_paths(config)))
    say(f"the server and every site must have {needed} in class_allow_list of local/resources.json")
    echo(f"submit it with: nvflare job submit -j {job}")


@app.command()
def check(
    file: Annotated[Path | None, typer.Argument(metavar="[RUN.toml]", help="run whose job is looked at")] = None,
    resources: Annotated[
        Path | None,
        option("--resources", metavar="FILE", help="a site's local/resources.json to look into", panel="Run"),
    ] = None,
    assignments: Assignments = [],  # noqa: B006
    use: Use = [],  # noqa: B006
    allow_code: AllowCode = False,
    json: Json = False,
) -> None:
    """Say what a job shares and what sites must permit; exit code 2 if something would keep it from running."""
    config = _config(file, assignments, use, allow_code)
    from fednorm.nvflare.checking import examine

    found = examine(config if file else None, resources)
    if json:
        print_json(found)
    else:
        _tell(found, resources)
    for problem in found["problems"]:
        raise ConfigError(problem)


def _tell(found: dict[str, Any], resources: Path | None) -> None:
    say(", ".join(f"{name} {text}" for name, text in found["versions"].items()))
    for port, text in found["ports"].items():
        say(f"port {port}: {text}")
    permits = found["permits"]
    needed, missing = ", ".join(permits["needed"]), ", ".join(permits["missing"])
    say(f"class_allow_list of local/resources.json, at the server and every site, must have: {needed}")
    if resources is None:
        say("NVFlare's own list does not; --resources FILE looks into a site's")
    else:
        say(f"'{resources}': {f'missing: {missing}' if missing else 'nothing is missing'}")
    say(
        "code that the job names must be installed at every site, or go with the job where the right byoc is granted"
        if permits["byoc"]
        else "right byoc: not needed, the job brings no code"
    )
    if "sites" in found:
        say(f"sites: {', '.join(found['sites'])}")
    for phase in found.get("phases", []):
        up, down = size_text(phase["bytes_up"]), size_text(phase["bytes_down"])
        say(f"{phase['phase']}: {up} up, {down} down for each site")
        rows = [
            [
                each["kind"],
                each["policy"],
                str(each["count"]),
                size_text(each["bytes"]),
                "yes" if each["leaves_site"] else "no",
            ]
            for each in phase["entries"]
        ]
        print_table(["kind", "policy", "entries", "size", "leaves the site"], rows, numbers=["entries", "size"])
