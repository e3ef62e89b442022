"""What runs in a stack are sent: made for many rounds at once, it is what each round alone would have been sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
from fednorm.engines.stack.device_stack import DeviceStack
from fednorm.engines.stack.fusion import fuse
from fednorm.engines.stack.kernels.layers import use_kernels
from fednorm.engines.stack.messages import Assignment, Messages
from fednorm.engines.stack.phase_program import PhaseProgram
from fednorm.engines.stack.row_matrix import ALIGNMENT
from fednorm.engines.stack.tracing import trace
from fednorm.running.in_step import play_round
from fednorm.running.plan import Plan
from fednorm.running.run import Run
from fednorm.running.same_program import engine_maker
from fednorm.running.store import Store
from test_device_stack import stack_of
from test_stacked import gap


@pytest.fixture(autouse=True)
def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})


def plans(seeds: int, sizes: tuple[int, ...] = (8, 8, 8), **changes: Any) -> list[Plan]:
    wanted = {"data": tiny.federation(sizes), "train__local_steps": 1, "train__augment": "crop(1)+flip", **changes}
    return [tiny.plan("fedavg", seed=seed, engine__name="stacked", **wanted) for seed in range(seeds)]


def played(some: list[Plan]) -> tuple[list[Run], DeviceStack, PhaseProgram]:
    """Runs in one stack after their first round."""
    make = engine_maker(some)
    runs = [Run(plan, Store(), make=make) for plan in some]
    assert not play_round(runs)
    stack = stack_of(runs[0])
    (program,) = stack._programs.values()
    assert program.runs == len(some)
    return runs, stack, program


def tasks(runs: list[Run], first: int, **numbers: float) -> list[Assignment]:
    """What the open exchange of each run would have its clients do, from this batch on and with other numbers."""
    exchanges = [run.server.open() for run in runs]
    return [
        Assignment(replace(each, numbers={**each.numbers, **numbers}), each.phase, [first] * 3, [1] * 3)
        for each in exchanges
        if each
    ]


def test_messages_made_ahead_are_those_made_one_by_one() -> None:
    """Through the end of an epoch, a change of rates, and a stop for which batches come again."""
    runs, stack, program = played(plans(2))
    ahead = Messages()
    rates = [(0, 0.1), (1, 0.1), (2, 0.05), (3, 0.05), (3, 0.05), (7, 0.02), (300, 0.02), (301, 0.02)]
    for first, lr in rates:
        now = tasks(runs, first, lr=lr)
        found = ahead.next(program, stack._members, now)
        assert torch.equal(found, Messages().next(program, stack._members, now))
        assert found.shape == (program.message_size,)
        lrs = program.part(found.unsqueeze(0), "numbers").view(torch.float64).view(-1, program.rows)[0]
        assert lrs.tolist() == [lr] * 6


def test_messages_of_the_union_are_made_ahead_too() -> None:
    """One by one, those of three centralized runs took a GPU's host longer than all else of a round."""
    data = tiny.federation((8, 8, 8))
    changes = {"data": data, "train__local_steps": 1, "train__batch_size": 4, "train__augment": "crop(1)+flip"}
    some = [tiny.plan("centralized", seed=seed, engine__name="stacked", **changes) for seed in range(2)]
    runs, stack, program = played(some)
    now = [
        Assignment(exchange, exchange.phase, [first], [1])
        for first, run in enumerate(runs)
        if (exchange := run.server.open())
    ]
    ahead = Messages()
    found = ahead.next(program, stack._members, now)
    assert torch.equal(found, Messages().next(program, stack._members, now))
    assert len(ahead._flat) > 1
    later = [replace(task, firsts=[first + 1]) for first, task in enumerate(now)]
    found = ahead.next(program, stack._members, later)
    assert ahead._sent == 1
    assert torch.equal(found, Messages().next(program, stack._members, later))


def test_a_message_on_its_way_is_not_written_over() -> None:
    """Where batches are not used up, such as in a query, the next message may differ in its numbers alone."""
    runs, stack, program = played(plans(2))
    messages = Messages()
    first = messages.next(program, stack._members, tasks(runs, 0, lr=0.1))
    before = first.clone()
    second = messages.next(program, stack._members, tasks(runs, 0, lr=0.2))
    assert torch.equal(first, before)
    assert not torch.equal(second, before)


def test_where_others_use_batches_in_between_few_are_made_ahead() -> None:
    """As many exchanges as the last time were of use, and as many again."""
    runs, stack, program = played(plans(1))
    messages, lengths = Messages(), []
    for first in (0, 500, 1000, 1001, 1500, 1501, 1502, 1503):
        messages.next(program, stack._members, tasks(runs, first))
        lengths.append(len(messages._flat))
    assert lengths == [256, 2, 2, 2, 4, 4, 4, 4]


def test_only_batches_of_one_size_are_made_ahead() -> None:
    """Ten examples in batches of 4 are two full ones and one of 2; the rounds are the reference's."""
    sizes = (10, 10, 10)
    (plan,) = plans(1, sizes, rounds=7, train__lr=0.02)
    runs, stack, program = played([plan])
    messages = Messages()
    messages.next(program, stack._members, tasks(runs, 3))
    assert len(messages._flat) == 2
    list(runs[0].rounds())
    reference = tiny.play(
        tiny.plan(
            "fedavg",
            data=tiny.federation(sizes),
            engine__name="sequential",
            rounds=7,
            train__lr=0.02,
            train__local_steps=1,
            train__augment="crop(1)+flip",
        )
    )
    assert gap(reference, runs[0]) < 1e-10


def operators(count: int) -> tuple[Counter[str], set[tuple[int, torch.dtype]]]:
    """The stack's own operators in a round of some runs in bf16, and how the filters lie that convolutions read."""
    some = plans(count, train__dtype="float32")
    for plan in some:
        assert use_kernels(plan.prepared.model, torch.bfloat16)
    _, _, program = played(some)
    nodes = list(fuse(trace(program._round, program._state)).graph.nodes)
    own = [node for node in nodes if str(node.target).startswith("fednorm.")]
    filters = [node.args[1].meta["val"] for node in own if str(node.target).startswith("fednorm.conv_moments")]
    return Counter(str(node.target) for node in own), {(each.stride(0), each.dtype) for each in filters}


def test_runs_in_a_stack_read_weights_as_one_run_does() -> None:
    """Rounded once a step, and at addresses from which a kernel can read wide words."""
    alone, one = operators(1)
    together, several = operators(3)
    assert together == alone
    assert alone["fednorm.narrowed.default"] == 1
    ((stride, dtype),) = several
    assert dtype == torch.bfloat16
    assert stride > 0
    assert stride % ALIGNMENT == 0
    assert one == {(0, torch.bfloat16)}
