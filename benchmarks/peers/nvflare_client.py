"""What a site of `run_nvflare.py` does: receive, train, send; the first site writes down when models came."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import nvflare.client as flare
import torch
from workload import BATCH, EXAMPLES, LR, images, network

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--moments", type=Path)
given = parser.parse_args()
torch.set_num_threads(1)
flare.init()
model, (x, y) = network().train(), images(EXAMPLES)
while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    if flare.get_site_name() == "site-1":
        with given.moments.open("a") as file:
            file.write(f"{time.time()}\n")
    model.load_state_dict({key: torch.as_tensor(value) for key, value in received.params.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(given.steps):
        batch = torch.randperm(EXAMPLES)[:BATCH]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    flare.send(flare.FLModel(params=model.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": given.steps}))
