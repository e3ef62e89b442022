"""Whether a built-in model can take the inputs of a data set; a line says so before a layer deep inside complains."""

from __future__ import annotations

from collections.abc import Sequence

from fednorm.errors import ConfigError
from fednorm.models.calling import accepted_keywords
from fednorm.models.registry import MODELS


def check_inputs(name: str, shape: Sequence[int], data: str) -> None:
    """Refuse vectors for a model of images, and images that are not square for one that counts on a side's length."""
    info = MODELS.get(name)
    if info is None:
        return
    if len(shape) == 1 and not info.vectors:
        raise ConfigError(
            f"model '{name}' takes images, but '{data}' has vectors of {shape[0]} numbers; use --model mlp_bn, or "
            "one of your own"
        )
    sized = "image_size" in (accepted_keywords(info.make) or ())
    if len(shape) == 3 and shape[1] != shape[2] and sized:
        raise ConfigError(
            f"model '{name}' takes square images, but '{data}' has {shape[2]}x{shape[1]}; bring them to N x N with "
            "--image-size N, or use --model small_resnet"
        )
