"""LSTM, GRU and RNN with keyed dropout between their layers, and step by step where torch's own cannot be mapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

PACKED = "packed sequences have lengths of their own in every batch"
"""Why they cannot be mapped over clients."""
Drop = Callable[[Tensor, float], Tensor]
"""(x, p) -> x with a keyed mask."""
State = tuple[Tensor, ...]
"""(h,), or (h, c) of an LSTM."""
Cell = Callable[[Tensor, Tensor, State, Tensor | None], State]
"""(input's part of the gates, hidden state's part, state, weight of the projection) -> the next state."""


def _lstm(x: Tensor, h: Tensor, state: State, projection: Tensor | None) -> State:
    into, forget, new, out = (x + h).chunk(4, -1)
    c = torch.sigmoid(forget) * state[1] + torch.sigmoid(into) * torch.tanh(new)
    shown = torch.sigmoid(out) * torch.tanh(c)
    return (shown if projection is None else functional.linear(shown, projection), c)


def _gru(x: Tensor, h: Tensor, state: State, projection: Tensor | None) -> State:
    (reset_x, update_x, new_x), (reset_h, update_h, new_h) = x.chunk(3, -1), h.chunk(3, -1)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return (new + torch.sigmoid(update_x + update_h) * (state[0] - new),)


def _rnn_tanh(x: Tensor, h: Tensor, state: State, projection: Tensor | None) -> State:
    return (torch.tanh(x + h),)


def _rnn_relu(x: Tensor, h: Tensor, state: State, projection: Tensor | None) -> State:
    return (torch.relu(x + h),)


CELLS: dict[Any, Cell] = {torch.lstm: _lstm, torch.gru: _gru, torch.rnn_tanh: _rnn_tanh, torch.rnn_relu: _rnn_relu}
"""Torch's functions, and one step of each."""
ALONE: dict[Any, Cell] = {
    torch.lstm_cell: _lstm,
    torch.gru_cell: _gru,
    torch.rnn_tanh_cell: _rnn_tanh,
    torch.rnn_relu_cell: _rnn_relu,
}
"""Torch's functions of a single step."""


def step_once(
    function: Any, x: Tensor, hx: Any, into: Tensor, hidden: Tensor, bias: Tensor | None, hidden_bias: Tensor | None
) -> Any:
    """One of torch's functions of a single step, in operations that can be mapped."""
    several = isinstance(hx, tuple | list)
    state: State = tuple(hx) if several else (hx,)
    gates = functional.linear(x, into, bias), functional.linear(state[0], hidden, hidden_bias)
    after = ALONE[function](*gates, state, None)
    return after if several else after[0]


def recur(function: Any, args: tuple[Any, ...], drop: Drop, mapped: bool) -> tuple[Tensor, ...]:
    """One of torch's recurrent functions, layer by layer; `mapped` ones use nothing that cannot be mapped.

    On a GPU a layer's weights lie in one buffer, where cuDNN has room for biases behind all matrices. Given the first
    of several layers alone, torch takes the start of that buffer for its own; without biases nothing tells it that the
    next layer's matrices lie where cuDNN then reads biases. So weights without biases are handed over as copies.
    """
    if isinstance(args[3], bool):
        x, hx, weights, biases, layers, p, training, both, batch_first = args
        sizes = None
    else:
        x, sizes, hx, weights, biases, layers, p, training, both = args
        batch_first = False
        if mapped:
            raise NotImplementedError(PACKED)
    states = hx if isinstance(hx, tuple | list) else (hx,)
    directions = 2 if both else 1
    each = len(weights) // layers
    x = x.transpose(0, 1) if batch_first else x
    ends: list[State] = []
    for layer in range(layers):
        own = weights[layer * each : (layer + 1) * each]
        start: State = tuple(state[layer * directions : (layer + 1) * directions] for state in states)
        if mapped:
            x, end = _step_by_step(CELLS[function], x, start, own, directions, biases)
        else:
            given = start if isinstance(hx, tuple | list) else start[0]
            lead = (x,) if sizes is None else (x, sizes)
            tail = (False,) if sizes is None else ()
            own = own if biases else [weight.clone() for weight in own]
            x, *end = function(*lead, given, own, biases, 1, 0.0, training, both, *tail)
        ends.append(tuple(end))
        if layer + 1 < layers and training and p > 0:
            x = drop(x, p)
    return (x.transpose(0, 1) if batch_first else x, *(torch.cat(parts) for parts in zip(*ends, strict=True)))


def _step_by_step(
    cell: Cell, x: Tensor, start: State, weights: Sequence[Tensor], directions: int, biases: bool
) -> tuple[Tensor, State]:
    """One layer over (time, batch, features), in one direction or in both."""
    each = len(weights) // directions
    outputs: list[Tensor] = []
    ends: list[State] = []
    for direction in range(directions):
        into, hidden, *rest = weights[direction * each : (direction + 1) * each]
        bias, hidden_bias = rest[:2] if biases else (None, None)
        projection = rest[-1] if len(rest) % 2 else None
        state = tuple(part[direction] for part in start)
        gates = functional.linear(x, into, bias).unbind(0)
        shown: list[Tensor] = []
        for gate in reversed(gates) if direction else gates:
            state = cell(gate, functional.linear(state[0], hidden, hidden_bias), state, projection)
            shown.append(state[0])
        outputs.append(torch.stack(shown[::-1] if direction else shown))
        ends.append(state)
    return torch.cat(outputs, -1), tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
