"""fluke: one client after the other in one process, torch with a thread a core."""

from __future__ import annotations

import contextlib
import io

import torch
from workload import BATCH, CLIENTS, LR, Clock, arguments, images, network, tell

# torchvision's wheel from PyPI does not find its operators beside a CPU build of torch; fluke imports but does not
# use it here, so their names are enough.
library = torch.library.Library("torchvision", "FRAGMENT")
for operator in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader  # noqa: E402
from fluke.utils import FederationObserver, ServerObserver  # noqa: E402

given = arguments()
torch.set_num_threads(given.cores)


class Ticks(ServerObserver, FederationObserver):
    """Notes the end of every round."""

    def __init__(self) -> None:
        self.clock = Clock()

    def end_round(self, round: int, **facts: object) -> None:
        self.clock.tick()


def loader(steps: int) -> FastDataLoader:
    """So much data that one epoch is the wanted number of steps."""
    return FastDataLoader(*images(steps * BATCH), num_labels=10, batch_size=BATCH, shuffle=True)


environment = FlukeENV()
environment.set_seed(0)
environment.set_eval_cfg(pre_fit=False, post_fit=False, server=False, locals=False)
data = DummyDataContainer([loader(given.steps) for _ in range(CLIENTS)], [None] * CLIENTS, None, 10)
settings = DDict(
    client=DDict(
        batch_size=BATCH,
        local_epochs=1,
        loss="CrossEntropyLoss",
        optimizer=DDict(name="SGD", lr=LR),
        scheduler=DDict(name="StepLR", gamma=1, step_size=1),
    ),
    server=DDict(weighted=True),
    model=network(),
)
ticks = Ticks()
with contextlib.redirect_stdout(io.StringIO()):  # its live display
    algorithm = FedAVG(CLIENTS, DataSplitter(data, distribution="iid"), settings)
    algorithm.set_callbacks([ticks])
    ticks.clock.moments.clear()
    ticks.clock.tick()
    algorithm.run(given.rounds, 1.0)
tell("fluke", "fluke-fl", f"1 process, {given.cores} threads", ticks.clock)
