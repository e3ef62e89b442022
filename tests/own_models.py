"""Models as users bring them, on tokens and on features, that draw in every way torch offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tiny
from fednorm.data.federation import Federation
from fednorm.data.given import from_clients

VOCABULARY, LENGTH, WIDTH = 11, 5, 4


def text(sizes: tuple[int, ...] = (8, 12, 9)) -> Federation:
    """Clients with token sequences, 0 being padding, whose words and labels differ."""

    def examples(count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(1, VOCABULARY - seed % 3, (count, LENGTH), generator=generator)
        x[::3, -1] = 0
        return x, x.sum(1) % tiny.NUM_CLASSES

    train = [examples(size, seed) for seed, size in enumerate(sizes)]
    return from_clients(train, [examples(6, seed + 50) for seed in range(len(sizes))], num_classes=tiny.NUM_CLASSES)


class TextNet(nn.Module):
    """An embedding, something in the middle, a mean over time, a batch norm, a linear layer."""

    def __init__(self, middle: nn.Module, run: Callable[[nn.Module, Tensor, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.middle, self.run = middle, run
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, tiny.NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.run(self.middle, self.embed(tokens), tokens)
        return self.head(self.norm(x.mean(1)))


def _whole(middle: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
    return middle(x)


def _first(middle: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
    return middle(x)[0]


def _time_first(middle: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
    return middle(x.transpose(0, 1)).transpose(0, 1)


def _padded(middle: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
    return middle(x, src_key_padding_mask=tokens == 0)


def _to_itself(middle: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
    return middle(x, x, x)[0]


def _unweighted(middle: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
    return middle(x, x, x, need_weights=False)[0]


class Functions(nn.Module):
    """A layer that calls functions instead of having layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.mix(x))


def _drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.3, training=True) + F.dropout1d(x, 0.5)


def _alpha(x: Tensor) -> Tensor:
    return (
        F.alpha_dropout(x, 0.3, training=True)
        + F.feature_alpha_dropout(x, 0.3, training=True)
        + F.rrelu(x, training=True)
    )


def _depth(x: Tensor) -> Tensor:
    """Stochastic depth, as torchvision and as timm write it."""
    theirs = torch.empty([x.shape[0], 1, 1], dtype=x.dtype, device=x.device).bernoulli_(0.7)
    others = x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.7)
    return x * theirs.div_(0.7) + torch.tanh(x) * others


def _noise(x: Tensor) -> Tensor:
    noise = torch.randn_like(x) + torch.rand(x.shape, dtype=x.dtype, device=x.device)
    noise = noise + torch.randn(LENGTH, WIDTH, dtype=x.dtype, device=x.device)
    mask = torch.bernoulli(torch.full_like(x, 0.5))
    return x + 0.1 * noise * mask + 0.1 * torch.empty_like(x).uniform_(-1, 1) + 0.1 * torch.empty_like(x).normal_(0, 2)


def _heads(x: Tensor) -> Tensor:
    """Attention over (batch, heads, time, features), causal, with dropout, as written by hand."""
    q = x.unflatten(-1, (2, 2)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


def _encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.2, **options)


class Everything(nn.Module):
    """All that draws, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.attend = _encoder(batch_first=True)
        self.functions = nn.Sequential(Functions(_drop), Functions(_depth), Functions(_noise))
        self.read = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.functions(self.attend(self.drop(x))))[0]


class Bags(nn.Module):
    """The mean, sum and maximum of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(VOCABULARY, WIDTH, mode=mode, padding_idx=0) for mode in ("mean", "sum", "max")
        )
        self.head = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, tiny.NUM_CLASSES))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(sum(bag(tokens) for bag in self.bags))


_MIDDLES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], int]] = {
    "encoder layer": (lambda: _encoder(batch_first=True), _whole, WIDTH),
    "encoder layer, time first": (lambda: _encoder(norm_first=True, activation="gelu"), _time_first, WIDTH),
    "encoder, padded": (
        lambda: nn.TransformerEncoder(_encoder(batch_first=True), 2, enable_nested_tensor=False),
        _padded,
        WIDTH,
    ),
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 2, 0.2, batch_first=True), _to_itself, WIDTH),
    "attention, unweighted": (
        lambda: nn.MultiheadAttention(
            WIDTH, 2, 0.2, add_bias_kv=True, add_zero_attn=True, batch_first=True, kdim=WIDTH
        ),
        _unweighted,
        WIDTH,
    ),
    "attention without dropout": (lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True), _unweighted, WIDTH),
    "attention by hand": (lambda: Functions(_heads), _whole, WIDTH),
    "lstm": (lambda: nn.LSTM(WIDTH, 3, 2, dropout=0.3, batch_first=True, bidirectional=True), _first, 6),
    "lstm, projected": (lambda: nn.LSTM(WIDTH, 3, batch_first=True, proj_size=2), _first, 2),
    "gru": (lambda: nn.GRU(WIDTH, 3, 3, dropout=0.3, batch_first=True, bias=False), _first, 3),
    "rnn": (lambda: nn.RNN(WIDTH, 3, 2, nonlinearity="relu", dropout=0.3, batch_first=True), _first, 3),
    "functional dropout": (lambda: Functions(_drop), _whole, WIDTH),
    "alpha dropout": (lambda: nn.Sequential(nn.AlphaDropout(0.2), Functions(_alpha), nn.RReLU()), _whole, WIDTH),
    "stochastic depth": (lambda: Functions(_depth), _whole, WIDTH),
    "noise": (lambda: Functions(_noise), _whole, WIDTH),
    "everything": (Everything, _whole, WIDTH),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), _whole, WIDTH),
}
NAMES = [*_MIDDLES, "bags"]


def make(name: str) -> nn.Module:
    """A model of a family, in float64."""
    torch.manual_seed(1)
    if name == "bags":
        return Bags().double()
    middle, run, width = _MIDDLES[name]
    return tiny.randomise_norms(TextNet(middle(), run, width).double())
