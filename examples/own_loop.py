"""FedBN in a training loop of your own: no framework, plain torch, one call for each thing the method decides."""

import torch
from torch import nn

from fednorm.halves.loop import load, local_rules, merge, split, update

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
inputs = [torch.randn(32, 4) * scale for scale in (1.0, 3.0, 0.3)]  # three clients whose features differ
clients = [(x, (x[:, 0] > x[:, 1]).long()) for x in inputs]
method, rounds = "fedbn", 60

server, mine = split(model, method)
kept = [mine for _ in clients]
for r in range(1, rounds + 1):
    updates = []
    for c, (x, y) in enumerate(clients):
        load(model, server, kept[c])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with local_rules(model, method, round=r, rounds=rounds) as rules:
            optimizer.zero_grad()
            rules.loss(nn.functional.cross_entropy(model(x), y)).backward()
            rules.step(optimizer)
        shared, kept[c] = split(model, method, round=r, rounds=rounds)
        updates.append(update(c, len(y), shared))
    server = merge(updates, model, method, server=server, round=r, rounds=rounds)

for c, (x, y) in enumerate(clients):
    load(model, server, kept[c])
    print(f"client {c}: {(model.eval()(x).argmax(1) == y).double().mean():.0%} right with its own batch norm")
