"""The workload's network as a class without arguments, which is how NVFlare makes models."""

from __future__ import annotations

from torch import nn
from workload import network


class Net(nn.Sequential):
    """The layers of `workload.network`, under the same names."""

    def __init__(self) -> None:
        super().__init__(*network())
