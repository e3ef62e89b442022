"""Counts of the labels a client trained on, as a part of its model's state: so they go where state goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fednorm.core.state import Kind, entries, register_tracker
from fednorm.core.surgery import SurgeryReport
from fednorm.errors import ConfigError

_NAME = "label_counts"


class LabelCounts(nn.Module):
    """Holds a number for each class; the identity, since it comes last where a model is a sequence."""

    counts: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return x


register_tracker(LabelCounts, counts="extra")


def counts_key(model: nn.Module) -> str | None:
    """The key of a model's counts of labels, where it has some."""
    names = (name for name, module in model.named_modules() if isinstance(module, LabelCounts))
    return next((f"{name}.counts" for name in names), None)


@dataclass(frozen=True)
class AddLabelCounts:
    """Put counts beside a classifier, as many as its last linear layer has outputs."""

    def __call__(self, model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        own = [entry.key for entry in entries(model) if entry.kind is Kind.EXTRA]
        if own:
            raise ConfigError(
                f"'label-counts' would report the model's own buffer '{own[0]}' too, where it is to be averaged; "
                "use FedRevive's probed proportions with this model"
            )
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        if not linears:
            return model, SurgeryReport(0, (), "linear layer")
        counts = LabelCounts(linears[-1].out_features).to(linears[-1].weight.device, linears[-1].weight.dtype)
        model.add_module(_NAME, counts)
        return model, SurgeryReport(1, (f"labels of {len(counts.counts)} classes are counted",))
