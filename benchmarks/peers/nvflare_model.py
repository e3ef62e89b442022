"""The model of `nvflare_rounds.py` as a class without arguments, which is how NVFlare makes models."""

from __future__ import annotations

from nvflare_rounds import settled
from torch import nn


class Net(nn.Module):
    """The plan's model under its own names of entries."""

    def __init__(self) -> None:
        super().__init__()
        for name, child in settled(1)[1].named_children():
            self.add_module(name, child)
