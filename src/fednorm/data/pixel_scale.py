"""How the bytes of images become a model's numbers, where a user says so and not the data set."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from fednorm.data.federation import Federation
from fednorm.data.from_files.scaling import scale_note, training_rows, with_image_scale
from fednorm.errors import ConfigError

Scaling = Literal["auto", "unit", "symmetric", "standard"]


def with_pixel_scale(federation: Federation, scaling: Scaling) -> Federation:
    """The federation with its images scaled in this way; `auto` leaves them as they are."""
    if scaling == "auto":
        return federation
    shape = tuple(federation.x.shape[1:])
    if federation.x.dtype != torch.uint8 or len(shape) != 3:
        raise ConfigError(
            f"data.scaling={scaling} scales the bytes of images, but an example of '{federation.name}' is "
            f"{str(federation.x.dtype).removeprefix('torch.')} of shape {shape}; leave it out"
        )
    # What was told of another scale is not true any more; bytes that are read when needed were never looked at.
    told = {scale_note(federation, len(training_rows(federation)))} if federation.mean and not federation.live else ()
    plain = replace(federation, notes=tuple(note for note in federation.notes if note not in told))
    if scaling == "standard":
        plain.in_memory("data.scaling=standard")
        return with_image_scale(plain)
    channels, height, width = shape
    mean, std = {"unit": (0.0, 1.0), "symmetric": (0.5, 0.5)}[scaling]
    about = {"kind": "images", "size": [height, width], "channels": channels}
    about |= {"mean": [mean] * channels, "std": [std] * channels}
    if scaling == "unit":  # without a mean nothing is subtracted, and nothing divided
        return replace(plain, mean=(), std=(), preprocessing=about)
    return replace(plain, mean=(mean,) * channels, std=(std,) * channels, preprocessing=about)
