"""Static BatchNorm of HeteroFL: batch statistics in training, statistics for testing from one query at the end."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from fednorm.errors import ConfigError
from fednorm.layers.batch_stats import RunningNorm, moments, unbiased
from fednorm.layers.swapping import SwapByClass


def _is_zero(counter: Tensor) -> bool:
    try:
        return int(counter) == 0
    except RuntimeError:  # under torch.vmap a value cannot decide what happens; the caller evaluates at its own risk
        return False


class StaticBN(RunningNorm):
    """BatchNorm that keeps no running statistics in training (Diao et al. 2021, arXiv 2010.01264).

    A query fills them before evaluation: either it writes `running_mean`, `running_var` and `num_batches_tracked`, or
    it sets `query`, and training-mode passes average the batches. Evaluation before that is refused, because torch
    would silently use the statistics of the test batch.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = None, affine: bool = True
    ) -> None:
        super().__init__(num_features, eps=eps, momentum=None, affine=affine)
        self.query = False

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if self.training:
            if self.query:
                mean, var = moments(input)
                self.track(mean, unbiased(var, input.numel() // self.num_features))
            return functional.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)
        if _is_zero(self.num_batches_tracked):
            raise ConfigError(
                "static BatchNorm has no statistics to evaluate with; run the query that fills them after training"
            )
        return self.use_running(input)


@dataclass(frozen=True)
class ToStaticBN(SwapByClass):
    """BatchNorm becomes StaticBN; statistics the old layers hold are forgotten."""

    layer = StaticBN
    keep_statistics = False
