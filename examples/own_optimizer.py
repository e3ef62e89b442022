"""An optimizer of your own: Lion (Chen et al. 2023), which moves by the sign of an average of gradients.

    python examples/own_optimizer.py

`update` maps one tensor, its gradient, its buffers and the numbers of the step (lr, momentum, weight_decay) to the new
tensor and the new buffers. It changes nothing in place and asks no `if` of a number, so every engine can map it over
clients. `--use examples/own_optimizer.py --optimizer lion` brings it to the command line.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

import fednorm


@fednorm.register_optimizer("lion")
def lion(beta1: float = 0.9, beta2: float = 0.99) -> fednorm.Optimizer:
    def update(
        value: Tensor, grad: Tensor, buffers: Mapping[str, Tensor], numbers: Mapping[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        average = buffers["average"]
        direction = (beta1 * average + (1 - beta1) * grad).sign() + numbers["weight_decay"] * value
        return value - numbers["lr"] * direction, {"average": beta2 * average + (1 - beta2) * grad}

    return fednorm.Optimizer(update, buffers=("average",))


def main() -> None:
    for method in ("fedavg", "fedavg+local-momentum"):  # the second keeps the averages on the clients
        result = fednorm.run(
            method=method,
            model="mlp_bn",
            optimizer="lion(beta2=0.95)",
            lr=0.001,
            warmup=2,
            rounds=8,
            local_steps=5,
            train_limit=500,
        )
        print(result)


if __name__ == "__main__":
    main()
