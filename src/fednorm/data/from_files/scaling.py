"""Mean and deviation of training images, channel by channel, exact whatever the number of images."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fednorm.data.federation import Federation

CHUNK = 1024


def with_image_scale(federation: Federation) -> Federation:
    """The federation with mean and deviation of the images of the clients that train, and a line that says so."""
    rows = training_rows(federation)
    mean, std = channel_scale(federation.x, rows)
    channels, height, width = federation.x.shape[1:]
    about = {"kind": "images", "size": [height, width], "channels": channels, "mean": list(mean), "std": list(std)}
    scaled = replace(federation, mean=mean, std=std, preprocessing=about)
    return replace(scaled, notes=(*federation.notes, scale_note(scaled, len(rows))))


def scale_note(federation: Federation, num_rows: int) -> str:
    """What is told of images that were scaled by their own mean and deviation, over this many of them."""
    channels, height, width = federation.x.shape[1:]
    look = {1: "grey", 3: "colour"}.get(channels, f"{channels} channels")
    shown = " and ".join("/".join(f"{value:.3f}" for value in each) for each in (federation.mean, federation.std))
    return (
        f"images {width}x{height} {look}; mean and deviation {shown}, computed over the {num_rows} training images of "
        "all clients that train"
    )


def training_rows(federation: Federation) -> Tensor:
    """Rows of all clients that train."""
    return torch.cat([federation.clients[client] for client in federation.training_clients])


def channel_scale(x: Tensor, rows: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of bytes (N, C, ...) in units of 255, from how often each value occurs.

    >>> channel_scale(torch.tensor([[[0, 255]]], dtype=torch.uint8), torch.tensor([0]))
    ((0.5,), (0.5,))
    """
    counts = torch.zeros(x.shape[1], 256, dtype=torch.int64)
    for part in rows.split(CHUNK):
        for channel, values in enumerate(x[part].transpose(0, 1)):
            counts[channel] += torch.bincount(values.reshape(-1), minlength=256)
    share = counts.double() / counts.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = share @ values
    std = (share * (values - mean[:, None]) ** 2).sum(1).sqrt()
    # A channel that never changes has nothing to scale.
    return tuple(mean.tolist()), tuple(value or 1.0 for value in std.tolist())
