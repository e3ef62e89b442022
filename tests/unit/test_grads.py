"""Transforms of gradients: what is clipped, by how much, and what is left alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fednorm.core.method import Facts, Method, Numbers, Rule
from fednorm.core.state import Tree
from fednorm.core.step import Carry
from fednorm.pieces.changes import add_transform, chain
from fednorm.pieces.grads import AdaptiveClip, ClipNorm, unit_norms

FACTS = Facts(entries={}, head=frozenset({"head"}))
SHAPES = {"conv": (3, 2, 2, 2), "linear": (3, 4), "bias": (3,), "scalar": (1,), "bare": (), "head": (2, 3)}


def trees(seed: int, scale: float) -> tuple[dict[str, Tensor], Carry]:
    """Gradients of some size, and the client they are of."""
    generator = torch.Generator().manual_seed(seed)
    grads = {key: scale * torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in SHAPES.items()}
    params = {key: torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in SHAPES.items()}
    params["bias"].zero_()
    return grads, Carry(params=params, state={}, optimizer={}, extras={}, anchor={})


def units(tensor: Tensor) -> Tensor:
    """Rows of a matrix or a filter bank; a vector or a number is one unit."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)


@given(st.integers(0, 10**6), st.floats(1e-6, 1e4), st.floats(1e-3, 10))
def test_i18_every_unit_is_under_its_bound_and_small_ones_are_untouched(seed: int, scale: float, clip: float) -> None:
    grads, carry = trees(seed, scale)
    clipped = AdaptiveClip()(grads, carry, {"agc.clip": clip}, FACTS)
    for key in grads.keys() - {"head"}:
        bound = clip * units(carry.params[key]).norm(dim=1).clamp(min=1e-3)
        before, after = units(grads[key]).norm(dim=1), units(clipped[key]).norm(dim=1)
        assert bool((after <= bound * (1 + 1e-6)).all())
        assert torch.equal(units(clipped[key])[before <= bound], units(grads[key])[before <= bound])
        direction = torch.cosine_similarity(units(clipped[key]), units(grads[key]))
        assert torch.allclose(direction, torch.ones_like(direction), atol=1e-9)


def test_the_last_layer_is_not_clipped() -> None:
    grads, carry = trees(0, 1e3)
    assert torch.equal(AdaptiveClip()(grads, carry, {"agc.clip": 0.1}, FACTS)["head"], grads["head"])
    everything = AdaptiveClip()(grads, carry, {"agc.clip": 0.1}, Facts({}, frozenset()))
    assert not torch.equal(everything["head"], grads["head"])


def test_a_bias_of_zero_is_clipped_to_a_ten_thousandth() -> None:
    grads, carry = trees(1, 1.0)
    assert float(AdaptiveClip()(grads, carry, {"agc.clip": 0.1}, FACTS)["bias"].norm()) == pytest.approx(1e-4)


def test_a_gradient_of_zero_stays_zero() -> None:
    grads, carry = trees(2, 0.0)
    for rule, numbers in ((AdaptiveClip(), {"agc.clip": 0.1}), (ClipNorm(), {"clip.norm": 1.0})):
        assert all(not bool(grad.any()) for grad in rule(grads, carry, numbers, FACTS).values())


def test_a_unit_is_an_output_row_and_not_a_column() -> None:
    assert unit_norms(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).tolist() == [[5.0], [2.0]]
    assert unit_norms(torch.tensor([3.0, 4.0])).tolist() == [5.0]
    assert unit_norms(torch.tensor(-2.0)).item() == 2.0
    assert unit_norms(torch.ones(2, 3, 1, 1)).shape == (2, 1, 1, 1)


@given(st.integers(0, 10**6), st.floats(1e-6, 1e4))
def test_clipping_the_whole_gradient_follows_torch(seed: int, scale: float) -> None:
    grads, carry = trees(seed, scale)
    theirs = [torch.zeros(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES.values()]
    for tensor, grad in zip(theirs, grads.values(), strict=True):
        tensor.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    ours = ClipNorm()(grads, carry, {"clip.norm": 1.0}, FACTS)
    for mine, tensor in zip(ours.values(), theirs, strict=True):
        assert tensor.grad is not None
        assert torch.allclose(mine, tensor.grad, rtol=1e-12, atol=0)


def test_transforms_are_done_in_the_order_of_the_parts() -> None:
    """Clipped to a norm of 1 and then doubled, not doubled and then clipped."""

    def doubled(grads: Tree, carry: Carry, numbers: Numbers, facts: Facts) -> Tree:
        return {key: 2 * value for key, value in grads.items()}

    clip = add_transform(ClipNorm(), **{"clip.norm": 1.0})
    both = chain(clip, add_transform(doubled))(Method()).phases[0].passes[0].rule
    other = chain(add_transform(doubled), clip)(Method()).phases[0].passes[0].rule
    assert (both.grads, other.grads) == ((ClipNorm(), doubled), (doubled, ClipNorm()))

    def after(rule: Rule) -> list[float]:
        grads = {"w": torch.tensor([3.0, 4.0])}
        for transform in rule.grads:
            grads = transform(grads, Carry({}, {}, {}, {}, {}), rule.numbers, FACTS)
        return grads["w"].tolist()

    assert after(both) == pytest.approx([1.2, 1.6], rel=1e-5)
    assert after(other) == pytest.approx([0.6, 0.8], rel=1e-5)
