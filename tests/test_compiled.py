"""What torch's compiler makes of a program: here by its compiler for C++, on a GPU by Triton."""

from __future__ import annotations

import io
import logging
import shutil

import pytest
import torch
from torch.nn import functional

from fednorm.core import rng
from fednorm.core.state import Tree
from fednorm.engines.stack.compiled import compiled, repays
from fednorm.engines.stack.fusion import fuse
from fednorm.engines.stack.in_place import write_in_place
from fednorm.engines.stack.program import Moves
from fednorm.engines.stack.tracing import trace

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler


def test_a_compiler_is_asked_where_many_calls_repay_it() -> None:
    traced = trace(lambda x: (x.sin() + x.cos()).exp().view(6).sum(), torch.randn(2, 3))
    assert not repays(traced, 1_000)
    assert repays(traced, 1_000_000)
    assert not repays(trace(lambda x: x.view(6)[2:], torch.randn(2, 3)), 1_000_000)


def test_a_compiler_that_fails_is_told_of_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> None:
        raise FileNotFoundError("no C compiler here")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fail)
    assert compiled(trace(torch.sin, torch.randn(2)), {}) is None
    assert capsys.readouterr().err == (
        "stacked engine: steps take longer than they could, torch's compiler failed (no C compiler here)\n"
    )


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler")


@needs_compiler
@pytest.mark.slow
def test_what_the_compiler_makes_of_a_program_is_the_same_function() -> None:
    state = {"w": torch.randn(2, 16), "x": torch.randn(2, 3, 4, 5, 5)}

    def step(state: Tree) -> Moves:
        y = torch.ops.fednorm.conv(state["x"].tanh(), state["w"].view(2, 4, 4, 1, 1), 1, [0, 0])
        return {"w": state["w"] - y.softmax(2).mean((1, 3, 4)).repeat(1, 4)}, {}

    call = compiled(trace(step, state), state)
    assert call is not None
    assert torch.allclose(call(state)[0]["w"], step(state)[0]["w"], atol=1e-6)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("reads", ["nothing", "old", "new"])
def test_updates_of_a_compiled_program_are_given_what_is_theirs(reads: str) -> None:
    """Two, of different types: their arguments are computed, given or constant, and one may read the other's values.

    They write over what they read: a copy of all weights a step took longer than the compiler saved.
    """
    draw = torch.Generator().manual_seed(0)
    narrow, x, dy = (torch.randn(2, *shape, generator=draw) for shape in ((12,), (3, 4), (3, 2)))
    wide, speed = (torch.randn(2, 6, generator=draw, dtype=torch.float64) for _ in range(2))
    old = {"narrow": narrow, "wide": wide, "speed": speed, "rates": torch.rand(3, 2, generator=draw), "x": x, "dy": dy}
    none, third = torch.zeros(2), torch.full((2,), 1 / 3)

    def step(state: Tree) -> Moves:
        lr, momentum, decay = state["rates"].unbind()
        grad, before = state["x"].sin().sum(1), state["narrow"][:, :6].exp()
        products = [state["x"].tanh()], [state["dy"] + 0]
        moved, _ = torch.ops.fednorm.sgd(state["narrow"], [grad, None], None, lr, none, third, *products)
        seen = {"nothing": state["wide"], "old": before, "new": moved[:, :6]}[reads].double().cos()
        rates = (rate.double() for rate in (lr, momentum, decay))
        value, velocity = torch.ops.fednorm.sgd(state["wide"], [seen], state["speed"], *rates, [], [])
        return {"narrow": moved, "wide": value, "speed": velocity, "rates": third, "x": state["x"], "dy": grad}, {}

    wanted, _ = step(old)
    traced = fuse(trace(step, old))
    written = write_in_place(traced, old)
    assert written == {"wide", "speed"} | ({"narrow"} if reads != "new" else set())
    call = compiled(traced, old)
    assert call is not None
    state = {key: value.clone() for key, value in old.items()}
    new, _ = call(state)
    assert {key for key, value in new.items() if value is state[key]} == {*written, "x"}
    for key, value in wanted.items():
        assert torch.allclose(new[key], value, atol=1e-6), key


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("axes", [2, 3])
def test_windows_that_hang_over_the_edge_are_not_left_to_the_compiler(axes: int) -> None:
    """Its gradient of an average pooling with `ceil_mode` divides the last windows by too much."""
    state = {"x": torch.randn(2, 3, *[8] * axes)}
    pool = functional.avg_pool2d if axes == 2 else functional.avg_pool3d

    def step(state: Tree) -> Moves:
        y, back = torch.func.vjp(lambda x: pool(x, 3, 2, ceil_mode=True), state["x"])
        return {"x": back(y.cos())[0]}, {}

    call = compiled(trace(step, state), state)
    assert call is not None
    assert torch.allclose(call(state)[0]["x"], step(state)[0]["x"], atol=1e-6)


@needs_compiler
@pytest.mark.slow
def test_keyed_draws_are_not_left_to_the_compiler() -> None:
    """They count, and multiply that beyond 64 bits on purpose; it takes the products for indices, which never do."""
    state = {"keys": rng.key(0, torch.arange(6)).view(2, 3), "at": torch.ones(1, dtype=torch.int64)}
    state["x"] = torch.randn(3, 5, 7)

    def step(state: Tree) -> Moves:
        key = state["keys"].index_select(0, state["at"])[0]
        return {"x": torch.where(rng.uniform(key, (5, 7)) >= 0.3, state["x"].softmax(2), 0)}, {}

    call = compiled(trace(step, state), state)
    assert call is not None
    assert torch.allclose(call(state)[0]["x"], step(state)[0]["x"], atol=1e-6)


@needs_compiler
@pytest.mark.slow
def test_the_compiler_is_told_of_our_operators() -> None:
    """One it finds by itself it notes with all that leads there, which took minutes for a deep network (torch 2.11)."""
    from torch._inductor.lowering import lowerings

    conv, noted = torch.ops.fednorm.conv.default, io.StringIO()
    lowerings.pop(conv, None)
    log, handler = logging.getLogger("torch._inductor.graph"), logging.StreamHandler(noted)
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    state = {"w": torch.randn(2, 16), "x": torch.randn(2, 3, 4, 5, 5)}

    def step(state: Tree) -> Moves:
        y = torch.ops.fednorm.conv(state["x"].tanh(), state["w"].view(2, 4, 4, 1, 1), 1, [0, 0])
        return {"w": state["w"] - y.mean((1, 3, 4)).repeat(1, 4)}, {}

    try:
        call = compiled(trace(step, state), state)
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
    assert call is not None
    assert conv in lowerings
    assert "fednorm" not in noted.getvalue()
