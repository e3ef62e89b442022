"""The Triton kernels against plain torch: run as a script, on a GPU or (with TRITON_INTERPRET=1) in the interpreter.

A script of its own, since Triton decides about its interpreter once, when it is imported. Activations are float32 and
bfloat16; of those torch is given the same rounded numbers, and calculates with them in float32.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional, grad
from triton.tools.tensor_descriptor import TensorDescriptor

from fednorm.core import rng
from fednorm.core.optimizers import AdamUpdate
from fednorm.data.augment import apply, draws, parse, sizes
from fednorm.engines.stack.gather import _CODES
from fednorm.engines.stack.kernels import boxes, conv, depth_ops, depthwise, elements, group_norm, norm, ops
from fednorm.engines.stack.kernels.adam import run_adam
from fednorm.engines.stack.kernels.entropy import run_entropy
from fednorm.engines.stack.kernels.images import take_images
from fednorm.engines.stack.kernels.ops import channels_last, channels_second
from fednorm.engines.stack.kernels.sgd import run_sgd
from fednorm.engines.stack.kernels.standard import run_standardise
from fednorm.engines.stack.kernels.tiles import DEPTH_PIXELS, conv_tile
from fednorm.layers.ws_conv import Standard

real_fetches = boxes._fetches
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def close(left: Tensor, right: Tensor, tolerance: float = 1e-4) -> None:
    """Up to some multiple of a tolerance for numbers in single precision, or of the rounding of narrow ones."""
    tolerance = max(tolerance, 8e-3) if left.dtype == torch.bfloat16 else tolerance
    assert torch.allclose(left.to(right.dtype), right, rtol=tolerance, atol=tolerance), float(
        (left - right).abs().max()
    )


def rounded(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers in this type, and the same ones in float32."""
    narrow = value.to(dtype)
    return narrow, narrow.float()


def draw(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    return rounded(torch.randn(*shape, device=DEVICE), dtype)


def apart(value: Tensor) -> Tensor:
    """The same numbers as rows of a longer matrix, as the engine keeps them."""
    flat = value.flatten(1)
    wide = torch.zeros(len(flat), flat.shape[1] + 48, device=value.device, dtype=value.dtype)
    wide[:, 16 : 16 + flat.shape[1]] = flat
    return wide[:, 16 : 16 + flat.shape[1]].view(value.shape)


def check_conv(
    dtype: torch.dtype, ins: int, outs: int, stride: int, padding: int, kernel: int, size: int
) -> tuple[Tensor, Tensor]:
    given, x = draw(dtype, 2, 3, ins, size, size)
    filters, w = rounded(0.1 * torch.randn(2, outs, ins, kernel, kernel, device=DEVICE), dtype)
    y = torch.stack([functional.conv2d(a, b, None, stride, padding) for a, b in zip(x, w, strict=True)])
    (away, dy), (addend, extra) = draw(dtype, *y.shape), draw(dtype, *x.shape)
    shape = conv.Shape(stride, padding, padding, kernel, kernel)
    filters = apart(channels_last(filters))
    height, width = y.shape[3:]
    got, parts = conv.run_conv(channels_last(given), filters, (height, width), shape, moments=True)
    close(channels_second(got), y)
    bias = apart(torch.randn(2, outs, device=DEVICE))
    shifted, _ = conv.run_conv(channels_last(given), filters, (height, width), shape, bias=bias, relu=True)
    close(channels_second(shifted), (y + bias[:, None, :, None, None]).relu())
    each = list(zip(x, w, dy, strict=True))
    dx = torch.stack([grad.conv2d_input(a.shape, b, c, stride, padding) for a, b, c in each])
    addend = channels_last(addend)
    back, _ = conv.run_conv(channels_last(away), filters, (size, size), shape, backward=True, addend=addend)
    close(channels_second(back), dx + extra)
    dw = torch.stack([grad.conv2d_weight(a, b.shape, c, stride, padding) for a, b, c in each])
    found = conv.run_weight_grad(channels_last(given), channels_last(away), shape)
    assert found.shape[1] == 1 or height * width > 64
    close(channels_second(found.sum(1)), dw)
    return got, parts


def check_boxes(ins: int, outs: int, padding: int, kernel: int, size: tuple[int, int], launches: int) -> None:
    """Convolutions whose pixels are fetched as boxes; on a GPU that has no such unit they are those of all others."""
    images = 11  # no whole number of tiles
    given, x = draw(torch.bfloat16, 2, images, ins, *size)
    filters, w = rounded(0.1 * torch.randn(2, outs, ins, kernel, kernel, device=DEVICE), torch.bfloat16)
    y = torch.stack([functional.conv2d(a, b, None, 1, padding) for a, b in zip(x, w, strict=True)])
    (away, dy), (addend, extra) = draw(torch.bfloat16, *y.shape), draw(torch.bfloat16, *x.shape)
    shape, narrow = conv.Shape(1, padding, padding, kernel, kernel), channels_last(filters).bfloat16()
    out_size, one = (y.shape[3], y.shape[4]), narrow[:1].expand_as(narrow)
    with fetching() as fetched:
        got, parts = conv.run_conv(channels_last(given), narrow, out_size, shape, moments=True)
        back, _ = conv.run_conv(channels_last(away), narrow, size, shape, backward=True, addend=channels_last(addend))
        found = conv.run_weight_grad(channels_last(given), channels_last(away), shape)
        assert not ops.INTERPRETED or len(fetched) == launches
        for values, end, backward in ((given, out_size, False), (away, size, True)):  # filters that clients share
            each = [
                conv.run_conv(channels_last(values), w, end, shape, backward=backward)[0] for w in (one, one.clone())
            ]
            assert torch.equal(*each)
    close(channels_second(got), y)
    each = list(zip(x, w, dy, strict=True))
    dx = torch.stack([grad.conv2d_input(a.shape, b, c, 1, padding) for a, b, c in each])
    close(channels_second(back), dx + extra)
    dw = torch.stack([grad.conv2d_weight(a, b.shape, c, 1, padding) for a, b, c in each])
    size_of_sums = (images * y[0, 0, 0].numel()) ** 0.5
    close(channels_second(found.sum(1)) / size_of_sums, dw / size_of_sums)
    check_norm(got, (parts, conv_tile(ins, outs, kernel**2, images * y[0, 0, 0].numel(), 2, False).pixels), True)


@contextmanager
def fetching() -> Iterator[list[str]]:
    """Which launches of boxes there are, also in the interpreter; what they tell of steps is what a driver admits."""
    found: list[str] = []

    def described(tensor: Tensor, shape: list[int], steps: list[int], block: list[int]) -> TensorDescriptor:
        within = [size * step for size, step in zip(shape[1:], steps[1:], strict=True)]
        assert all(step >= most for step, most in zip(steps, within, strict=False)), (shape, steps)
        assert all(step * tensor.itemsize % 16 == 0 for step in steps[:-1]), (shape, steps)
        return TensorDescriptor(tensor, shape, steps, block)

    def told(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def tell(*args: Any, **named: Any) -> None:
            found.append(name)
            real(*args, **named)

        return tell

    with ExitStack() as patches:
        patches.enter_context(patch.object(boxes, "_fetches", lambda: ops.INTERPRETED or real_fetches()))
        patches.enter_context(patch.object(boxes, "TensorDescriptor", described))
        for name in ("run_box_conv", "run_box_weight_grad"):
            patches.enter_context(patch.object(conv, name, told(name, getattr(boxes, name))))
        yield found
    assert not boxes._GIVEN_UP.is_set()  # or others would have taken their place


def check_where_boxes_lie() -> None:
    """Steps of what there is but one of say nothing; where clients overlap, or begin anywhere, there are no boxes."""
    with fetching():
        x = torch.randn(2048, device=DEVICE).bfloat16().as_strided((1, 1, 4, 8, 64), (3, 5, 512, 64, 1))
        w = torch.randn(64 * 9 * 64 + 8, device=DEVICE).bfloat16().as_strided((1, 64, 3, 3, 64), (7, 576, 192, 64, 1))
        shape = conv.Shape(1, 1, 1, 3, 3)
        got, _ = conv.run_conv(x, w, (4, 8), shape)
        y = functional.conv2d(channels_second(x)[0].float(), w[0].permute(0, 3, 1, 2).float(), padding=1)
        close(channels_second(got)[0], y)
        if ops.INTERPRETED:
            assert boxes.boxes_fit(1, x, filters=w)
            assert boxes.boxes_fit(1, x, filters=w.expand(3, -1, -1, -1, -1))
            assert not boxes.boxes_fit(1, x.expand(2, -1, -1, -1, -1), filters=w)
            numbers = w[0].numel()
            for apart, begun in ((64, 0), (numbers + 4, 0), (numbers, 4)):
                rows = w.new_empty(begun + 2 * numbers + 8).as_strided(
                    (2, *w.shape[1:]), (apart, *w.stride()[1:]), begun
                )
                assert not boxes.boxes_fit(1, x, filters=rows)


def check_parts_are_foreseen() -> None:
    """A program is traced before any kernel runs, so how many parts there will be is known before."""
    for clients, channels, size in ((1, 3, 20), (2, 20, 20), (3, 40, 16)):
        x, dy = (torch.randn(clients, 3, channels, size, size, device=DEVICE) for _ in range(2))
        fakes = [FakeTensorMode().from_tensor(x)]
        fakes.append(fakes[0].fake_mode.from_tensor(dy))
        for kernel in (1, 3):
            numbers = [kernel, kernel], 1, [kernel // 2] * 2
            for operator, more in ((ops.conv_weight_grad_parts, ()), (depth_ops.depthwise_weight_grad_parts, (1,))):
                with fakes[0].fake_mode:
                    foreseen = operator(*fakes, *numbers, *more)
                found = operator(x, dy, *numbers, *more)
                assert (foreseen.shape, foreseen.stride()) == (found.shape, found.stride())
                assert found.shape[1] > 1


def check_depthwise(
    dtype: torch.dtype, channels: int, kernel: int, stride: int, padding: int, dilation: int, size: int
) -> None:
    """A filter for each channel, each way; where its tiles leave moments, a batch norm with a ReLU6 joins them."""
    given, x = draw(dtype, 2, 3, channels, size, size + 2)
    filters, w = draw(dtype, 2, channels, 1, kernel, kernel)
    numbers = stride, padding, dilation, channels
    y = torch.stack([functional.conv2d(a, b, None, *numbers) for a, b in zip(x, w, strict=True)])
    away, dy = draw(dtype, *y.shape)
    shape = depthwise.Depth(stride, padding, padding, kernel, kernel, dilation)
    filters, out, even = apart(filters.squeeze(2)), (y.shape[3], y.shape[4]), y.shape[3] % 2 == 0
    got, parts = depthwise.run_depthwise(channels_last(given), filters, out, shape, moments=even)
    close(channels_second(got), y)
    each = list(zip(x, w, dy, strict=True))
    dx = torch.stack([grad.conv2d_input(a.shape, b, c, *numbers) for a, b, c in each])
    back, _ = depthwise.run_depthwise(channels_last(away), filters, (size, size + 2), shape, backward=True)
    close(channels_second(back), dx)
    dw = torch.stack([grad.conv2d_weight(a, b.shape, c, *numbers) for a, b, c in each])
    close(depthwise.run_filter_grad(channels_last(given), channels_last(away), shape).sum(1), dw.squeeze(2))
    if even:
        check_norm(got, (parts, DEPTH_PIXELS), training=True, ceiling=0.5)


def check_norm(x: Tensor, parts: tuple[Tensor, int] | None, training: bool, ceiling: float | None = None) -> None:
    """A batch norm with what a residual block adds and a ReLU, or one with a ceiling, forward and backward."""
    clients, channels = len(x), x.shape[-1]
    given, x = x, x.float().requires_grad_()
    gamma, beta = (torch.rand(clients, channels, device=DEVICE).requires_grad_() for _ in range(2))
    running = norm.Running(
        apart(torch.randn(clients, channels, device=DEVICE)),
        apart(torch.rand(clients, channels, device=DEVICE) + 0.5),
        torch.arange(clients, device=DEVICE),
    )
    var, mean = torch.var_mean(x, (1, 2, 3), correction=0) if training else (running.var, running.mean)

    def spread(values: Tensor) -> Tensor:
        return values[:, None, None, None]

    addend, extra = draw(given.dtype, *x.shape)
    open_ended = (x - spread(mean)) * spread((var + 1e-5).rsqrt() * gamma) + spread(beta) + extra
    y = open_ended.clamp(0, ceiling)
    # Where the output bends, rounding decides which way a gradient goes.
    bends = (0.0,) if ceiling is None else (0.0, ceiling)
    near = 1e-4 if given.dtype == torch.float32 else 4e-3
    away, dy = draw(given.dtype, *y.shape)
    for each in (away, dy):
        each *= torch.stack([(open_ended - bend).abs() > near for bend in bends]).all(0)
    wanted = torch.autograd.grad(y, (x, gamma, beta), dy)
    with torch.no_grad():
        got, got_mean, got_var, moved = norm.run_norm(
            given, apart(gamma), apart(beta), running, training=training, rate=0.1, eps=1e-5, addend=addend,
            relu=True, ceiling=ceiling, parts=parts,
        )  # fmt: skip
        for left, right in ((got, y), (got_mean, mean), (got_var, var)):
            close(left, right)
        if training:
            count = x.numel() // (clients * channels)
            close(moved.mean, 0.9 * running.mean + 0.1 * mean)
            close(moved.var, 0.9 * running.var + 0.1 * var * count / (count - 1))
            assert torch.equal(moved.counter, running.counter + 1)
        *grads, masked = norm.run_norm_grad(
            given, away, got_mean, got_var, apart(gamma),
            training=training, eps=1e-5, y=got, ceiling=ceiling, masked=True,
        )  # fmt: skip
        for left, right in zip(grads, wanted, strict=True):
            close(left, right, 1e-3)
        close(masked, dy * ((got > 0) & (got < (ceiling or torch.inf))))
        if ceiling is None:
            check_anew(given, away, (gamma, beta), running, training, parts)


def check_anew(
    x: Tensor, dy: Tensor, affine: tuple[Tensor, Tensor], running: norm.Running, training: bool,
    parts: tuple[Tensor, int] | None,
) -> None:  # fmt: skip
    """Gradients are the same to the bit, whether what a ReLU left is read or computed anew: of 0 and no number too."""
    gamma, beta = map(apart, affine)
    gamma[:, :3] = 0
    beta[:, :3] = torch.tensor([0, 1e-41, torch.nan])  # the second is no positive number in bfloat16
    y, mean, var, _ = norm.run_norm(
        x, gamma, beta, running, training=training, rate=0.1, eps=1e-5, relu=True, parts=parts
    )  # fmt: skip
    read, anew = (
        norm.run_norm_grad(x, dy, mean, var, gamma, training=training, eps=1e-5, masked=True, **shown)
        for shown in ({"y": y}, {"beta": beta})
    )
    for left, right in zip(read, anew, strict=True):
        assert torch.equal(left, right)


def check_many_parts(dtype: torch.dtype) -> None:
    """So many parts of moments, and chunks of a gradient's sums, that a launch of its own joins them."""
    x = (torch.randn(1, 3, 97, 97, 64, device=DEVICE) + 3).to(dtype)
    pixels = x.float().flatten(1, 3).split(100, 1)
    moments = [torch.stack([part.mean(1), (part - part.mean(1, True)).square().sum(1)], 1) for part in pixels]
    check_norm(x, (torch.stack(moments, 1), 100), training=True)


def check_several_tiles(dtype: torch.dtype) -> None:
    """So many pixels that each program takes several tiles, of which the last ones have fewer."""
    with patch.object(norm, "_ENOUGH", 1):
        for channels in (64, 10):
            x = (torch.randn(2, 3, 25, 25, channels, device=DEVICE) + 3).to(dtype)
            assert norm.cut_of(x).tiles > 1
            check_norm(x, None, training=True)
            check_norm(x, None, training=False, ceiling=0.5)


def check_group_norm(dtype: torch.dtype, channels: int, groups: int, size: int) -> None:
    """A group norm with what a residual block adds and a ReLU, forward and backward."""
    given, x = draw(dtype, 2, 3, size, size, channels)
    x.requires_grad_()
    gamma, beta = (torch.rand(2, channels, device=DEVICE).requires_grad_() for _ in range(2))
    addend, extra = draw(dtype, *x.shape)
    each = zip(channels_second(x), gamma, beta, strict=True)
    y = channels_last(torch.stack([functional.group_norm(image, groups, g, b) for image, g, b in each]))
    y = torch.relu(y + extra)
    away, dy = draw(dtype, *y.shape)
    wanted = torch.autograd.grad(y, (x, gamma, beta), dy)
    with torch.no_grad():
        rows = apart(gamma)
        got, mean, inverse = group_norm.run_group_norm(given, rows, apart(beta), groups, 1e-5, addend=addend, relu=True)
        close(got, y)
        dx, *parts, masked = group_norm.run_group_norm_grad(
            given, away, mean, inverse, rows, groups, y=got, masked=True
        )
        for left, right in zip((dx, *(part.sum(1) for part in parts)), wanted, strict=True):
            close(left, right, 1e-3)
        close(masked, dy * (got > 0))


def check_standardise(outs: int, ins: int, side: int, standard: Standard) -> None:
    """Standardised filters that lie apart, and their gradient; filters of zeros have one too."""
    w = torch.randn(2, outs, side, side, ins, device=DEVICE)
    w[0, 1] = 0.0
    w.requires_grad_()
    y = torch.stack([standard(each) for each in w])
    dy = torch.randn_like(y)
    (wanted,) = torch.autograd.grad(y, w, dy)
    rows = apart(w.detach())
    close(run_standardise(rows, standard), y)
    size = wanted.abs().amax((2, 3, 4), keepdim=True)  # 1e5 where a filter is zero
    close(run_standardise(rows, standard, dy) / size, wanted / size)


def check_far_apart() -> None:
    """Clients whose rows lie so far apart that the offset of the last has more than 31 bits."""
    clients, channels, stride = 3, 4, (1 << 30) + 16
    with tempfile.NamedTemporaryFile() as file:  # of which only the pages that are touched take room
        rows = torch.from_file(file.name, shared=True, size=(clients - 1) * stride + channels, dtype=torch.float32)
        vector = rows.as_strided((clients, channels), (stride, 1))
        vector.copy_(torch.arange(1, 13).view(3, 4))
        x = torch.randn(clients, 2, 3, 3, channels)
        running = norm.Running(vector, vector, torch.zeros(clients, dtype=torch.int64))
        y, *_ = norm.run_norm(x, vector, vector, running, training=False, rate=0.1, eps=0.0)
        wide = vector[:, None, None, None]
        close(y, (x - wide) * wide.rsqrt() * wide + wide)
        near = vector.contiguous()
        dx, *_ = norm.run_norm_grad(x, torch.ones_like(x), near, near, vector, training=False, eps=0.0)
        close(dx, wide.sqrt().expand(x.shape))


def check_no_number(client: int) -> None:
    """What is no number stays so, in its client alone: behind a norm's ReLU, a convolution's, and on the way back."""
    x = torch.randn(2, 3, 5, 5, 4, device=DEVICE)
    x[client, 0, 0, 0, 0] = torch.nan
    vector = torch.rand(2, 4, device=DEVICE)
    running = norm.Running(vector, vector, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    for training in (False, True):
        y, *_ = norm.run_norm(x, vector, vector, running, training=training, rate=0.1, eps=1e-5, relu=True)
        assert y.isnan().flatten(1).any(1).tolist() == [client == 0, client == 1]
    shape = conv.Shape(1, 1, 1, 3, 3)
    y, _ = conv.run_conv(x, torch.randn(2, 4, 3, 3, 4, device=DEVICE), (5, 5), shape, relu=True)
    assert y.isnan().flatten(1).any(1).tolist() == [client == 0, client == 1]
    dy = torch.full_like(x, torch.nan)
    assert elements.run_relu_grad(dy, x)[0].isnan().eq(~(x <= 0)).all()


def check_images(dtype: torch.dtype, spec: str) -> None:
    chain = parse(spec)
    pool = torch.randint(0, 256, (9, 3, 12, 10), dtype=torch.uint8, device=DEVICE)
    rows = torch.randint(0, 9, (2, 5), device=DEVICE)
    none = torch.zeros(5, 0, 2, dtype=torch.int64)
    keys = rng.key(3, torch.arange(2))
    drawn = torch.stack([draws(key, (5, 12, 10), chain) if chain.steps else none for key in keys]).to(DEVICE)
    mean, std = torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.6, 0.7]], device=DEVICE)
    before = sizes(chain, 12, 10)
    steps = [(_CODES[name], *size) for (name, _), size in zip(chain.steps, before, strict=False)]
    plan = torch.tensor(steps, dtype=torch.int64, device=DEVICE)
    each = zip(pool[rows], drawn, strict=True)
    raw = torch.stack([apply(x, None, numbers, chain)[0] if chain.steps else x for x, numbers in each])
    wanted = (raw.float() / 255 - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    got = take_images(pool, rows, drawn, plan, torch.stack([mean, std]), before[-1], dtype)
    close(channels_second(got), wanted, 1e-6)


def check_dropout(dtype: torch.dtype, shape: tuple[int, ...], p: float) -> None:
    (given, x), keys = draw(dtype, 2, *shape), rng.key(3, torch.arange(2)).to(DEVICE)
    wanted = torch.where(rng.uniform(keys, shape) >= p, x / (1 - p), 0)
    close(elements.run_dropout(given, keys, p, 1, 1), wanted, 1e-6)
    if len(shape) == 4:
        got = elements.run_dropout(channels_last(given), keys, p, shape[1], shape[2] * shape[3])
        close(channels_second(got), wanted, 1e-6)


def check_pool(dtype: torch.dtype, side: int, height: int, width: int) -> None:
    x = torch.randint(0, 4, (2, 3, 5, height, width), device=DEVICE).float()  # small numbers, so that many are equal
    x = x.flatten(0, 1).requires_grad_()
    y = functional.max_pool2d(x, side)
    away, dy = draw(dtype, *y.shape)
    (dx,) = torch.autograd.grad(y, x, dy)
    given, away = (channels_last(each.detach().unflatten(0, (2, 3)).to(dtype)) for each in (x, away))
    close(channels_second(elements.run_max_pool(given, side)).flatten(0, 1), y)
    close(channels_second(elements.run_max_pool(given, side, away)).flatten(0, 1), dx)


def check_thin(dtype: torch.dtype, stride: int, before: int, after: int, height: int, width: int) -> None:
    given, x = draw(dtype, 2, 3, 5, height, width)
    x.requires_grad_()
    y = functional.pad(x[..., ::stride, ::stride], (0, 0, 0, 0, before, after))
    away, dy = draw(dtype, *y.shape)
    (dx,) = torch.autograd.grad(y, x, dy)
    size, channels = (y.shape[3], y.shape[4]), y.shape[2]
    got = elements.run_thin(channels_last(given), size, channels, before, stride, backward=False)
    close(channels_second(got), y)
    got = elements.run_thin(channels_last(away), (height, width), 5, before, stride, backward=True)
    close(channels_second(got), dx)


def check_relu_grad(dtype: torch.dtype, channels: int) -> None:
    (given, y), (away, dy) = (draw(dtype, 2, 3, 9, 7, channels) for _ in range(2))
    wanted = dy * (y > 0)
    got, sums = elements.run_relu_grad(away, given)
    close(got, wanted)
    close(sums, wanted.sum((1, 2, 3)), 1e-3)


def check_fold(clients: int, numbers: int) -> None:
    stack = torch.stack([apart(torch.randn(clients, numbers, device=DEVICE)) for _ in range(2)])
    weights = torch.rand(2, clients, dtype=torch.float64, device=DEVICE)
    wanted = torch.einsum("rcn,rc->rn", stack.double(), weights)
    for given in (stack, stack[:, :, 1:]):  # also one that begins at an odd address
        close(elements.run_fold(given, weights), wanted[:, -given.shape[2] :], 1e-12)
        assert torch.equal(elements.run_fold(given, weights, torch.float32), elements.run_fold(given, weights).float())


def check_moved(runs: int, clients: int, numbers: int) -> None:
    """Rows that begin at odd addresses too; so many numbers that a program takes several turns."""
    end, begun = (apart(torch.randn(rows, numbers, device=DEVICE)) for rows in (runs * clients, runs))
    away = end.view(runs, clients, -1) - begun.unsqueeze(1)
    wanted = torch.stack([away.double().square().sum(2).flatten(), end.double().sum(1)])
    close(elements.run_moved(end, begun), wanted, 1e-12)
    close(elements.run_moved(end[:, 1:], begun[:, 1:]) + elements.run_moved(end[:, :1], begun[:, :1]), wanted, 1e-12)
    end[0, numbers // 2] = torch.nan
    assert not elements.run_moved(end, begun)[:, 0].isfinite().any()


def check_spread(dtype: torch.dtype, rows: int, numbers: int) -> None:
    """What lies between two rows stays."""
    out = torch.full((rows, numbers + 5), 7, dtype=dtype, device=DEVICE)
    row = draw(dtype, numbers)[0]
    elements.run_spread(out[:, :numbers], row)
    assert torch.equal(out[:, :numbers], row.expand(rows, -1))
    assert bool((out[:, numbers:] == 7).all())
    elements.run_spread(out[:, :numbers], row.new_zeros(1).expand(numbers))
    assert not out[:, :numbers].any()
    assert bool((out[:, numbers:] == 7).all())


Sizes = tuple[int | tuple[int, int], ...]
"""How many numbers gradients have; of those in parts (parts, numbers)."""


def gradients_of(sizes: Sizes, clients: int) -> tuple[list[Tensor], Tensor]:
    """Random gradients as layers leave them, and as one matrix."""
    shapes = [(size,) if isinstance(size, int) else size for size in sizes]
    grads = [torch.randn(clients, *shape, device=DEVICE) for shape in shapes]
    return grads, torch.cat([grad if grad.dim() == 2 else grad.sum(1) for grad in grads], 1)


FEW: Sizes = (5, 1, 7)
LARGE: Sizes = (3, 70_000, 4, (3, 66_000), (2, 1500), 2, (4, 5), 1100)
MANY: Sizes = tuple((2 + layer % 3, 6) if layer % 2 else 4 for layer in range(80))
"""More layers in parts than a launch reads from."""
IN_PARTS: Sizes = ((2, 6), (3, 1030))
NONE: Sizes = (5, (0, 7), (2, 3), (0, 70_000))
"""Some in no parts, which is the gradient 0."""


def check_sgd(sizes: Sizes, momentum: bool, in_place: bool) -> None:
    clients = 3
    grads, whole = gradients_of(sizes, clients)
    value, velocity = (apart(torch.randn_like(whole)) for _ in range(2))
    lr, keep, decay = (torch.rand(clients, device=DEVICE) for _ in range(3))
    step = whole + decay[:, None] * value + momentum * keep[:, None] * velocity
    wanted = value - lr[:, None] * step
    old = value, velocity if momentum else None
    new = old if in_place else (torch.empty_like(value), torch.empty_like(velocity) if momentum else None)
    run_sgd(old, grads, new, lr, keep, decay)
    close(new[0], wanted, 1e-5)
    if new[1] is not None:
        close(new[1], step, 1e-5)


def check_sgd_of_layers(dtype: torch.dtype, momentum: bool) -> None:
    """Weights of linear layers between others: as if their gradients had been given, up to the order of sums."""
    clients, ends = 2, (3, 5, 70)
    layers, wide = [], []
    for rows, ins, outs in ((20, 130, 40), (70, 16, 33)):
        (x, wide_x), (dy, wide_dy) = draw(dtype, clients, rows, ins), draw(dtype, clients, rows, outs)
        layers.append((x, dy))
        wide.append((wide_x, wide_dy))
    others = [torch.randn(clients, size, device=DEVICE) for size in ends]
    products = [(dy.mT @ x).flatten(1) for x, dy in wide]
    whole = [others[0], products[0], products[1], *others[1:]]
    left = [others[0], None, None, *others[1:]]
    numbers = sum(grad.shape[1] for grad in whole)
    value, velocity = (apart(torch.randn(clients, numbers, device=DEVICE)) for _ in range(2))
    rates = [torch.rand(clients, device=DEVICE) for _ in range(3)]
    old = value, velocity if momentum else None
    wanted, found = ([None if part is None else apart(part) for part in old] for _ in range(2))
    run_sgd(old, whole, (wanted[0], wanted[1]), *rates)  # type: ignore[arg-type]
    run_sgd((found[0], found[1]), left, (found[0], found[1]), *rates, layers)  # type: ignore[arg-type]
    for one, other in zip(found, wanted, strict=True):
        if one is not None and other is not None:
            close(one, other, 1e-4)


def check_adam(sizes: Sizes, update: AdamUpdate, in_place: bool) -> None:
    """Two steps: of a client with fresh moments, of one with some, and of one whose count is a mean of others."""
    clients = 3
    numbers = gradients_of(sizes, clients)[1].shape[1]
    begun = torch.tensor([[0.0], [3.0], [7.5]], device=DEVICE)
    value, first, second = (apart(torch.randn(clients, numbers, device=DEVICE)) for _ in range(3))
    old = value, apart(begun.sign() * first), apart(begun.sign() * second.square()), apart(begun.expand(-1, numbers))
    lr, decay = (torch.rand(clients, device=DEVICE) for _ in range(2))
    wanted = dict(zip(("value", "exp_avg", "exp_avg_sq", "step"), (each.double() for each in old), strict=True))
    for _ in range(2):
        grads, whole = gradients_of(sizes, clients)
        rates = {"lr": lr[:, None].double(), "weight_decay": decay[:, None].double()}
        moved, held = update(wanted.pop("value"), whole.double(), wanted, rates)
        wanted = {"value": moved, **held}
        new = old if in_place else tuple(apart(torch.zeros_like(each)) for each in old)
        run_adam(old, grads, new, lr, decay, update)
        for got, exact in zip(new, wanted.values(), strict=True):
            # In single precision 1 - 0.999 is 1e-4 off, and a first gradient that decay nearly takes away some more.
            close(got, exact.float(), 3e-3)
        old = new


def check_entropy(batch: int, classes: int) -> None:
    """Losses and gradients are those of torch's cross-entropy, also where labels are ignored; a false label is seen."""
    x = 5 * torch.randn(2, batch, classes, device=DEVICE)
    y = torch.randint(0, classes, (2, batch), device=DEVICE)
    y[0, ::3] = -7
    leaf = x.clone().requires_grad_()
    each = [functional.cross_entropy(scores, labels, ignore_index=-7) for scores, labels in zip(leaf, y, strict=True)]
    (wanted,) = torch.autograd.grad(sum(each), leaf)  # type: ignore[arg-type]
    loss, away = run_entropy(x, y, -7)
    close(loss, torch.stack(each))
    close(away, wanted)
    y[1, -1] = classes
    assert run_entropy(x, y, -7)[0].isnan().tolist() == [False, True]
    x[0, -1, 0] = float("nan")
    y[0] = 0
    assert run_entropy(x, y, -7)[0].isnan().all()


def check_layers(dtype: torch.dtype) -> None:
    for case in (
        (3, 16, 1, 1, 3, 8),
        (6, 10, 2, 3, 7, 9),
        (16, 32, 2, 1, 3, 8),
        (70, 20, 1, 1, 3, 4),
        (16, 32, 2, 0, 1, 8),
        (32, 16, 2, 1, 3, 7),
        (24, 40, 1, 0, 1, 6),
        (70, 5, 1, 0, 1, 5),
        (100, 20, 2, 1, 3, 4),
        (20, 130, 1, 1, 3, 4),
        (16, 16, 1, 1, 3, 20),
        (20, 16, 1, 0, 1, 20),
    ):
        y, parts = check_conv(dtype, *case)
        pixels = y.numel() // (len(y) * y.shape[-1])
        for moments in (
            None,
            (parts, conv_tile(*case[:2], case[4] ** 2, pixels, len(y), wide=dtype == torch.float32).pixels),
        ):
            check_norm(y, moments, training=True)
        check_norm(y, None, training=False)
    for case in ((16, 2, 8), (32, 1, 3), (8, 8, 5)):
        check_group_norm(dtype, *case)
    for case in (
        (40, 3, 1, 1, 1, 8),
        (5, 3, 2, 1, 1, 7),
        (16, 5, 2, 2, 1, 10),
        (5, 3, 1, 1, 1, 14),
        (3, 7, 1, 3, 1, 5),
        (6, 3, 1, 2, 2, 6),
    ):
        check_depthwise(dtype, *case)
    check_many_parts(dtype)
    check_several_tiles(dtype)
    for spec in ("none", "crop(2)+flip", "flip+rotate(20)+crop(1)", "crop(2)+window(8)+rotate(30)"):
        check_images(dtype, spec)
    check_dropout(dtype, (5, 7), 0.5)
    check_dropout(dtype, (3, 4, 5, 6), 0.25)
    for case in ((2, 8, 6), (2, 7, 9), (3, 7, 6)):
        check_pool(dtype, *case)
    for case in ((2, 2, 3, 8, 8), (2, 0, 0, 7, 5), (3, 1, 0, 6, 7), (1, 4, 4, 3, 3)):
        check_thin(dtype, *case)
    for channels in (3, 32, 70):
        check_relu_grad(dtype, channels)
    for momentum in (False, True):
        check_sgd_of_layers(dtype, momentum)


def main() -> None:
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    if ops.INTERPRETED:
        import narrow_interpreter

        narrow_interpreter.teach()
    for dtype in (torch.float32, torch.bfloat16):
        check_layers(dtype)
    for case in ((5, 3, 3), (16, 16, 3), (3, 40, 1)):
        for standard in (Standard(1.0, 3.0, 0.0, 1e-5), Standard(1.7, 1.0, 1e-2, 0.0)):
            check_standardise(*case, standard)
    # 10 by 10 pixels are no boxes, and 16 channels are too few.
    for case in ((64, 64, 1, 3, (8, 8), 3), (64, 40, 0, 3, (10, 10), 2), (64, 16, 1, 3, (4, 16), 2)):
        check_boxes(*case)
    check_boxes(128, 128, 2, 5, (4, 4), 3)
    check_where_boxes_lie()
    check_parts_are_foreseen()
    if DEVICE == "cpu":
        check_far_apart()
    check_no_number(0)
    check_no_number(1)
    for case in ((5, 3), (20, 10), (70, 100)):
        check_entropy(*case)
    check_fold(4, 1500)
    check_fold(1, 3)
    for case in ((1, 3, 700), (2, 2, 1), (1, 5, 1_500_000)):
        check_moved(*case)
    for dtype in (torch.float32, torch.bfloat16):
        check_spread(dtype, 4, 1500)
        check_spread(dtype, 2, 1)
    for momentum in (False, True):
        for layers, in_place in (
            (FEW, True),
            (LARGE, False),
            (MANY, True),
            (IN_PARTS, False),
            (NONE, True),
            (NONE[1:2], True),
        ):
            check_sgd(layers, momentum, in_place)
    for update in (AdamUpdate(), AdamUpdate(0.8, 0.99, 1e-3, decoupled=True)):
        check_adam(FEW, update, in_place=True)
        check_adam(LARGE, update, in_place=False)
    print("equal")


if __name__ == "__main__":
    main()
