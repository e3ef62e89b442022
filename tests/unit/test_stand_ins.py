"""Stand-ins for torch's functions: equal to them where nothing is drawn, and what they draw is what they should."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fednorm.core import rng
from fednorm.layers.attention import attend
from fednorm.layers.recurrent import CELLS
from fednorm.layers.stand_ins import StandIns

KEY = rng.key(3)
MANY = 40_000


def close(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


# --- equal to torch's own --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"bidirectional": True, "batch_first": True}),
        (nn.LSTM, {"bidirectional": True, "proj_size": 2}),
        (nn.GRU, {}),
        (nn.GRU, {"bidirectional": True, "batch_first": True}),
        (nn.RNN, {"nonlinearity": "tanh"}),
        (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
    ],
)
def test_recurrence_step_by_step(layer: type[nn.RNNBase], options: dict[str, Any], bias: bool) -> None:
    torch.manual_seed(0)
    net = layer(3, 4, 2, bias=bias, **options).double()
    x = numbers(5, 6, 3)
    expected = net(x)
    with StandIns(KEY, mapped=True):
        found = net(x)
    close(found, expected)
    _, state = expected
    expected = net(x, state)
    with StandIns(KEY, mapped=True):
        close(net(x, state), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, partial(nn.RNNCell, nonlinearity="relu")])
def test_a_single_step(layer: Callable[..., nn.Module], bias: bool) -> None:
    torch.manual_seed(0)
    cell, x = layer(3, 4, bias=bias).double(), numbers(2, 3)
    state = cell(x)
    expected = cell(x, state)
    with StandIns(KEY, mapped=True):
        close(cell(x, state), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrence_drops_between_layers_alone(packed: bool, kind: type[nn.LSTM | nn.GRU]) -> None:
    """Layer by layer with dropout is the layers one after the other, a mask in between."""
    torch.manual_seed(0)
    net = kind(3, 4, 2, dropout=0.5, bidirectional=True).double()
    first, second = kind(3, 4, bidirectional=True).double(), kind(8, 4, bidirectional=True).double()
    first.load_state_dict({key: value for key, value in net.state_dict().items() if "l0" in key})
    second.load_state_dict({key.replace("l1", "l0"): v for key, v in net.state_dict().items() if "l1" in key})
    x: Any = numbers(5, 2, 3)
    x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3])) if packed else x
    with StandIns(KEY):
        found, _ = net(x)
    middle, _ = first(x)
    with StandIns(KEY):
        dropped = middle._replace(data=F.dropout(middle.data, 0.5)) if packed else F.dropout(middle, 0.5)
    expected, _ = second(dropped)
    close(found.data, expected.data)
    assert dropped.data.eq(0).any()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_layers_without_biases_get_weights_that_lie_alone(kind: type[nn.LSTM | nn.GRU]) -> None:
    """On a GPU the weights of all layers lie in one buffer, where cuDNN takes what follows a layer for its biases."""
    torch.manual_seed(0)
    net = kind(3, 4, 2, dropout=0.5, bias=False).double()
    buffer = torch.cat([weight.detach().flatten() for weight in net.parameters()])
    sizes = [weight.numel() for weight in net.parameters()]
    for weight, part in zip(net.parameters(), buffer.split(sizes), strict=True):
        weight.data = part.view(weight.shape)
    handed: list[Tensor] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            handed.extend(args[2] if func in CELLS else ())
            return func(*args, **(kwargs or {}))

    with Watch(), StandIns(KEY):
        found, _ = net(numbers(5, 2, 3))
    found.sum().backward()
    assert len(handed) == 4
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in handed)
    assert all(weight.grad is not None for weight in net.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.eye(5, dtype=torch.bool)},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},  # the last query may look at nothing
        {"attn_mask": torch.linspace(-2, 2, 25, dtype=torch.float64).view(5, 5)},
    ],
)
def test_attention_as_plain_products(options: dict[str, Any]) -> None:
    q, k, v = numbers(3, 2, 4, 5, 6)
    close(attend(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options))


def test_attention_with_fewer_heads_of_keys() -> None:
    q, k, v = numbers(2, 4, 5, 6), numbers(2, 2, 5, 6), numbers(2, 2, 5, 6) + 1
    close(attend(q, k, v, enable_gqa=True), F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"kdim": 3, "vdim": 2}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}]
)
def test_heads_of_attention(options: dict[str, Any], weights: bool) -> None:
    torch.manual_seed(0)
    net = nn.MultiheadAttention(4, 2, batch_first=True, **options).double()
    q, k, v = numbers(2, 5, 4), numbers(2, 6, options.get("kdim", 4)), numbers(2, 6, options.get("vdim", 4))
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, -2:] = True
    expected = net(q, k, v, key_padding_mask=padding, need_weights=weights)
    with StandIns(KEY, mapped=True):
        close(net(q, k, v, key_padding_mask=padding, need_weights=weights), expected)


@pytest.mark.parametrize("weights", [True, False])
def test_attention_drops_its_weights(weights: bool) -> None:
    """With values that are all one, each output is the sum of what is kept of the weights, doubled."""
    net = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True).double()
    with torch.no_grad():
        net.in_proj_weight.zero_()
        net.in_proj_bias.zero_()[8:] = 1
        net.out_proj.weight.copy_(torch.eye(4))
        net.out_proj.bias.zero_()
    x = numbers(3, 8, 4)
    with StandIns(KEY) as seen:
        found, _ = net(x, x, x, need_weights=weights)
    assert seen.drawn == 1
    kept = rng.uniform(seen.key ^ int(rng.key("call", 0)), (6, 8, 8)) >= 0.5
    sums = kept.double().mean(-1) * 2  # of eight equal weights
    shape = (3, 2, 8)
    close(found.detach(), sums.view(shape).permute(0, 2, 1).repeat_interleave(2, -1))


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode: str, padding: int | None) -> None:
    net = nn.EmbeddingBag(7, 3, mode=mode, padding_idx=padding).double()
    rows = torch.tensor([[1, 2, 0], [0, 0, 0], [6, 6, 3]])
    expected = net(rows)
    with StandIns(KEY, mapped=True):
        close(net(rows), expected)


def test_weighted_bags_of_embeddings_and_those_with_offsets() -> None:
    net = nn.EmbeddingBag(7, 3, mode="sum").double()
    rows, weights = torch.tensor([[1, 2], [3, 3]]), numbers(2, 2)
    expected, flat = net(rows, per_sample_weights=weights), net(rows.flatten(), torch.tensor([0, 1]))
    with StandIns(KEY, mapped=True):
        close(net(rows, per_sample_weights=weights), expected)
        with pytest.raises(NotImplementedError, match="an EmbeddingBag with offsets"):
            net(rows.flatten(), torch.tensor([0, 1]))
    with StandIns(KEY):
        close(net(rows.flatten(), torch.tensor([0, 1])), flat)


@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_norm(dim: int | None) -> None:
    net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4).double(), dim=dim)
    x = numbers(2, 3)
    expected = net(x)
    with StandIns(KEY, mapped=True):
        close(net(x), expected)


# --- what is drawn ---------------------------------------------------------------------------------------------------


def drawn(function: Callable[[Tensor], Tensor], x: Tensor | None = None) -> Tensor:
    x = torch.ones(MANY, dtype=torch.float64) if x is None else x
    with StandIns(KEY):
        return function(x)


@pytest.mark.parametrize(
    ("function", "mean", "deviation"),
    [
        (lambda x: torch.rand(MANY), 0.5, 1 / math.sqrt(12)),
        (torch.rand_like, 0.5, 1 / math.sqrt(12)),
        (lambda x: torch.randn((MANY,), dtype=torch.float64, generator=None), 0.0, 1.0),
        (torch.randn_like, 0.0, 1.0),
        (lambda x: torch.bernoulli(x * 0.3), 0.3, math.sqrt(0.21)),
        (lambda x: x.bernoulli(0.3), 0.3, math.sqrt(0.21)),
        (lambda x: x.clone().bernoulli_(x * 0.3), 0.3, math.sqrt(0.21)),
        (lambda x: x.clone().uniform_(-1, 3), 1.0, 4 / math.sqrt(12)),
        (lambda x: x.clone().uniform_(**{"from": -1, "to": 3}), 1.0, 4 / math.sqrt(12)),
        (lambda x: x.clone().normal_(2, std=3), 2.0, 3.0),
        (lambda x: F.dropout(x, 0.2), 1.0, 0.5),
        (lambda x: torch.dropout(x, 0.2, True), 1.0, 0.5),
        (lambda x: F.rrelu(-x, 0.1, 0.5, training=True), -0.3, 0.4 / math.sqrt(12)),
    ],
)
def test_moments(function: Callable[[Tensor], Tensor], mean: float, deviation: float) -> None:
    found = drawn(function).double()
    assert found.shape == (MANY,)
    assert float(found.mean()) == pytest.approx(mean, abs=4 * deviation / math.sqrt(MANY))
    assert float(found.std()) == pytest.approx(deviation, rel=0.02)


@pytest.mark.parametrize("function", [F.alpha_dropout, F.feature_alpha_dropout])
def test_alpha_dropout_keeps_mean_and_deviation(function: Callable[..., Tensor]) -> None:
    x = numbers(400, 100)
    found = drawn(lambda x: function(x, 0.3, training=True), x)
    assert float(found.mean()) == pytest.approx(0, abs=0.05)
    assert float(found.std()) == pytest.approx(1, rel=0.03)
    assert torch.equal(drawn(lambda x: function(x, 1.0, training=True), x), x * 0)


@pytest.mark.parametrize(
    ("function", "shape", "axes"),
    [(F.dropout1d, (3, 50, 4), (2,)), (F.dropout2d, (3, 50, 4, 4), (2, 3)), (F.dropout3d, (50, 2, 2, 2), (1, 2, 3))],
)
def test_whole_channels_are_dropped(function: Callable[..., Tensor], shape: tuple[int, ...], axes: tuple) -> None:
    y = drawn(lambda x: function(x, 0.5), torch.ones(shape))
    assert torch.equal(y.amax(axes), y.amin(axes))
    assert set(y.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("drop", [F.dropout, lambda x: torch.dropout(x, 0.5, True)])
def test_each_call_draws_anew_and_a_pass_draws_the_same_again(drop: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(1000)
    first, again = (drawn(lambda x: torch.stack([drop(x), drop(x)]), x) for _ in range(2))
    assert torch.equal(first, again)
    assert 0.4 < (first[0] == first[1]).double().mean() < 0.6


def test_changes_in_place_are_made_in_place() -> None:
    x = torch.ones(50)
    assert drawn(lambda x: F.dropout(x, 0.5, inplace=True), x) is x
    assert set(x.unique().tolist()) == {0.0, 2.0}


def test_what_does_not_draw_stays_torch_s_own() -> None:
    x, own = torch.ones(50), torch.Generator().manual_seed(1)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(1))
    with StandIns(KEY) as seen:
        assert F.dropout(x, 0.5, training=False) is x
        assert torch.equal(torch.dropout(x, 0.5, False), x)
        assert F.alpha_dropout(x, 0.5, training=False) is x
        assert torch.equal(F.rrelu(-x), -x * (1 / 8 + 1 / 3) / 2)
        assert torch.equal(torch.rand(3, generator=own), expected)
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            F.dropout(x, 1.5)
    assert seen.drawn == 0
