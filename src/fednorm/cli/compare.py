"""`fednorm compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from fednorm.cli import complete
from fednorm.cli.flags import shared_flags
from fednorm.cli.settings import Asked
from fednorm.errors import ConfigError

Expressions = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="EXPR...",
        help="methods, such as fedavg fedavg+gn fixbn(at=0.5); default: the file's",
        autocompletion=complete.methods,
    ),
]


@shared_flags()
def compare(asked: Asked, expressions: Expressions = None) -> None:
    """Play methods side by side on the same data and print one table."""
    methods = list(expressions or asked.methods)
    if not methods:
        raise ConfigError("nothing to compare; name methods, such as: fednorm compare fedavg fixbn")
    from fednorm.cli.dry import print_preview
    from fednorm.cli.play import play_comparison

    if asked.dry_run:
        print_preview(asked, methods, comparison=True)
    else:
        play_comparison(asked, methods)
