"""`fednorm methods`, `strategies`, `models` and `datasets`: what there is to choose from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from fednorm.cli import complete
from fednorm.cli.flags import Json, Use
from fednorm.cli.method_text import print_method
from fednorm.cli.output import echo, print_json, print_table, say
from fednorm.errors import unknown


def methods(
    expression: Annotated[
        str | None,
        typer.Argument(
            metavar="[EXPR]",
            help="say all of one method, such as fixbn(at=0.5)+fedprox",
            autocompletion=complete.methods,
        ),
    ] = None,
    use: Use = [],  # noqa: B006
    json: Json = False,
) -> None:
    """List the methods, with papers, what stays local, bytes and exchanges; or say all there is to say of one."""
    from fednorm.methods import known_methods
    from fednorm.running.extensions import load
    from fednorm.views.describe_method import describe_method

    load(use)
    if expression is not None:
        facts = describe_method(expression)
        print_json(facts) if json else print_method(facts)
        return
    found = []
    for info in known_methods().values():
        facts = describe_method(info.name)
        found.append(
            {
                "name": info.name,
                "paper": info.paper,
                "summary": info.summary,
                "needs": facts["needs"],
                "options": dict(info.options),
                "policies": facts["policies"],
                "local": facts["local"],
                "bytes_percent": [round(stage["percent_up"], 2) for stage in facts["stages"]],
                "exchanges": [stage["exchanges"] for stage in facts["stages"]],
                "reconstruction": info.reconstruction,
            }
        )
    if json:
        print_json(found)
        return
    print_table(
        ["method", "what it does", "stays local", "needs", "bytes", "exchanges", "paper"],
        [
            [
                each["name"],
                each["summary"],
                ", ".join(each["local"]) or "-",
                ", ".join(each["needs"]).replace("_", " ") or "-",
                _by_stage(f"{percent:.1f} %" for percent in each["bytes_percent"]),
                _by_stage(str(count) for count in each["exchanges"]),
                each["paper"] + (" (reconstruction)" if each["reconstruction"] else ""),
            ]
            for each in found
        ],
        numbers=["bytes", "exchanges"],
        spare=["paper", "needs", "exchanges", "stays local"],
        readable=36,
    )
    echo()
    say("bytes: what a ResNet20 client sends in a round, of FedAvg's; stage by stage where a method has two")
    say("all of one, options too: `fednorm methods NAME`; join methods with +: fedprox(mu=0.01)+gn")


def _by_stage(texts: Iterable[str]) -> str:
    """The values of a method's stages, once where all are equal."""
    return " -> ".join(dict.fromkeys(texts))


def strategies(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="say all options of one, such as fedbuff", autocompletion=complete.strategies
        ),
    ] = None,
    use: Use = [],  # noqa: B006
    json: Json = False,
) -> None:
    """List the strategies, what a server does with updates that come one by one; or say all options of one."""
    from fednorm.running.extensions import load
    from fednorm.strategies import known_strategies

    load(use)
    known = known_strategies()
    if name is not None and name not in known:
        raise unknown("strategy", name, known, "fednorm strategies")
    found = [
        {
            "name": info.name,
            "summary": info.summary,
            "paper": info.paper,
            "options": dict(info.options),
            "reconstruction": info.reconstruction,
        }
        for info in known.values()
        if name in (None, info.name)
    ]
    if json:
        print_json(found if name is None else found[0])
        return
    if name is not None:
        say(f"{name}: {found[0]['summary']}")
        say(f"source: {found[0]['paper']}" + (" (reconstruction)" if found[0]["reconstruction"] else ""))
        echo()
        from fednorm.views.describe_method import options_in_words

        takes = options_in_words(known[name].make)
        options = found[0]["options"].items()
        rows = [[option, str(value).lower(), takes.get(option, "").lower()] for option, value in options]
        print_table(["option", "default", "takes"], rows)
        echo()
        say("what they do: docs/asynchrony.md, and what was read into the papers: docs/readings.md")
        return
    print_table(
        ["strategy", "what it does", "paper"],
        [
            [each["name"], each["summary"], each["paper"] + (" (reconstruction)" if each["reconstruction"] else "")]
            for each in found
        ],
        spare=["paper"],
        readable=30,
    )
    echo()
    say("options of one: `fednorm strategies NAME`")
    say("play one with a method: fednorm run --async 'fedbuff(b=10)' --method fedbn, or --method 'fedbuff(b=10)+fedbn'")


def models(use: Use = [], json: Json = False) -> None:  # noqa: B006
    """List the models."""
    from fednorm.models import MODELS, list_models
    from fednorm.running.extensions import load

    load(use)
    found = [
        {
            "name": info.name,
            "summary": info.summary,
            "paper": info.paper,
            "task": info.task,
            "parameters": _parameters(info.name),
            "num_classes": info.num_classes,
            "image_size": info.image_size,
            "options": list(info.options),
        }
        for info in map(MODELS.__getitem__, list_models())
    ]
    if json:
        print_json(found)
        return
    print_table(
        ["model", "what it is", "parameters", "task", "options"],
        [
            [
                each["name"],
                each["summary"],
                "-" if each["parameters"] is None else f"{each['parameters']:,}",
                each["task"],
                ", ".join(each["options"]) or "-",
            ]
            for each in found
        ],
        numbers=["parameters"],
        spare=["options", "task"],
    )
    echo()
    say("also: timm:NAME, torchvision:NAME, and your own package.module:factory")


def _parameters(name: str) -> int | None:
    """Parameters of a model at its default sizes, if it can be built with them; on a device that takes no memory."""
    import torch

    from fednorm.models import build

    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in build(name).parameters())
    except Exception:  # a user's own, which may need options or real numbers
        return None


def datasets(
    data_dir: Annotated[str | None, typer.Option(metavar="DIR", help="folder with the data sets")] = None,
    use: Use = [],  # noqa: B006
    json: Json = False,
) -> None:
    """List the data sets, and which of them are here."""
    from fednorm.data.own import own_datasets
    from fednorm.data.registry import DATASETS
    from fednorm.data.verify import describe_dataset
    from fednorm.running.extensions import load

    load(use)
    found: list[dict[str, Any]] = [describe_dataset(name, data_dir) for name in DATASETS]
    blank = {key: [] if isinstance(value, tuple) else None for key, value in found[0].items()}
    found += [
        {**blank, "name": own.name, "summary": own.summary, "here": True, "form": "own code"}
        for own in own_datasets().values()
    ]
    if json:
        print_json([{**each, "counts": list(each["counts"]), "domains": list(each["domains"])} for each in found])
        return
    print_table(
        ["data set", "what it is", "training", "test", "classes", "here"],
        [
            [
                each["name"],
                each["summary"],
                *(f"{count:,}" for count in each["counts"] or ()),
                *([] if each["counts"] else ["-", "-"]),
                str(each["num_classes"] or "-"),
                each["form"] if each["here"] else "no",
            ]
            for each in found
        ],
        numbers=["training", "test", "classes"],
        spare=["classes", "test", "training"],
    )
    echo()
    say("`fednorm data info NAME` says more of one, and how to get it")
