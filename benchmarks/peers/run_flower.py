"""Flower's simulation: one Ray actor a core, of one thread each."""

from __future__ import annotations

import logging
import os

from workload import BATCH, CLIENTS, EXAMPLES, LR, Clock, arguments, images, network, tell

given = arguments()
os.environ |= {"RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"}

import torch  # noqa: E402
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp import ServerApp  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402

logging.getLogger("flwr").setLevel(logging.ERROR)
client_app, server_app, clock = ClientApp(), ServerApp(), Clock()
data = images(EXAMPLES)
steps = given.steps


@client_app.train()
def train(message, context):  # type: ignore[no-untyped-def]
    torch.set_num_threads(1)
    model = network().train()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    x, y = data
    for _ in range(steps):
        batch = torch.randperm(EXAMPLES)[:BATCH]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    told = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": EXAMPLES})}
    return Message(content=RecordDict(told), reply_to=message)


class Timed(FedAvg):
    """FedAvg that notes when a round's updates are merged."""

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        merged = super().aggregate_train(server_round, replies)
        clock.tick()
        return merged


@server_app.main()
def main(grid, context):  # type: ignore[no-untyped-def]
    strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    clock.moments.clear()
    clock.tick()
    strategy.start(grid=grid, initial_arrays=ArrayRecord(network().state_dict()), num_rounds=given.rounds)


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": given.cores}}
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=resources)
    tell("flower", "flwr", f"{given.cores} actors of one thread", clock)
