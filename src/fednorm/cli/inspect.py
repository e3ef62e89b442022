"""`fednorm inspect`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fednorm.cli import complete
from fednorm.cli.flags import AllowNoop, Json, Use
from fednorm.cli.method_text import print_method
from fednorm.cli.output import echo, print_json, print_table, say, size_text


def inspect(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="model name, or package.module:factory", autocompletion=complete.models),
    ],
    method: Annotated[
        str,
        typer.Option(
            metavar="EXPR", help="method expression, such as fixbn or fedavg+gn", autocompletion=complete.methods
        ),
    ] = "fedavg",
    num_classes: Annotated[int | None, typer.Option(metavar="N", help="default: the model's own")] = None,
    in_channels: Annotated[int, typer.Option(metavar="N", help="colours of an image")] = 3,
    image_size: Annotated[int | None, typer.Option(metavar="N", help="pixels a side; default: the model's own")] = None,
    use: Use = [],  # noqa: B006
    allow_noop: AllowNoop = False,
    json: Json = False,
) -> None:
    """Show what a method does with every tensor of a model: kind, policy, shape, bytes; and what it is made of."""
    from fednorm import models
    from fednorm.core.expression import parse_term
    from fednorm.core.optimizers import MOMENTUM_SGD
    from fednorm.halves.prepared import prepare
    from fednorm.methods import parse
    from fednorm.models.calling import refuse_given
    from fednorm.running.extensions import load
    from fednorm.views.describe_method import fedavg_bytes, method_facts
    from fednorm.views.describe_model import describe_model

    load(use)
    term = parse_term(model, "model", "resnet20(shortcut=B)")
    refuse_given(term)
    parsed = parse(method)
    network = models.build(
        term.name, num_classes=num_classes, in_channels=in_channels, image_size=image_size, **term.options
    )
    prepared = prepare(network, parsed, allow_noop=allow_noop, name=f"model '{model}'")
    details = method_facts(prepared, fedavg_bytes(network))
    found = {"model": model, **describe_model(prepared, MOMENTUM_SGD), "details": details}
    if json:
        print_json(found)
    else:
        _print(found, union=parsed.data == "union")


def _print(found: dict[str, Any], union: bool) -> None:
    print_table(
        ["key", "kind", "policy", "shape", "bytes"],
        [
            [e["key"], e["kind"], e["policy"], "x".join(map(str, e["shape"])) or "scalar", f"{e['bytes']:,}"]
            for e in found["entries"]
        ],
        numbers=["bytes"],
    )
    totals = found["totals"]
    echo()
    say(f"{found['model']} with {found['method']}: {totals['entries']} entries, {size_text(totals['bytes'])}")
    for title in ("by_policy", "by_kind"):
        parts = [f"{name} {each['entries']} ({size_text(each['bytes'])})" for name, each in totals[title].items()]
        say(f"{title.replace('_', ' ')}: {', '.join(parts)}")
    if union:
        say("one model trains on all data: nothing is sent")
    for line in [] if union else totals["exchanges"]:
        sent = f"up {size_text(line['up'])}, down {size_text(line['down'])}"
        say(f"each client, {line['when']}, {line['phase']}: {sent}")
    for note in found["notes"]:
        say(f"note: {note}")
    echo()
    print_method(found["details"])
