"""Whose mistake an error is: a model, a loss or a part that a user brought may fail, and that is no bug of fednorm.

The frames of the error decide. The innermost one that belongs to neither torch nor Python itself is where it happened:
in a file of the user, or in one of ours that only hands the user's things to each other, or in our own code.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from traceback import walk_tb
from types import CodeType, TracebackType

from fednorm.errors import FednormError, UserCodeError, first_line

_PACKAGE = Path(__file__).parents[1]
_PYTHON = Path(sysconfig.get_paths()["stdlib"])
_INSTALLED = {"site-packages", "dist-packages"}
_TOOLS = {"torch", "triton", "numpy", "safetensors", "typer", "click", "rich", "wandb", "mlflow"}
"""Packages that both sides call, or that put themselves between (as W&B does for `sys.exit`); they tell nothing."""
_MADE = ("<frozen", "<string>", "<eval_with_key>")
"""Where code comes from that Python and torch write themselves; a session's `<stdin>` is the user's."""
_FORWARD = {
    ("core/step.py", "forward"),
    ("scoring/scores.py", "Scorer._outputs"),
    ("running/trial.py", "_bare_output"),
}
_BACKWARD = {("core/step.py", "by_autograd.<locals>.run")}
_LOSS = {
    ("core/step.py", "TrainStep.__call__.<locals>.objective"),
    ("core/step.py", "ObserveStep.__call__.<locals>.step"),
    ("running/trial.py", "_train.<locals>.objective"),
}
"""Functions of ours that call a model with data, or a loss with what came out: they fail where those do not fit."""


@dataclass(frozen=True)
class Frame:
    """A line that was being executed."""

    code: CodeType
    line: int

    @property
    def ours(self) -> str:
        """The path of one of our own files, from the package on; empty for any other."""
        path = Path(self.code.co_filename)
        return path.relative_to(_PACKAGE).as_posix() if path.is_relative_to(_PACKAGE) else ""

    @property
    def tells(self) -> bool:
        """Whether it belongs to somebody: to us or to the user, not to a tool of both."""
        name = self.code.co_filename
        if name.startswith(_MADE):
            return False
        parts = Path(name).parts
        for number, part in enumerate(parts[:-1]):
            if part in _INSTALLED:
                return parts[number + 1].removesuffix(".py") not in _TOOLS
        return not Path(name).is_relative_to(_PYTHON)

    @property
    def place(self) -> tuple[str, str]:
        return self.ours, self.code.co_qualname

    def __str__(self) -> str:
        return f"{Path(self.code.co_filename).name}:{self.line}"


def frames_of(error: BaseException) -> list[Frame]:
    """The frames of an error that belong to somebody, the innermost last."""
    frames = [Frame(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    return [frame for frame in frames if frame.tells]


def is_users(error: BaseException) -> bool:
    """Whether an error is the user's to repair."""
    frames = frames_of(error)
    if not frames:
        return False
    last = frames[-1]
    if not last.ours or last.place in _FORWARD | _BACKWARD | _LOSS or last.ours.startswith("scoring/"):
        return True
    misfit = isinstance(error, RuntimeError | ValueError)  # what torch raises about shapes
    if last.ours.startswith("models/"):
        return misfit
    # A layer that surgery put into the user's model was called by the user's forward, with shapes that do not fit it.
    called = [not frame.ours for frame in frames if not frame.ours.startswith("layers/")]
    return last.ours.startswith("layers/") and called[-1:] == [True] and misfit


def user_error(error: BaseException, model: str) -> UserCodeError:
    """What a user is told of an error of theirs: what failed, with which words, and where."""
    frames = frames_of(error)
    places = {frame.place for frame in frames}
    theirs = [frame for frame in frames if not frame.ours]
    if places & _FORWARD:
        what = f"{model} failed in its forward pass"
    elif frames[-1].place in _BACKWARD:
        what = f"{model} failed in its backward pass"
    elif theirs:
        what = f"'{_called_by_us(frames).code.co_qualname}' failed"
    else:
        what = f"the task failed on the outputs of {model}"
    return failed(what, error)


def failed(what: str, error: BaseException) -> UserCodeError:
    """An error for something of the user's that failed, with the words of the error and its last line of user code."""
    theirs = [frame for frame in frames_of(error) if not frame.ours]
    return UserCodeError(f"{what}: {described(error)}" + (f" ({theirs[-1]})" if theirs else ""))


def _called_by_us(frames: list[Frame]) -> Frame:
    """The last frame of the user that was called from our code."""
    calls = [
        inner for outer, inner in pairwise([None, *frames]) if inner and not inner.ours and (not outer or outer.ours)
    ]
    return calls[-1]


def described(error: BaseException) -> str:
    """An error as one line: its type, and what it says.

    >>> described(ValueError("no such layer")), described(AssertionError())
    ('ValueError: no such layer', 'AssertionError')
    """
    name, text = type(error).__name__, first_line(error)
    return name if text == name else f"{name}: {text}"


@dataclass(frozen=True)
class UserCode:
    """Around calls into code that may be the user's: its errors become `UserCodeError`, all others stay.

    It costs nothing until something fails. `model` is what to call the model.
    """

    model: str

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, FednormError | StopIteration) and is_users(error):
            raise user_error(error, self.model) from error
