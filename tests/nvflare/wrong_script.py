"""A script that does all that it should, and then sends everything it has."""

from __future__ import annotations

from dataclasses import replace

import nvflare.client as flare
import torch
from simulated import Net, own_data
from torch import nn

from fednorm.core.state import model_state
from fednorm.nvflare import join

flare.init()
(x, y), _ = own_data(flare.get_site_name())
client = join(Net(2), [(x, y)])
model = client.model
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for job in client:
    with job.training(optimizer) as rules:
        optimizer.zero_grad()
        rules.loss(nn.functional.cross_entropy(model(x), y)).backward()
        optimizer.step()
    right = job.answer
    # Beside what is shared, all that the site keeps.
    job.answer = lambda request, update, mine, right=right: right(
        request, replace(update, shared=model_state(model)), mine
    )
    job.send()
