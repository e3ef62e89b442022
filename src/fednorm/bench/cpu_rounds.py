"""Rounds of a small network on the CPU: as people write them in plain PyTorch, and as our engines play them.

Convolution 3x3 (3 to 16) + BN + ReLU + pooling, convolution 3x3 (16 to 32) + BN + ReLU + pooling, linear (2048 to 10);
batches of 20 random 32x32 images, plain SGD.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fednorm.bench.timing import FOREVER
from fednorm.core.step import Batch, training_mode
from fednorm.data.federation import Federation
from fednorm.data.given import from_clients
from fednorm.engines.machine import threads
from fednorm.layers.pooling import gradients_as_images
from fednorm.running.config import RunConfig, updated
from fednorm.running.plan import Plan, make_plan
from fednorm.running.run import Run
from fednorm.running.store import Store

CLIENTS, BATCH, EXAMPLES, LR = 10, 20, 200, 0.02

Round = Callable[[], object]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2048, 10)),
    )


def federation() -> Federation:
    draw = torch.Generator().manual_seed(0)

    def examples() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(EXAMPLES, 3, 32, 32, generator=draw), torch.randint(0, 10, (EXAMPLES,), generator=draw)

    return from_clients([examples() for _ in range(CLIENTS)], examples(), num_classes=10)


def plain_round(data: Federation, steps: int, count: int) -> Round:
    """The loop everybody writes: load the state, train, add up, divide."""
    model = network().train()
    server = copy.deepcopy(model.state_dict())
    draw = torch.Generator().manual_seed(1)

    def play() -> None:
        nonlocal server
        total: dict[str, torch.Tensor] = {}
        for rows in data.clients:
            model.load_state_dict(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for _ in range(steps):
                batch = rows[torch.randperm(len(rows), generator=draw)[:BATCH]]
                optimizer.zero_grad()
                functional.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
                optimizer.step()
            for key, value in model.state_dict().items():
                total[key] = total[key] + value if key in total else value.clone()
        server = {key: (value / CLIENTS).to(server[key].dtype) for key, value in total.items()}

    return _with_threads(play, count)


def our_round(data: Federation, steps: int, count: int, engine: str) -> Round:
    """A whole round of a run: draw, train, check, merge, store."""
    run = Run(plan_of(data, steps, name=engine), Store()).rounds()
    return _with_threads(lambda: next(run), count)


def auto_round(data: Federation, steps: int) -> Round:
    """A round as users get it who choose nothing: the engine measured and chosen, on one thread."""
    with threads(1):
        return our_round(data, steps, 1, "auto")


def bare_round(data: Federation, steps: int) -> Round:
    """Our steps alone, one after the other on one thread, on batches whose rows were drawn before."""
    plan = plan_of(data, steps)
    phase = plan.phases[0]
    (only,) = phase.passes
    step = only.step(plan.step_spec(only))
    numbers = plan.numbers(phase.id, 1)

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    start = {key: laid_out(value) for key, value in phase.start(plan.initial(), {}, plan.device).items()}
    drawn = [[plan.batches.stream(client).batch(k) for k in range(steps)] for client in range(CLIENTS)]
    key = plan.batches.batch(0, 0)[2]

    def play() -> None:
        model = plan.prepared.model
        with training_mode(model, only.rule.hold), gradients_as_images(model):
            for batches in drawn:
                carry = only.carry(start)
                # Layers move statistics in place.
                carry = carry._replace(state={key: value.clone() for key, value in carry.state.items()})
                for rows in batches:
                    x, y = laid_out(data.x.index_select(0, rows)), data.y.index_select(0, rows)
                    carry, _ = step(carry, Batch(x, y, key), numbers)

    return _with_threads(play, 1)


def overhead_seconds(data: Federation, steps: int, pairs: int) -> list[float]:
    """What the framework adds to the bare steps of a round, by pairs of rounds played in turn.

    Both run on one thread, so the clock is the process's CPU time, which other programs hardly change.
    """
    bare, whole = bare_round(data, steps), our_round(data, steps, 1, "sequential")

    def cpu_seconds(play: Round) -> float:
        started = time.process_time()
        play()
        return time.process_time() - started

    for play in (bare, whole):
        play()
    differences = []
    for number in range(pairs):
        first, second = (bare, whole) if number % 2 else (whole, bare)
        times = {first: cpu_seconds(first), second: cpu_seconds(second)}
        differences.append(times[whole] - times[bare])
    return differences


def plan_of(data: Federation, steps: int, **engine: Any) -> Plan:
    """The run of this workload, without scoring and checkpoints."""
    settings = {"rounds": FOREVER, "train.local_steps": steps, "train.batch_size": BATCH, "train.lr": LR}
    settings |= {"train.momentum": 0.0, "eval.every": FOREVER, "engine.device": "cpu"}
    settings |= {"engine.checkpoint_every": FOREVER, **{f"engine.{key}": value for key, value in engine.items()}}
    return make_plan(updated(RunConfig(), settings), model=network(), federation=data)


def _with_threads(play: Round, count: int) -> Round:
    def round() -> None:
        with threads(count):
            play()

    return round
