"""The command line: verbs only. Torch is imported by the commands that need it, so that `--help` is quick."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import TextIO

import typer

from fednorm.cli import bench, catalogue, compare, data, demo, doctor, export, inspect, nvflare, reproduce, resume, run
from fednorm.cli.output import Stopped, complain, echo
from fednorm.engines.machine import is_first
from fednorm.errors import DiskError, FednormError, UserCodeError
from fednorm.files import FULL

__all__ = ["app", "main"]

app = typer.Typer(
    name="fednorm",
    help="Normalization layers that work in federated learning.",
    epilog="Start with: fednorm demo",
    pretty_exceptions_enable=False,
)
for name, verb in {
    "demo": demo.demo,
    "run": run.run,
    "compare": compare.compare,
    "resume": resume.resume,
    "reproduce": reproduce.reproduce,
    "inspect": inspect.inspect,
    "export": export.export,
    "methods": catalogue.methods,
    "strategies": catalogue.strategies,
    "models": catalogue.models,
    "datasets": catalogue.datasets,
    "doctor": doctor.doctor,
    "bench": bench.bench,
}.items():
    app.command(name)(verb)
app.add_typer(data.app, name="data")
app.add_typer(nvflare.app, name="nvflare")


DEBUG = "--debug"


@app.callback(invoke_without_command=True)
def options(
    version: bool = typer.Option(False, "--version", metavar="", help="Print the version and stop."),
    debug: bool = typer.Option(
        False, DEBUG, metavar="", help="Show the traceback of every error, also of your own code; after any verb, too."
    ),
) -> None:
    if version:
        from fednorm import __version__

        typer.echo(__version__)
        raise typer.Exit


UsageError = typer.BadParameter.__mro__[1]
"""typer's own complaints, wherever the installed typer keeps their class."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and leave the process with its exit code."""
    # Processes that this one starts would look for multiprocessing, json and all else in the folder one is in first.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    for name in ("stdout", "stderr"):
        if (
            getattr(sys, name) is None
        ):  # closed by whoever started us: the next file that is opened would take its place
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    sys.exit(exit_code(sys.argv[1:] if arguments is None else arguments))


def exit_code(arguments: Sequence[str]) -> int:
    """Run a command line; whatever goes wrong becomes one line on stderr and a number.

    Of the processes that torchrun started the first speaks for all; of the others only a bug is heard.
    """
    if is_first():
        return _exit_code(arguments, sys.stderr)
    loud = sys.stderr
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        return _exit_code(arguments, loud)


def _exit_code(arguments: Sequence[str], loud: TextIO) -> int:
    command = typer.main.get_command(app)
    given = [argument for argument in arguments if argument != DEBUG]  # one place knows it, not every verb
    debug = len(given) < len(arguments) or os.environ.get("FEDNORM_DEBUG", "0") not in ("", "0")
    try:
        done = command.main(args=given or ["--help"], prog_name="fednorm", standalone_mode=False)
        sys.stdout.flush()
    except FednormError as error:
        if debug:
            print_traceback(error)
        complain(error)
        return error.exit_code
    except Stopped as stop:
        echo(stop, file=sys.stderr)
        return stop.exit_code
    except BrokenPipeError:
        _leave_stdout()  # the reader (`fednorm methods | head`) has seen enough
        return 128 + signal.SIGPIPE
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
            complain(f"what was to be printed cannot be written: {error.strerror}; give it another place")
            _leave_stdout()
            return DiskError.exit_code
        if isinstance(error, UsageError):
            complain(f"{error.format_message().rstrip('.')} (see `{_help_of(error)}`)")  # pyright: ignore[reportAttributeAccessIssue]
            return 2
        with redirect_stderr(loud):
            echo(traceback.format_exc().rstrip("\n"), file=sys.stderr)
            complain(
                "this is a bug in fednorm; please report it with the lines above and the output of `fednorm doctor`"
            )
        return 1
    return done if isinstance(done, int) else 0


def _leave_stdout() -> None:
    """Give up on stdout: Python would try again, and complain again, when it closes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_traceback(error: FednormError) -> None:
    """Where an error came from; of the user's own code, only what the user wrote and what it called."""
    notes: list[str] = getattr(error, "__notes__", [])  # the traceback of another process comes as one
    if notes:
        echo("\n".join(notes), file=sys.stderr)
    else:
        own = error.__cause__ if isinstance(error, UserCodeError) and error.__cause__ else error
        echo("".join(traceback.format_exception(own)).rstrip("\n"), file=sys.stderr)


def _help_of(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context else 'fednorm'} --help"
