"""Small networks made of what models are made of, in any order: lists of steps on images of four channels."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional

import tiny
from fednorm.layers.sample_norms import InstanceNorm
from fednorm.layers.ws_conv import WSConv2d

CHANNELS = 4


class Attention(nn.Module):
    """Attention over pixels, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(CHANNELS, 3 * CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        q, k, v = self.mix(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        y = torch.softmax(q @ k.transpose(-2, -1) / c**0.5, -1) @ v
        return y.transpose(1, 2).reshape(n, c, h, w)


class Heads(nn.Module):
    """Attention over pixels in two heads, by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(CHANNELS, 3 * CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x.flatten(2).transpose(1, 2)).unflatten(-1, (3, 2, -1))
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).flatten(2).transpose(1, 2).reshape(x.shape)


class LastNorm(nn.Module):
    """A layer norm over the channels, which come last for it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class PerChannel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Mixer(nn.Module):
    """A linear layer over the channels, which come last for it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(CHANNELS, CHANNELS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.permute(0, 2, 3, 1)).permute(0, -1, 1, 2)


class Gate(nn.Module):
    """As in a recurrent cell: channels in two pieces, one opens the other, rows of both joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(CHANNELS, 2 * CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.wide(x).split([CHANNELS, CHANNELS], 1)
        joined = torch.cat([left.sigmoid().flatten(1), right.tanh().flatten(1)], 1)
        left, right = joined.split(joined.shape[1] // 2, 1)
        return (left * right).view(x.shape)


LAYERS = {
    "conv": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    "bare conv": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
    "pointwise": lambda: nn.Conv2d(CHANNELS, CHANNELS, 1),
    "depthwise": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS),
    "standardised": lambda: WSConv2d(CHANNELS, CHANNELS, 3, padding=1, style="qiao", learnable_gain=True),
    "standardised depthwise": lambda: WSConv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False),
    "bn": lambda: nn.BatchNorm2d(CHANNELS),
    "bn without affine": lambda: nn.BatchNorm2d(CHANNELS, affine=False),
    "bn without statistics": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False),
    "gn": lambda: nn.GroupNorm(2, CHANNELS),
    "in": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
    "own in": lambda: InstanceNorm(CHANNELS, True, "norm"),
    "ln": LastNorm,
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "relu6": nn.ReLU6,
    "relu6 in place": lambda: nn.ReLU6(inplace=True),
    "gelu": nn.GELU,
    "dropout": lambda: nn.Dropout(0.25),
    "attention": Attention,
    "heads": Heads,
    "per channel": PerChannel,
    "mixer": Mixer,
    "gate": Gate,
}
MOVES = {
    "turn": lambda x, kept: x.transpose(2, 3),
    "mirror": lambda x, kept: x.flip(-1),
    "shuffle": lambda x, kept: torch.cat(x.chunk(2, 1)[::-1], 1),
    "roll axes": lambda x, kept: x.permute(-1, 0, 1, 2).permute(1, 2, 3, 0),
    "windows": lambda x, kept: x.unfold(3, 2, 1).mean(-1) if x.shape[-1] > 3 else x,
    "flatten": lambda x, kept: x.flatten(1).unflatten(1, x.shape[1:]),
    "halve in place": lambda x, kept: (x * 1).mul_(0.5),
    "one row in place": lambda x, kept: _doubled_row(x * 1),
    "a view in place": lambda x, kept: _doubled_view(x * 1),
    "max pool": lambda x, kept: functional.max_pool2d(x, 2) if x.shape[-1] > 3 else x,
    "mean pool": lambda x, kept: functional.avg_pool2d(x, 2) if x.shape[-1] > 3 else x,
    "thin": lambda x, kept: _thinned(x) if x.shape[-1] > 2 else x,
    "shortcut": lambda x, kept: x + kept if x.shape == kept.shape else x,
    "shortcut in place": lambda x, kept: (x * 1).add_(kept) if x.shape == kept.shape else x,
}
KEEP = "keep"
STEPS = (*LAYERS, *MOVES, KEEP)
HEADS = ("mean", "flatten", "reshape")
Graph = tuple[list[str], str]
"""Steps, and how features become a vector."""


def _thinned(x: Tensor) -> Tensor:
    return functional.pad(x[..., ::2, ::2], (0, 0, 0, 0, 1, 1))[:, :CHANNELS]


def _doubled_row(x: Tensor) -> Tensor:
    x[:, :, 0] *= 2
    return x


def _doubled_view(x: Tensor) -> Tensor:
    x.movedim(1, -1).narrow(-1, 1, 2).mul_(2)
    return x


class RandomGraph(nn.Module):
    """The steps one after the other; `keep` marks what a later shortcut adds."""

    def __init__(self, steps: list[str], head: str) -> None:
        super().__init__()
        self.steps, self.how = tuple(steps), head
        self.stem = nn.Conv2d(1, CHANNELS, 3, padding=1)
        self.layers = nn.ModuleList(LAYERS[step]() if step in LAYERS else nn.Identity() for step in steps)
        with torch.no_grad():
            width = self.features(torch.zeros(2, 1, 6, 6)).shape[1]
        self.head = nn.Linear(width, tiny.NUM_CLASSES)

    def features(self, x: Tensor) -> Tensor:
        kept = x = self.stem(x)
        for step, layer in zip(self.steps, self.layers, strict=True):
            kept = x if step == KEEP else kept
            x = MOVES[step](x, kept) if step in MOVES else layer(x)
        if self.how == "mean":
            return x.mean((2, 3))
        return x.reshape(len(x), -1) if self.how == "reshape" else x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Several(nn.Module):
    """Some graphs side by side, which are traced in little more time than one."""

    def __init__(self, graphs: list[tuple[list[str], str]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.graphs = nn.ModuleList(RandomGraph(steps, head) for steps, head in graphs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([graph(x) for graph in self.graphs]).sum(0)


def drawn(name: str, count: int) -> list[Graph]:
    """Some graphs that can be trained, the same for the same name."""
    draw = random.Random(name)  # noqa: S311
    graphs: list[Graph] = []
    while len(graphs) < count:
        steps = [draw.choice(STEPS) for _ in range(draw.randint(2, 6))]
        late = [at for at, step in enumerate(steps) if step.startswith("shortcut")]
        if late and draw.random() < 0.7:  # from further on than the stem
            steps.insert(draw.randint(0, late[-1]), KEEP)
        if all(map(_can_be_trained, (steps, [step for step in steps if step not in ("bn", *_OTHER_BN)]))):
            graphs.append((steps, draw.choice(HEADS)))
    return graphs


_OTHER_BN = ("bn without affine", "bn without statistics")


def _can_be_trained(steps: list[str]) -> bool:
    """Whether torch itself can: what a layer needs on the way back may not change in place behind it."""
    try:
        RandomGraph(steps, "mean")(torch.ones(3, 1, 6, 6)).sum().backward()
    except RuntimeError:
        return False
    return True
