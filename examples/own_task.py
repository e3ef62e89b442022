"""A task of your own: forecasts that are rather too high than too low, and what a forecast costs by client.

    python examples/own_task.py

`Task(loss, metrics)` is all there is to it. The loss is the mean over a batch; a metric has one value for each example.
Registered under a name it has options, and `fednorm run --use examples/own_task.py --task "quantile(q=0.9)"` knows it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fednorm


@fednorm.register_task("quantile")
def quantile(q: float = 0.5) -> fednorm.Task:
    def cost(output: Tensor, y: Tensor) -> Tensor:
        error = y - output[:, 0]
        return torch.maximum(q * error, (q - 1) * error)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return cost(output, y).mean()

    def below(output: Tensor, y: Tensor) -> Tensor:
        return 100.0 * (y <= output[:, 0])

    metrics = {"cost": cost, "below": below}
    return fednorm.Task(loss, metrics, higher_is_better=False, kind="regression")


def examples(shift: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 6, generator=generator) + shift
    return x, x[:, 0] - x[:, 1] + 0.5 * torch.randn(200, generator=generator)


def main() -> None:
    shifts = (0.0, 1.0, -2.0)
    clients = [examples(shift, seed) for seed, shift in enumerate(shifts)]
    tests = [examples(shift, seed + 100) for seed, shift in enumerate(shifts)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    result = fednorm.run(
        model=model, clients=clients, test=tests, task="quantile(q=0.9)", method="fedbn", rounds=30, lr=0.1
    )
    own = result.runs[0]["final"]["own_client"]
    print(result)
    print(f"{result.metric} of each client: {own['per_client']}")
    print(f"percent of targets below the forecast: {own['per_client_metrics']['below']}")


if __name__ == "__main__":
    main()
