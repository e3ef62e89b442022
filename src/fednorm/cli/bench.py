"""`fednorm bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fednorm.cli.flags import Json, Quiet, option
from fednorm.cli.output import Stopped, echo, print_json, print_table

_SIZES, _EFFORT, _OUTPUT = "Workloads", "Effort", "Output"

Sections = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SECTION...",
        help="gpu, models, rounds, pfl, cpu, async or all; default: gpu where there is a GPU, else cpu",
    ),
]
Model = Annotated[str, option("--model", metavar="NAME", help="gpu: built-in model", panel=_SIZES)]
Models = Annotated[
    str | None,
    option("--models", metavar="LIST", help="models: such as resnet20+gn:15,alexnet_bn@96:5/20", panel=_SIZES),
]
Clients = Annotated[str, option("--clients", metavar="LIST", help="gpu, models: numbers of clients", panel=_SIZES)]
LocalSteps = Annotated[int, option("--local-steps", metavar="N", help="gpu, models: steps of a round", panel=_SIZES)]
Steps = Annotated[str, option("--steps", metavar="LIST", help="cpu: steps of a round", panel=_SIZES)]
Rounds = Annotated[
    int | None, option("--rounds", metavar="N", help="rounds, pfl: play fewer and extrapolate", panel=_SIZES)
]
Precision = Annotated[
    str | None, option("--precision", metavar="NAME", help="rounds, pfl, async: fp32, tf32 or bf16", panel=_SIZES)
]
Precisions = Annotated[str, option("--precisions", metavar="LIST", help="gpu: of fp32, tf32 and bf16", panel=_SIZES)]
DataDir = Annotated[
    str | None,
    option("--data-dir", metavar="DIR", help="folder with cifar10, else FEDNORM_DATA, else random", panel=_SIZES),
]
Device = Annotated[str, option("--device", metavar="NAME", help="auto, cpu, cuda or cuda:1", panel=_SIZES)]
Peers = Annotated[
    Path | None,
    option("--peers", metavar="DIR", help="cpu: other simulators, such as benchmarks/peers of a clone", panel=_SIZES),
]
Repeats = Annotated[int, option("--repeats", metavar="N", help="timings of each variant", panel=_EFFORT)]
Seconds = Annotated[float, option("--seconds", metavar="X", help="of one timing, at least", panel=_EFFORT)]
Minutes = Annotated[float, option("--minutes", metavar="X", help="to wait for quiet cores, a workload", panel=_EFFORT)]
Out = Annotated[Path | None, option("--out", "-o", metavar="FILE", help="write everything as JSON", panel=_OUTPUT)]


def bench(
    sections: Sections = None,
    model: Model = "resnet20",
    models: Models = None,
    clients: Clients = "5,20,100",
    local_steps: LocalSteps = 10,
    steps: Steps = "1,10",
    rounds: Rounds = None,
    precision: Precision = None,
    precisions: Precisions = "fp32,tf32,bf16",
    data_dir: DataDir = None,
    device: Device = "auto",
    peers: Peers = None,
    repeats: Repeats = 5,
    seconds: Seconds = 0.5,
    minutes: Minutes = 0.0,
    out: Out = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time our engines beside a plain PyTorch loop, a centralized step and other simulators, in one run."""
    from fednorm.bench.cases import TABLE, read_cases
    from fednorm.bench.options import Options, find_sections, read_numbers
    from fednorm.bench.sections import measure_all
    from fednorm.bench.timing import Effort

    chosen, found = find_sections(sections or (["models"] if models is not None else []), device)
    counts = read_numbers("--clients", clients)
    options = Options(
        sections=chosen,
        device=found,
        effort=Effort(repeats, seconds, minutes),
        model=model,
        cases=read_cases(TABLE if models is None else models, counts) if "models" in chosen else (),
        clients=counts,
        local_steps=local_steps,
        steps=read_numbers("--steps", steps),
        rounds=rounds,
        precision=precision,
        precisions=tuple(precisions.replace(" ", "").split(",")),
        data_dir=data_dir,
        peers=peers,
    )
    report = measure_all(options, ["fednorm", *sys.argv[1:]], quiet, out)
    if json:
        print_json(report.to_json())
    else:
        rows = [row for section in report.sections for row in section.rows()]
        print_table(["benchmark", "variant", "median", "spread", "ratio", "note"], rows, numbers=["median", "ratio"])
        echo("\n".join(report.lines()))
    if report.interrupted:
        raise Stopped(f"stopped; what was measured is {f'in {out}' if out else 'above'}", 130)
