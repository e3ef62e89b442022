"""The flags that `run` and `compare` share, defined once; their help is the config's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any

import typer

from fednorm.cli import complete
from fednorm.cli.settings import Asked, read_seeds, resolve
from fednorm.errors import ConfigError
from fednorm.running import config
from fednorm.running.consent import named_code
from fednorm.running.field_texts import field_texts


@dataclass(frozen=True)
class Flag:
    """A flag that sets one field of the config."""

    option: str
    field: str
    metavar: str
    panel: str = "Training"

    @property
    def parameter(self) -> str:
        name = self.option.strip("-").replace("-", "_")
        return f"{name}_" if iskeyword(name) else name


METHOD = Flag("--method", "method", "EXPR", "What to run")
FLAGS = (
    Flag("--model", "model", "NAME", "What to run"),
    Flag("--data", "data.name", "NAME", "What to run"),
    Flag("--data-dir", "data.dir", "DIR", "What to run"),
    Flag("--target", "data.target", "COL", "What to run"),
    Flag("--client-column", "data.client", "COL", "What to run"),
    Flag("--split-column", "data.split", "COL", "What to run"),
    Flag("--image-size", "data.size", "N", "What to run"),
    Flag("--partition", "data.partition", "EXPR", "What to run"),
    Flag("--clients", "data.clients", "N", "What to run"),
    Flag("--clients-per-round", "clients_per_round", "N", "What to run"),
    Flag("--client-fraction", "client_fraction", "X", "What to run"),
    Flag("--task", "task", "EXPR", "What to run"),
    Flag("--seed", "seed", "N", "What to run"),
    Flag("--async", "clock.strategy", "EXPR", "What to run"),
    Flag("--concurrency", "clock.concurrency", "N", "What to run"),
    Flag("--times", "clock.times", "EXPR", "What to run"),
    Flag("--rounds", "rounds", "N"),
    Flag("--local-steps", "train.local_steps", "N"),
    Flag("--local-epochs", "train.local_epochs", "N"),
    Flag("--batch-size", "train.batch_size", "N"),
    Flag("--optimizer", "train.optimizer", "EXPR"),
    Flag("--lr", "train.lr", "X"),
    Flag("--momentum", "train.momentum", "X"),
    Flag("--weight-decay", "train.weight_decay", "X"),
    Flag("--schedule", "train.schedule", "EXPR"),
    Flag("--warmup", "train.warmup", "N|X"),
    Flag("--augment", "train.augment", "EXPR"),
    Flag("--val-fraction", "data.val_fraction", "X"),
    Flag("--init", "init", "FILE"),
    Flag("--keep", "keep", "last|best"),
    Flag("--keep-every", "keep_every", "N"),
    Flag("--device", "engine.device", "NAME", "Machine"),
    Flag("--engine", "engine.name", "NAME", "Machine"),
)

_WHAT, _SETTINGS, _MACHINE, _OUTPUT = "What to run", "Settings", "Machine", "Output"


def option(
    *names: str,
    help: str,
    panel: str,
    metavar: str = "",
    check: Callable[[Any], Any] | None = None,
    complete: complete.Complete | None = None,
) -> Any:
    """An option of a command; without a metavar it is a switch.

    `check` refuses values, or returns what they mean; `complete` knows what a shell may make of a beginning.
    """
    return typer.Option(
        *names, help=help, metavar=metavar, rich_help_panel=panel, callback=check, autocompletion=complete
    )


def check_jobs(jobs: int) -> int:
    """Refuse a number of processes that would do nothing."""
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs} is out of range; give 1 or more")
    return jobs


AllowCode = Annotated[bool, option("--allow-code", help="run code that a file names", panel=_SETTINGS)]
AllowNoop = Annotated[bool, option("--allow-noop", help="run a method that finds nothing to act on", panel=_SETTINGS)]
Assignments = Annotated[
    list[str],
    option(
        "--set", metavar="FIELD=VALUE", help="set any field: train.lr=0.1", panel=_SETTINGS, complete=complete.fields
    ),
]
InitPartial = Annotated[
    bool, option("--init-partial", help="load whatever of --init fits, and list what does not", panel="Training")
]
DryRun = Annotated[bool, option("--dry-run", help="print config, bytes, clients and time; run nothing", panel=_OUTPUT)]
File = Annotated[Path | None, option("--config", "-c", metavar="FILE", help="TOML file with fields", panel=_SETTINGS)]
Jobs = Annotated[
    int, option("--jobs", metavar="N", help="runs at a time, one process each", panel=_MACHINE, check=check_jobs)
]
Json = Annotated[bool, option("--json", help="print JSON and nothing else on stdout", panel=_OUTPUT)]
Out = Annotated[
    Path | None, option("--out", "-o", metavar="DIR", help="folder to make; default: below runs", panel=_OUTPUT)
]
Quiet = Annotated[bool, option("--quiet", "-q", help="no progress", panel=_OUTPUT)]
Seeds = Annotated[str | None, option("--seeds", metavar="N|LIST", help="how many seeds, or a list: 0,1,2", panel=_WHAT)]
Use = Annotated[
    list[str],
    option("--use", metavar="FILE.py|MODULE", help="import it: it registers methods, models, data sets", panel=_WHAT),
]
TensorBoard = Annotated[bool, option("--tensorboard", help="write TensorBoard events into the folder", panel=_OUTPUT)]
Track = Annotated[
    list[str],
    option(
        "--track",
        metavar="NAME",
        help="follow it with tensorboard, wandb or mlflow; repeatable",
        panel=_OUTPUT,
        complete=complete.trackers,
    ),
]

_SHARED: dict[str, tuple[Any, Any]] = {
    "seeds": (Seeds, None),
    "use": (Use, []),
    "init_partial": (InitPartial, False),
    "config": (File, None),
    "assignments": (Assignments, []),
    "allow_noop": (AllowNoop, False),
    "allow_code": (AllowCode, False),
    "jobs": (Jobs, 1),
    "out": (Out, None),
    "dry_run": (DryRun, False),
    "json": (Json, False),
    "quiet": (Quiet, False),
    "tensorboard": (TensorBoard, False),
    "track": (Track, []),
}


@functools.cache
def field_help() -> dict[str, str]:
    """The text under each field of the config classes, by dotted name."""
    texts = field_texts(config)
    sections = {"data": "DataConfig", "train": "TrainConfig", "eval": "EvalConfig", "engine": "EngineConfig"}
    sections |= {"world": "WorldConfig", "clock": "ClockConfig"}
    joined = dict(texts["RunConfig"])
    for section, name in sections.items():
        joined |= {f"{section}.{key}": text for key, text in texts[name].items()}
    return joined


def shared_flags(*extra: Flag) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command whose first argument is `Asked` the shared flags, and some more."""
    flags = (*extra, *FLAGS)

    def change(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        @functools.wraps(command)
        def outer(**given: Any) -> None:
            texts = {flag.field: given.pop(flag.parameter) for flag in flags}
            shared = {name: given.pop(name) for name in _SHARED}
            command(read_flags({name: text for name, text in texts.items() if text is not None}, **shared), **given)

        parameters = [*own, *(_parameter(flag.parameter, *_of_flag(flag)) for flag in flags)]
        parameters += [_parameter(name, *spec) for name, spec in _SHARED.items()]
        # typer reads the flags from the signature, and resolves annotations by name.
        vars(outer)["__signature__"] = inspect.Signature(parameters)
        outer.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return outer

    return change


def _of_flag(flag: Flag) -> tuple[Any, None]:
    # Flags are read as text: the config's own validator then refuses all of them in one style.
    text = option(
        flag.option,
        metavar=flag.metavar,
        help=field_help()[flag.field],
        panel=flag.panel,
        complete=complete.BY_FIELD.get(flag.field),
    )
    return Annotated[str | None, text], None


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def read_flags(
    flags: dict[str, str],
    *,
    seeds: str | None,
    use: list[str],
    init_partial: bool,
    config: Path | None,
    assignments: list[str],
    allow_noop: bool,
    allow_code: bool,
    jobs: int,
    track: list[str],
    **output: Any,
) -> Asked:
    """What a command line asks for."""
    resolved, recipe = resolve(file=config, assignments=assignments, flags=flags, use=use, allow_code=allow_code)
    if allow_noop:
        resolved = replace(resolved, allow_noop=True)
    if init_partial:
        resolved = replace(resolved, init_partial=True)
    return Asked(
        config=resolved,
        methods=recipe.methods,
        seeds=recipe.seeds if seeds is None and recipe.seeds else read_seeds(seeds, resolved.seed),
        jobs=jobs,
        track=tuple(track),
        code_in_file=bool(named_code(resolved)),
        **output,
    )
