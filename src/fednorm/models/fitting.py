"""Whether a built-in model can take the inputs of a data set; a line says so before a layer deep inside complains."""

from __future__ import annotations

from torch import Tensor

from fednorm.errors import ConfigError
from fednorm.models.calling import accepted_keywords
from fednorm.models.registry import MODELS

VECTOR_MODEL = "mlp_bn"
"""The one that takes rows of numbers; all others of ours are for images or tokens."""
_OURS = __package__ or ""


def check_inputs(name: str, x: Tensor, data: str) -> None:
    """Refuse vectors for a model of images, and images that are not square for one that counts on a side's length."""
    info = MODELS.get(name)
    if info is None or not info.make.__module__.startswith(_OURS):
        return
    if x.dim() == 2 and x.is_floating_point() and name != VECTOR_MODEL:
        raise ConfigError(
            f"model '{name}' takes images, but '{data}' has vectors of {x.shape[1]} numbers; use --model "
            f"{VECTOR_MODEL}, or one of your own"
        )
    sized = "image_size" in (accepted_keywords(info.make) or ())
    if x.dim() == 4 and x.shape[2] != x.shape[3] and sized:
        raise ConfigError(
            f"model '{name}' takes square images, but '{data}' has {x.shape[3]}x{x.shape[2]}; bring them to N x N with "
            "--image-size N, or use --model small_resnet"
        )
