"""Operators over a stack of clients that work number by number, by name, each with its reference in plain torch.

As in `fednorm.engines.stack.kernels.ops`, the Triton kernels run where they fit, the references elsewhere.
"""
# torch.library reads the annotations of an operator, so this file does without `from __future__ import annotations`.

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fednorm.core.optimizers import sgd_update
from fednorm.core.reductions import fold as folded
from fednorm.engines.stack.kernels.layer_ops import linear_weight_grad
from fednorm.engines.stack.kernels.ops import added, channels_last, channels_second, kernels_fit
from fednorm.engines.stack.row_matrix import aligned_like
from fednorm.layers.keyed import dropped


def is_channels_last(x: Tensor) -> bool:
    """Whether images (client, batch, channel, height, width) lie in memory with the channel last."""
    return x.dim() == 5 and x.permute(0, 1, 3, 4, 2).is_contiguous()


def _laid_like(x: Tensor, y: Tensor) -> Tensor:
    """y, with the channel last in memory where it is so in x, else contiguous."""
    return channels_second(channels_last(y)) if is_channels_last(x) else y.contiguous()


@torch.library.custom_op("fednorm::dropout", mutates_args=())
def dropout(x: Tensor, keys: Tensor, p: float) -> Tensor:
    """x (client, ...) / (1 - p), and 0 where the number that the client's key draws is below p."""
    if kernels_fit(x):
        from fednorm.engines.stack.kernels.elements import run_dropout

        if is_channels_last(x):
            channels, pixels = x.shape[2], x.shape[3] * x.shape[4]
            return channels_second(run_dropout(channels_last(x), keys, p, channels, pixels))
        return run_dropout(x.contiguous(), keys, p, 1, 1)
    return _laid_like(x, dropped(x, keys, p, x.shape[1:]))


@dropout.register_fake
def _(x: Tensor, keys: Tensor, p: float) -> Tensor:
    return _laid_like(x, x.new_empty(x.shape))


def _images(x: Tensor) -> Tensor:
    """(client, batch, channel, height, width) as (client * batch, channel, height, width)."""
    return x.flatten(0, 1)


@torch.library.custom_op("fednorm::max_pool", mutates_args=())
def max_pool(x: Tensor, side: int) -> Tensor:
    """The largest of each square window, windows side by side."""
    if kernels_fit(x):
        from fednorm.engines.stack.kernels.elements import run_max_pool

        return channels_second(run_max_pool(channels_last(x), side))
    y = functional.max_pool2d(_images(x), side)
    return channels_second(channels_last(y.unflatten(0, x.shape[:2])))


@max_pool.register_fake
def _(x: Tensor, side: int) -> Tensor:
    clients, batch, channels, height, width = x.shape
    return channels_second(x.new_empty(clients, batch, height // side, width // side, channels))


@torch.library.custom_op("fednorm::max_pool_grad", mutates_args=())
def max_pool_grad(x: Tensor, dy: Tensor, side: int) -> Tensor:
    """The gradient of x: the first of the largest in a window gets that of its maximum."""
    if kernels_fit(x):
        from fednorm.engines.stack.kernels.elements import run_max_pool

        return channels_second(run_max_pool(channels_last(x), side, channels_last(dy)))
    _, indices = functional.max_pool2d(_images(x), side, return_indices=True)
    dx = torch.zeros_like(_images(x)).flatten(2).scatter_(2, indices.flatten(2), _images(dy).flatten(2))
    return channels_second(channels_last(dx.view(x.shape)))


@max_pool_grad.register_fake
def _(x: Tensor, dy: Tensor, side: int) -> Tensor:
    return channels_second(channels_last(x.new_empty(x.shape)))


@torch.library.custom_op("fednorm::thin", mutates_args=())
def thin(x: Tensor, stride: int, before: int, after: int) -> Tensor:
    """Every n-th pixel, with zeros as further channels: a residual block's shortcut without weights."""
    if kernels_fit(x):
        from fednorm.engines.stack.kernels.elements import run_thin

        (*_, channels, _, _), size = x.shape, _thinned(x, stride)
        return channels_second(run_thin(channels_last(x), size, before + channels + after, before, stride, False))
    y = functional.pad(x[..., ::stride, ::stride], (0, 0, 0, 0, before, after))
    return channels_second(channels_last(y))


def _thinned(x: Tensor, stride: int) -> tuple[int, int]:
    return -(-x.shape[3] // stride), -(-x.shape[4] // stride)


@thin.register_fake
def _(x: Tensor, stride: int, before: int, after: int) -> Tensor:
    return channels_second(x.new_empty(*x.shape[:2], *_thinned(x, stride), before + x.shape[2] + after))


@torch.library.custom_op("fednorm::thin_grad", mutates_args=())
def thin_grad(dy: Tensor, size: list[int], stride: int, before: int, after: int) -> Tensor:
    """The gradient of x of this height and width."""
    channels = dy.shape[2] - before - after
    if kernels_fit(dy):
        from fednorm.engines.stack.kernels.elements import run_thin

        return channels_second(run_thin(channels_last(dy), (size[0], size[1]), channels, before, stride, True))
    dx = channels_second(dy.new_zeros(*dy.shape[:2], *size, channels))
    dx[..., ::stride, ::stride] = dy[:, :, before : before + channels]
    return dx


@thin_grad.register_fake
def _(dy: Tensor, size: list[int], stride: int, before: int, after: int) -> Tensor:
    return channels_second(dy.new_empty(*dy.shape[:2], *size, dy.shape[2] - before - after))


@torch.library.custom_op("fednorm::relu_bias_grad", mutates_args=())
def relu_bias_grad(dy: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient behind a ReLU whose output is y, and (client, channel) its sums, the gradient of a bias."""
    if kernels_fit(y):
        from fednorm.engines.stack.kernels.elements import run_relu_grad

        dx, sums = run_relu_grad(channels_last(dy), channels_last(y))
        return channels_second(dx), sums.to(y.dtype)
    dx = torch.where(y <= 0, 0, dy)
    return channels_second(channels_last(dx)), dx.sum((1, 3, 4))


@relu_bias_grad.register_fake
def _(dy: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return channels_second(channels_last(dy.new_empty(dy.shape))), y.new_empty(y.shape[0], y.shape[2])


@torch.library.custom_op("fednorm::narrowed", mutates_args=())
def narrowed(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix (client, number) in another type, its rows at aligned addresses."""
    new = aligned_like(flat, dtype)
    round_into(new, flat)
    return new


def round_into(new: Tensor, flat: Tensor) -> None:
    """Write a matrix in the type of one that `narrowed` made of it, or of another like it."""
    rows, stride = len(flat), flat.stride(0)
    room = flat.untyped_storage().nbytes() // flat.element_size() - flat.storage_offset()
    if stride == new.stride(0) and flat.stride(1) == 1 and rows * stride <= room:
        # Together with what lies between the rows the matrix is one vector, which is copied faster.
        new.as_strided((rows * stride,), (1,)).copy_(flat.as_strided((rows * stride,), (1,)))
    else:
        new.copy_(flat)


@narrowed.register_fake
def _(flat: Tensor, dtype: torch.dtype) -> Tensor:
    return aligned_like(flat, dtype)


_POOL_GRADS = {2: torch.ops.aten.avg_pool2d_backward, 3: torch.ops.aten.avg_pool3d_backward}


@torch.library.custom_op("fednorm::overhanging_pool_grad", mutates_args=())
def overhanging_pool_grad(
    dy: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil: bool, padded: bool,
    divisor: int | None, axes: int,
) -> Tensor:  # fmt: skip
    """Torch's own gradient of an average pooling, over two or three axes, where its compiler cannot look into it."""
    return _POOL_GRADS[axes](dy, x, kernel, stride, padding, ceil, padded, divisor)


@overhanging_pool_grad.register_fake
def _(
    dy: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil: bool, padded: bool,
    divisor: int | None, axes: int,
) -> Tensor:  # fmt: skip
    return _POOL_GRADS[axes](dy, x, kernel, stride, padding, ceil, padded, divisor)


@torch.library.custom_op("fednorm::counted", mutates_args=())
def counted(begin: int, end: int, step: int, device: torch.device) -> Tensor:
    """Torch's own `arange` of 64-bit numbers, as an operator that its compiler cannot look into."""
    return torch.arange(begin, end, step, dtype=torch.int64, device=device)


@counted.register_fake
def _(begin: int, end: int, step: int, device: torch.device) -> Tensor:
    return torch.arange(begin, end, step, dtype=torch.int64, device=device)


@torch.library.custom_op("fednorm::fold", mutates_args=())
def fold(stack: Tensor, weights: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """sum_k p_k x_k of the clients of each run: stacks (run, client, number), weights (run, client).

    It is taken in float64, and rounded to a type once.
    """
    if kernels_fit(stack):
        from fednorm.engines.stack.kernels.elements import run_fold

        return run_fold(stack if stack.stride(2) == 1 else stack.contiguous(), weights, dtype)
    return torch.stack([folded(each, share) for each, share in zip(stack, weights, strict=True)]).to(dtype)


@fold.register_fake
def _(stack: Tensor, weights: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return stack.new_empty(stack.shape[0], stack.shape[2], dtype=dtype)


@torch.library.custom_op("fednorm::moved", mutates_args=())
def moved(end: Tensor, begun: Tensor) -> Tensor:
    """(2, client) in float64: squared distances of rows (client, number) from those of their runs, and their sums."""
    if kernels_fit(end) and end.dtype == torch.float32:
        from fednorm.engines.stack.kernels.elements import run_moved

        return run_moved(*(each if each.stride(1) == 1 else each.contiguous() for each in (end, begun)))
    away = (end.unflatten(0, (len(begun), -1)) - begun.unsqueeze(1)).flatten(0, 1)
    distance = torch.linalg.vector_norm(away, dim=1, dtype=torch.float64)
    return torch.stack([distance.square(), end.sum(1, dtype=torch.float64)])


@moved.register_fake
def _(end: Tensor, begun: Tensor) -> Tensor:
    return end.new_empty(2, len(end), dtype=torch.float64)


def spread_into(out: Tensor, rows: Tensor) -> None:
    """Write a row, expanded to the shape of a matrix, to all rows of that."""
    if kernels_fit(out) and out.dtype == rows.dtype and out.stride(1) == 1:
        from fednorm.engines.stack.kernels.elements import run_spread

        run_spread(out, rows[0])
    else:
        out.copy_(rows)


@torch.library.custom_op("fednorm::sgd", mutates_args=())
def sgd(
    value: Tensor, grads: Sequence[Tensor | None], velocity: Tensor | None, lr: Tensor, momentum: Tensor,
    decay: Tensor, xs: list[Tensor], dys: list[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Values (client, number) and velocities after a step of SGD; gradients lie side by side, numbers are per client.

    Without momentum there is no velocity, and what is returned of it is empty. A gradient is (client, number), or
    (client, part, number) where parts are still to be added. One that is None is that of a linear layer's weights,
    computed on the way from the next of `xs` (client, row, in) and `dys` (client, row, out).
    """
    new, moved = aligned_like(value), value.new_empty(0) if velocity is None else aligned_like(velocity)
    after = new, None if velocity is None else moved
    _sgd_into((value, velocity), grads, after, lr, momentum, decay, xs, dys)
    return new, moved


@sgd.register_fake
def _(
    value: Tensor, grads: Sequence[Tensor | None], velocity: Tensor | None, lr: Tensor, momentum: Tensor,
    decay: Tensor, xs: list[Tensor], dys: list[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return aligned_like(value), value.new_empty(0) if velocity is None else aligned_like(velocity)


@torch.library.custom_op("fednorm::sgd_in_place", mutates_args=("value", "velocity", "rounded"))
def sgd_in_place(
    value: Tensor, grads: Sequence[Tensor | None], velocity: Tensor | None, lr: Tensor, momentum: Tensor,
    decay: Tensor, xs: list[Tensor], dys: list[Tensor], rounded: Tensor | None,
) -> None:  # fmt: skip
    """The same, written over the old values and velocities; the values in a narrow type as well."""
    _sgd_into((value, velocity), grads, (value, velocity), lr, momentum, decay, xs, dys, rounded)


def side_by_side(grads: Sequence[Tensor]) -> Tensor:
    """Gradients, some in parts, as one matrix (client, number)."""
    return torch.cat([added(grad) if grad.dim() == 3 else grad for grad in grads], 1)


Pair = tuple[Tensor, Tensor | None]


def _sgd_into(
    old: Pair, grads: Sequence[Tensor | None], new: Pair, lr: Tensor, momentum: Tensor, decay: Tensor,
    xs: list[Tensor], dys: list[Tensor], rounded: Tensor | None = None,
) -> None:  # fmt: skip
    value, velocity = old
    if kernels_fit(value):
        from fednorm.engines.stack.kernels.sgd import run_sgd

        layers = [(x.contiguous(), dy.contiguous()) for x, dy in zip(xs, dys, strict=True)]
        run_sgd(old, grads, new, lr.contiguous(), momentum.contiguous(), decay.contiguous(), layers, rounded)
        return
    products = (linear_weight_grad(x, dy).flatten(1) for x, dy in zip(xs, dys, strict=True))
    whole = side_by_side([next(products) if grad is None else grad for grad in grads])
    held = {} if velocity is None else {"momentum": velocity}
    numbers = {"lr": lr[:, None], "momentum": momentum[:, None], "weight_decay": decay[:, None]}
    values, kept = sgd_update(value, whole, held, numbers)
    new[0].copy_(values)
    if rounded is not None:
        rounded.copy_(values)
    if new[1] is not None:
        new[1].copy_(kept["momentum"])
