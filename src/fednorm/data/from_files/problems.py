"""Everything that is wrong with users' files at once: a run names the first, `fednorm data check` all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fednorm.errors import ConfigError

MOST = 50
"""Problems that are looked for in one file or folder: more help nobody."""


class DataError(ConfigError):
    """Data that cannot be used; `problems` has every reason, the text the first."""

    def __init__(self, problems: Sequence[str], check: str) -> None:
        self.problems = tuple(problems)
        more = len(problems) - 1
        count = f"{more} more problem{'s' if more > 1 else ''}" if len(problems) < MOST else "more problems"
        super().__init__(f"{problems[0]} ({count}; `{check}` lists all)" if more else problems[0])


def refuse(problems: Sequence[str], source: object) -> None:
    """Refuse data if there is a reason."""
    if problems:
        raise DataError(problems, f"fednorm data check {source}")


@contextmanager
def noted(problems: list[str]) -> Iterator[None]:
    """Take down why something is refused, and go on to find out what else is wrong."""
    try:
        yield
    except ConfigError as error:
        problems.append(str(error))


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names in a row, of many only the first.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"
