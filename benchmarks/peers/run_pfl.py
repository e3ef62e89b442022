"""pfl-research: one process a core, started by torchrun, of one thread each."""

from __future__ import annotations

import os
import sys

from workload import BATCH, CLIENTS, EXAMPLES, LR, Clock, arguments, images, network, tell

given = arguments()
if given.cores > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
    flags = [f"--nproc_per_node={given.cores}", "--standalone", os.path.abspath(__file__), *sys.argv[1:]]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *flags])  # noqa: S606

import numpy as np  # noqa: E402
import torch  # noqa: E402
from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.aggregate.weighting import WeightByUser  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.dataset import Dataset  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.hyperparam.base import NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402

torch.set_num_threads(1)


class Net(torch.nn.Module):
    """The network with the methods that pfl asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.train()
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict:  # type: ignore[type-arg]
        return {}


class Ticks(TrainingProcessCallback):
    """Notes the end of every round."""

    def __init__(self) -> None:
        self.clock = Clock()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
        self.clock.tick()
        return False, Metrics()


data = {client: images(EXAMPLES) for client in range(CLIENTS)}
turn = iter(np.resize(np.arange(CLIENTS), CLIENTS * given.rounds).tolist())
users = FederatedDataset(lambda client: Dataset(data[client], user_id=str(client)), lambda: next(turn))
net = Net()
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
ticks = Ticks()
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=given.rounds,
        evaluation_frequency=10 * given.rounds,
        train_cohort_size=CLIENTS,
        val_cohort_size=0,
    ),
    SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByUser()]),
    model,
    NNTrainHyperParams(
        local_num_epochs=None, local_num_steps=given.steps, local_learning_rate=LR, local_batch_size=BATCH
    ),
    callbacks=[ticks],
)
if int(os.environ.get("RANK", 0)) == 0:
    tell("pfl", "pfl", f"{given.cores} processes of one thread", ticks.clock)
