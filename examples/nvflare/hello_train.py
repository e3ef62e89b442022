"""A training script of NVFlare's Client API as a client of any method: what was changed has the old line beside it."""

import argparse

import nvflare.client as flare
import torch
from hello_net import Net, points
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fednorm.nvflare

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
epochs = parser.parse_args().epochs

flare.init()
data = TensorDataset(*points(flare.get_site_name(), 256))
loader = DataLoader(data, batch_size=32)
test = DataLoader(TensorDataset(*points(flare.get_site_name(), 128, seed=1)), batch_size=128)

client = fednorm.nvflare.join(Net(), loader, test_loader=test)
model = client.model  # was: model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss()

for job in client:  # was: while flare.is_running(): model.load_state_dict(flare.receive().params)
    with job.training(optimizer) as rules:  # was: model.train()
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                rules.loss(criterion(model(x), y)).backward()  # was: criterion(model(x), y).backward()
                optimizer.step()
    job.send()  # was: flare.send(flare.FLModel(params=model.state_dict()))
