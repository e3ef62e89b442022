"""What a site of plain NVFlare does in `nvflare_rounds.py`: receive, train, send; the first notes when models come."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import nvflare.client as flare
import torch
from nvflare_rounds import settled

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int)
parser.add_argument("--moments", type=Path)
given = parser.parse_args()
flare.init()
plan, model = settled(given.rounds)
work, site = plan.work, int(flare.get_site_name().rpartition("-")[2]) - 1
taken = 0
while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    if site == 0:
        with given.moments.open("a") as file:
            file.write(f"{time.time()}\n")
    model.load_state_dict({key: torch.as_tensor(value) for key, value in received.params.items()})
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr, momentum=work.momentum)
    for _ in range(work.amount):
        x, y, _ = plan.batches.batch(site, taken)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        taken += 1
    flare.send(flare.FLModel(params=model.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": work.amount}))
