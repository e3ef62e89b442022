"""`fednorm methods`, `fednorm models`, `fednorm datasets`: what there is to choose from."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fednorm.cli.flags import Json
from fednorm.cli.output import print_json, print_table


def methods(json: Json = False) -> None:
    """List the methods, with their papers, options and what they share."""
    from fednorm.describe import policies_by_kind
    from fednorm.registry import parse, registry

    found = [
        {
            "name": info.name,
            "paper": info.paper,
            "summary": info.summary,
            "needs": sorted(info.needs),
            "options": dict(info.options),
            "policies": policies_by_kind(parse(info.name)),
            "reconstruction": info.reconstruction,
        }
        for info in registry().values()
    ]
    if json:
        print_json(found)
        return
    print_table(
        ["method", "what it does", "options", "needs", "paper"],
        [
            [
                each["name"],
                each["summary"],
                ", ".join(f"{key}={value}" for key, value in each["options"].items()) or "-",
                ", ".join(each["needs"]).replace("_", " ") or "-",
                each["paper"] + (" (reconstruction)" if each["reconstruction"] else ""),
            ]
            for each in found
        ],
    )
    print("\njoin them with +: fedprox(mu=0.01)+gn; `fednorm inspect small_resnet --method fixbn` shows what each does")


def models(json: Json = False) -> None:
    """List the built-in models."""
    from fednorm.models import MODELS

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
        for info in MODELS.values()
    ]
    if json:
        print_json(found)
        return
    print_table(
        ["model", "what it is", "parameters", "task", "options"],
        [
            [each["name"], each["summary"], f"{each['parameters']:,}", each["task"], ", ".join(each["options"]) or "-"]
            for each in found
        ],
        numbers=["parameters"],
    )
    print("\nalso: timm:NAME, torchvision:NAME, and your own package.module:factory")


def _parameters(name: str) -> int:
    """Parameters of a model at its default sizes; on the meta device, so that none of them takes memory."""
    import torch

    from fednorm.models import build

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(name).parameters())


def datasets(
    data_dir: Annotated[str | None, typer.Option(metavar="DIR", help="folder with the data sets")] = None,
    json: Json = False,
) -> None:
    """List the data sets, and which of them are here."""
    from fednorm.data.registry import DATASETS
    from fednorm.data.verify import describe

    found: list[dict[str, Any]] = [describe(name, data_dir) for name in DATASETS]
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
                str(each["num_classes"]),
                each["form"] if each["here"] else "no",
            ]
            for each in found
        ],
        numbers=["training", "test", "classes"],
    )
    print("\n`fednorm data info NAME` says more of one, and how to get it")
