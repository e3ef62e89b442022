"""Models by name, each a pure function of its sizes, its options and a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from fednorm.core.extending import check_name, load_installed, summary_of
from fednorm.errors import unknown
from fednorm.models import zoo
from fednorm.models.calling import accepted_keywords, call_factory, check_positive

_SIZES = ("num_classes", "in_channels", "image_size")


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A model by name: what it is, where it comes from, and the sizes it has unless told otherwise."""

    name: str
    summary: str = ""
    paper: str = ""
    task: Literal["classification", "segmentation"] = "classification"
    inputs: Literal["images", "tokens"] = "images"
    image_size: int = 32
    num_classes: int = 10
    make: Callable[..., nn.Module]

    @property
    def options(self) -> tuple[str, ...]:
        """The keywords of `build` that are this model's own."""
        return tuple(key for key in accepted_keywords(self.make) or () if key not in _SIZES)


MODELS: dict[str, ModelInfo] = {}


Make = TypeVar("Make", bound=Callable[..., nn.Module])


def register_model(
    name: str,
    *,
    summary: str = "",
    paper: str = "",
    task: Literal["classification", "segmentation"] = "classification",
    inputs: Literal["images", "tokens"] = "images",
    image_size: int = 32,
    num_classes: int = 10,
) -> Callable[[Make], Make]:
    """Make a function or class available as a model under a name.

    It takes those of num_classes, in_channels, image_size that it has use for, and its other keywords are options:
    `@register_model("my_net")` above `def my_net(num_classes, width=16)` is `--model "my_net(width=32)"`.
    """

    def enter(make: Make) -> Make:
        known = MODELS.get(name)
        check_name("model", name, make, known.make if known else None)
        MODELS[name] = ModelInfo(
            name=name,
            summary=summary_of(make, summary),
            paper=paper,
            task=task,
            inputs=inputs,
            image_size=image_size,
            num_classes=num_classes,
            make=make,
        )
        return make

    return enter


def list_models() -> list[str]:
    """The names of all models; `timm:NAME`, `torchvision:NAME` and `package.module:factory` come on top."""
    load_installed()
    return list(MODELS)


def build(
    name: str,
    *,
    num_classes: int | None = None,
    in_channels: int = 3,
    image_size: int | None = None,
    seed: int = 0,
    **options: Any,
) -> nn.Module:
    """Build a model by name; its initial state is a pure function of the arguments.

    Sizes left out are the model's own (10 classes and 32 pixels for most). The name is one of `list_models()`,
    `timm:NAME`, `torchvision:NAME`, or `package.module:factory` for your own code, which is imported and called.

    >>> sum(p.numel() for p in build("resnet20").parameters())
    269722
    """
    if name not in MODELS and ":" not in name:
        load_installed()
    info = MODELS.get(name)
    sizes = {
        "num_classes": num_classes if num_classes is not None else info.num_classes if info else 10,
        "in_channels": in_channels,
        "image_size": image_size if image_size is not None else info.image_size if info else 32,
    }
    for what, value in sizes.items():
        check_positive(what, value)
    if info is None and ":" not in name:
        raise unknown("model", name, MODELS, "fednorm models")
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would also seed the accelerators, whose state the line above does not restore.
        torch.default_generator.manual_seed(seed)
        return call_factory(name, info.make, sizes, options) if info else zoo.build(name, sizes, options)
