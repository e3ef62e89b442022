"""`fednorm compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from fednorm.cli.flags import takes_request
from fednorm.cli.settings import Request
from fednorm.errors import ConfigError

Expressions = Annotated[
    list[str] | None,
    typer.Argument(metavar="EXPR...", help="methods, such as fedavg fedavg+gn fixbn(at=0.5); default: the file's"),
]


@takes_request()
def compare(request: Request, expressions: Expressions = None) -> None:
    """Play methods side by side on the same data and print one table."""
    methods = list(expressions or request.methods)
    if not methods:
        raise ConfigError("nothing to compare; name methods, such as: fednorm compare fedavg fixbn")
    from fednorm.cli.dry import print_preview
    from fednorm.cli.play import play_comparison

    if request.dry_run:
        print_preview(request, methods)
    else:
        play_comparison(request, methods)
