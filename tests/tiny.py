"""Tiny models, federations and runs in float64, so that claims of exactness can be tested in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fednorm.core.method import Method
from fednorm.core.state import digest
from fednorm.data.federation import Federation
from fednorm.data.given import from_clients
from fednorm.models.blocks import BasicBlock, conv
from fednorm.models.resnet import ResNet
from fednorm.running.config import RunConfig, updated
from fednorm.running.plan import Plan, make_plan
from fednorm.running.records import RoundRow, read_row
from fednorm.running.run import Run
from fednorm.running.store import Store

NUM_CLASSES = 3
_BASE = {
    "rounds": 4,
    "train.local_steps": 2,
    "train.batch_size": 4,
    "train.lr": 0.1,
    "train.momentum": 0.9,
    "train.weight_decay": 0.01,
    "train.dtype": "float64",
    "eval.every": 2,
    "engine.device": "cpu",
}


def residual_net(seed: int = 0, widths: tuple[int, ...] = (4,)) -> nn.Module:
    """A residual block for each width; one that changes the width has a batch norm in its shortcut."""
    torch.manual_seed(seed)
    depths = (1,) * len(widths)
    net = ResNet(BasicBlock, NUM_CLASSES, stem=conv(1, 4, 3), maxpool=False, widths=widths, depths=depths)
    return randomise_norms(net.double())


def conv_net(norm: nn.Module | None = None, seed: int = 0) -> nn.Module:
    """One convolution, one norm (BatchNorm by default), one linear layer."""
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        norm or nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, NUM_CLASSES),
    )
    return randomise_norms(layers.double())


class Choosy(nn.Module):
    """A network that no stack can train: its control flow depends on its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = conv_net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x if float(x.sum()) > 0 else -x)


def randomise_norms(net: nn.Module) -> nn.Module:
    """Affine values away from 1 and 0, so that a mistake about them shows."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    return net


def examples(count: int, shift: float, seed: int) -> tuple[Tensor, Tensor]:
    """Random images around `shift` with labels that lean to one class."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64) * (1 + abs(shift)) + shift
    y = torch.randint(0, NUM_CLASSES, (count,), generator=generator)
    return x, torch.where(torch.arange(count) % 2 == 0, seed % NUM_CLASSES, y)


def federation(sizes: Sequence[int] = (8, 12, 9)) -> Federation:
    """Clients of unequal size whose features and labels differ."""
    train = [examples(size, shift=client - 1.0, seed=client + 1) for client, size in enumerate(sizes)]
    test = [examples(6, shift=client - 1.0, seed=client + 101) for client in range(len(sizes))]
    return from_clients(train, test, num_classes=NUM_CLASSES)


def relabelled(data: Federation, order: Sequence[int]) -> Federation:
    """The same federation whose pool of examples lies in another order, clients keeping their ids and their data."""
    rows = torch.cat([data.clients[client] for client in order])
    place = torch.empty_like(rows)
    place[rows] = torch.arange(len(rows))
    return replace(data, x=data.x[rows], y=data.y[rows], clients=tuple(place[own] for own in data.clients))


def config(method: str = "fedavg", **changes: Any) -> RunConfig:
    """A small config; `train__lr=1.0` sets `train.lr`."""
    chosen = {name.replace("__", "."): value for name, value in changes.items()}
    return updated(RunConfig(), {**_BASE, "method": method, **chosen})


def engine(name: str) -> dict[str, Any]:
    """Settings of an engine, with two processes where it has any."""
    return {"engine__name": name} | ({"engine__workers": 2} if name == "workers" else {})


def plan(
    method: str | Method = "fedavg", *, model: nn.Module | None = None, data: Federation | None = None, **changes: Any
) -> Plan:
    """A plan on a tiny model and federation."""
    return make_plan(
        config("fedavg" if isinstance(method, Method) else method, **changes),
        model=model or residual_net(),
        federation=data or federation(),
        method=method if isinstance(method, Method) else None,
    )


def play(made: Plan, store: Store | None = None, rounds: int | None = None) -> Run:
    """The run after all its rounds, or after the next few, which are committed, so that another run can go on."""
    run = Run(made, store or Store())
    for played, _ in enumerate(run.rounds(), 1):
        if played == rounds:
            break
    run.stop()
    return run


def fingerprint(run: Run) -> dict[str, Any]:
    """Everything that two equal runs share: state of server and clients, memory, and rows without times."""
    run.stop()
    clients = {client: run.store.get(client) for client in run.store.seen()}
    return {
        "server": digest(run.server.tree),
        "memory": digest(run.server.held.memory),
        "clients": {client: (state.steps, digest(state.tree)) for client, state in clients.items()},
        "switch": run.server.switch_memory,
        "rows": [{key: value for key, value in row.items() if key != "seconds"} for row in run.store.rows()],
    }


ACCURACY = {"name": "accuracy", "higher_is_better": True, "percent": True}
"""What rows that were scored say of the headline number."""


def row(number: int, clients: int = 3) -> RoundRow:
    """The row of a round in which nothing was sent."""
    sent = dict.fromkeys(("exchanges", "bytes_up", "bytes_down"), 0)
    return read_row({"round": number, "stage": 0, "clients": clients, **sent})


def union_batch(made: Plan, k: int) -> tuple[Tensor, Tensor]:
    """The k-th batches of all clients, joined in client order."""
    parts = [made.batches.batch(client, k) for client in made.federation.training_clients]
    return torch.cat([x for x, _, _ in parts]), torch.cat([y for _, y, _ in parts])
