"""A script of the Client API whose loop is a few lines, and runs of it by hand: one run of the script a task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import by_hand
import torch
from torch import Tensor, nn

from fednorm.halves.founding import found
from fednorm.halves.messages import LocalWork, Scores, Update, Welcome
from fednorm.halves.server import Server
from fednorm.nvflare.script import Client, join
from fednorm.nvflare.script_job import Job

SITES = ("site-1", "site-2")
DATA = {
    site: (torch.randn(size, 4, generator=torch.Generator().manual_seed(size)), torch.arange(size) % 3)
    for site, size in zip(SITES, (10, 14), strict=True)
}
LR = 0.1


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def one_step(client: Client, job: Job, site: str) -> None:
    """What a user's loop does: one step on all examples."""
    optimizer = torch.optim.SGD(client.model.parameters(), lr=LR)
    with job.training(optimizer) as rules:
        optimizer.zero_grad()
        rules.loss(loss_of(client.model, DATA[site])).backward()
        optimizer.step()
    job.send()


Loop = Callable[[Client, Job, str], None]


def script(site: str, folder: Path, loop: Loop = one_step, **options: Any) -> by_hand.Script:
    def run() -> None:
        client = join(net(), [DATA[site]], state_dir=str(folder), **options)
        for job in client:
            loop(client, job, site)

    return run


def begun(folder: Path, method: str, rounds: int = 3, **options: Any) -> tuple[Server, dict[str, Welcome]]:
    hellos = [by_hand.hello(script(site, folder), site) for site in SITES]
    return found(hellos, net(), method, LocalWork(rounds=rounds, lr=LR), run="r", norm_factor=None, **options)


def play(folder: Path, method: str, loop: Loop = one_step, **options: Any) -> tuple[Server, dict[str, Welcome]]:
    server, welcomes = begun(folder, method, **options)
    while not server.finished:
        for client, request in server.requests().items():
            site = SITES[client]
            answer = by_hand.answer(script(site, folder, loop), site, welcomes[site], request)
            assert isinstance(answer, Update | Scores), answer
            server.take(answer)
        server.close()
    return server, welcomes
