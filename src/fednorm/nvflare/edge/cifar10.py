"""Ready devices for CIFAR-10: FedAvg and FedRevive with norms that stay on their device.

    EdgeRecipe(config=Cifar10FedRevive.config(devices=100, dir="data"), processor=Cifar10FedRevive, ...)

The setting is FedRevive's (arXiv 2511.00655, known from the authors' code): ResNet-18 for 32 pixels, 25 steps of Adam
on batches of 32, devices of 350 images whose classes are drawn from Dirichlet(0.5). Its own network has no norms,
`nonorm`; here BatchNorm stays, and is each device's own. FedRevive's server must see statistics to make images by them.
So devices report theirs; nobody averages them, and none comes down.
"""

from __future__ import annotations

from typing import Any, ClassVar

from fednorm.nvflare.edge.processor import NormTaskProcessor
from fednorm.running.config import RunConfig, updated

_PUBLISHED: dict[str, Any] = {
    "model": "resnet18",
    "data.name": "cifar10",
    "data.partition": "dir_client(alpha=0.5,size=350)",
    "data.train_limit": 37_500,
    "train.optimizer": "adam",
    "train.lr": 3e-4,
    "train.momentum": 0.0,
    "train.local_steps": 25,
    "train.batch_size": 32,
}


class Cifar10Processor(NormTaskProcessor):
    """A device with its part of CIFAR-10."""

    method: ClassVar[str] = "fedavg"

    @classmethod
    def config(cls, *, devices: int = 1000, dir: str | None = None, **fields: Any) -> RunConfig:
        """The run's config; `dir` has the data sets, other fields go by their dotted names: `**{"train.lr": 1e-3}`."""
        own = {"method": cls.method, "data.clients": devices, "data.dir": dir}
        return updated(RunConfig(), {**_PUBLISHED, **own, **fields})


class Cifar10FedAvg(Cifar10Processor):
    """Rounds of devices; their norms are their own."""

    method: ClassVar[str] = "fedbn"


class Cifar10FedRevive(Cifar10Processor):
    """Every update makes a version, and stale ones are revived by what the server distils from the last eight."""

    method: ClassVar[str] = "fedrevive(statistics=bn)+fedbn(report=true)"
