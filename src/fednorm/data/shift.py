"""Feature shift for any image set: every client sees the world through its own camera and weather.

A client's kind of change and its strength are drawn by the seed and stay the same for its training and its own test
images; noise, fog and snow differ from image to image, keyed by the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fednorm.core import rng
from fednorm.data.client_rows import shared_row
from fednorm.data.federation import Federation
from fednorm.errors import ConfigError

Change = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(images in 0..1, the client's key, one key per image, strength in 0..1 and above) -> images."""
CHUNK = 512


def _per_image(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uniform numbers in [0, 1) of this shape for every key."""
    return torch.vmap(lambda key: rng.uniform(key, shape))(keys)


def colour(x: Tensor, client: Tensor, images: Tensor, strength: float) -> Tensor:
    """Each channel gets its own gain and offset: a camera's white balance."""
    draw = rng.uniform(client, (2, x.shape[1], 1, 1)) * 2 - 1
    return x * (1 + 0.8 * strength * draw[0]) + 0.3 * strength * draw[1]


def contrast(x: Tensor, client: Tensor, images: Tensor, strength: float) -> Tensor:
    """Contrast around mid-grey is lowered."""
    return (x - 0.5) * (1 - 0.75 * min(strength, 1.3)) + 0.5


def blur(x: Tensor, client: Tensor, images: Tensor, strength: float) -> Tensor:
    """A Gaussian blur whose width grows with the image: 1.5 pixels at 32x32 and full strength."""
    sigma = 1.5 * strength * x.shape[-1] / 32
    radius = max(1, round(3 * sigma))
    taps = torch.exp(-(torch.arange(-radius, radius + 1, dtype=torch.float32) ** 2) / (2 * sigma**2))
    taps = (taps / taps.sum()).expand(x.shape[1], 1, -1)
    for shape, pad in (
        ((-1, 1, 1, 2 * radius + 1), (radius, radius, 0, 0)),
        ((-1, 1, 2 * radius + 1, 1), (0, 0, radius, radius)),
    ):
        x = functional.conv2d(functional.pad(x, pad, mode="replicate"), taps.reshape(shape), groups=x.shape[1])
    return x


def noise(x: Tensor, client: Tensor, images: Tensor, strength: float) -> Tensor:
    """Sensor noise: the sum of four uniform numbers, near enough to a Gaussian."""
    draw = _per_image(images, (4, *x.shape[1:])).sum(1) - 2
    return x + 0.3 * strength * draw


def fog(x: Tensor, client: Tensor, images: Tensor, strength: float) -> Tensor:
    """White haze in slow clouds."""
    grid = _per_image(images, (1, 4, 4))
    cloud = functional.interpolate(grid, x.shape[2:], mode="bicubic", align_corners=True).clamp(0, 1)
    haze = (strength * (0.4 + 0.5 * cloud)).clamp(max=0.95)
    return x * (1 - haze) + haze


def snow(x: Tensor, client: Tensor, images: Tensor, strength: float) -> Tensor:
    """Bright flakes that fall to the right, in front of a paler scene."""
    flakes = (_per_image(images, (1, *x.shape[2:])) < 0.04 * strength).float()
    streak = flakes
    for step in range(1, max(2, x.shape[-1] // 12)):
        streak = torch.maximum(streak, functional.pad(flakes, (step, 0, step, 0))[..., : x.shape[2], : x.shape[3]])
    return torch.maximum(x * (1 - 0.25 * strength) + 0.2 * strength, 0.95 * streak)


CHANGES: dict[str, Change] = {
    "colour": colour,
    "contrast": contrast,
    "blur": blur,
    "noise": noise,
    "fog": fog,
    "snow": snow,
}


def client_change(seed: int, client: int, severity: float) -> tuple[str, float]:
    """The kind of change of a client and its strength; the first six clients all differ in kind."""
    kinds = list(CHANGES)
    order = rng.permutation(rng.key(seed, "shift kinds"), len(kinds)).tolist()
    strength = severity * (0.6 + 0.4 * rng.uniform(rng.key(seed, "shift strength", client), ()).item())
    return kinds[order[client % len(kinds)]], strength


def change_images(x: Tensor, rows: Tensor, seed: int, client: int, severity: float, split: str) -> Tensor:
    """The given rows of a uint8 pool as this client sees them."""
    kind, strength = client_change(seed, client, severity)
    own = rng.key(seed, "shift", client)
    parts = []
    for part in rows.split(CHUNK):
        images = CHANGES[kind](x[part].float() / 255, own, rng.key(seed, "shift", split, client, part), strength)
        parts.append((images.clamp(0, 1) * 255).round().byte())
    return torch.cat(parts) if parts else x[rows]


def shifted(federation: Federation, seed: int, severity: float = 1.0) -> Federation:
    """A copy of the federation in which each client's training and own test images are changed its own way.

    The test pool holds each client's own test images one client after the other; `domains` names them by the change.
    """
    if not 0 < severity <= 2:
        raise ConfigError(f"severity must be above 0 and at most 2, not {severity:g}")
    if federation.x.dtype != torch.uint8 or federation.task != "classification":
        raise ConfigError("partition 'feature_shift' needs a set of uint8 images with one label each")
    if (shared := shared_row(federation.clients)) is not None:
        raise ConfigError(
            f"partition 'feature_shift' changes each client's images its own way, but row {shared} is dealt more than "
            "once; leave out size"
        )
    x = federation.x.clone()
    for client, rows in enumerate(federation.clients):
        x[rows] = change_images(federation.x, rows, seed, client, severity, "train")
    tests = [
        change_images(federation.test_x, rows, seed, client, severity, "test")
        for client, rows in enumerate(federation.own_test)
    ]
    own = torch.arange(sum(map(len, tests))).split([len(part) for part in tests])
    domains: dict[str, list[Tensor]] = {}
    for client, rows in enumerate(own):
        domains.setdefault(client_change(seed, client, severity)[0], []).append(rows)
    return replace(
        federation,
        name=f"{federation.name} (feature shift)",
        x=x,
        test_x=torch.cat(tests),
        test_y=federation.test_y[torch.cat(list(federation.own_test))],
        own_test=tuple(own),
        domains={kind: torch.cat(rows) for kind, rows in domains.items()},
    )
