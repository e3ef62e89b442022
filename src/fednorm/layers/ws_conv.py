"""Weight-standardised convolutions, and the surgery that brings them in.

The raw weight stays the parameter and the state entry; only the forward pass sees the standardised one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from fednorm.core.surgery import SurgeryReport
from fednorm.errors import ConfigError, unknown
from fednorm.layers.rebuild import rebuild_conv, refuse_special_conv
from fednorm.layers.swapping import substitute
from fednorm.layers.tracing import behind_linear_outputs

Style = Literal["qiao", "scaled"]
RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))
"""Keeps the variance through a ReLU: 1 / std(relu(z)) for z ~ N(0, 1) (Brock et al. 2021, arXiv 2101.08692)."""

_SMALLEST_NORM = 1e-2  # Brock et al. bound the squared norm below by 1e-4: a depthwise filter of nine equal weights
_QIAO_EPS = 1e-5  # added to the standard deviation, as in the code of Qiao et al. 2019 (arXiv 1903.10520)


class Standard(NamedTuple):
    """What filters are standardised to: gain (w - mean) / (max(norm / divisor, floor) + offset), norm = |w - mean|."""

    gain: float
    divisor: float
    floor: float
    offset: float

    def __call__(self, weight: Tensor) -> Tensor:
        """Filters (out, ...), standardised."""
        dims = tuple(range(1, weight.dim()))
        centred = weight - weight.mean(dims, keepdim=True)
        # The norm, and not var().sqrt(), because its gradient at a constant filter is 0 and not NaN.
        norm = torch.linalg.vector_norm(centred, dim=dims, keepdim=True)
        return centred * (self.gain / ((norm / self.divisor).clamp_min(self.floor) + self.offset))


class WSConv2d(nn.Conv2d):
    """A convolution whose filters are standardised over their fan-in N before use.

    `qiao`:   gain * (w - mean) / (std + 1e-5), the unbiased std, gain 1 (Qiao et al. 2019; rho in FedWS).
    `scaled`: gain * (w - mean) / (std * sqrt(N)), the biased std, gain 1.7129 (Brock et al. 2021; FedWon): every
    filter has the norm `gain`, times a learned factor of its channel if `learnable_gain`.
    """

    channel_gain: Tensor | None

    def __init__(
        self, *args: object, style: Style = "scaled", gain: float | None = None, learnable_gain: bool = False, **kwargs
    ) -> None:
        super().__init__(*args, **kwargs)  # pyright: ignore[reportArgumentType]
        if style not in ("qiao", "scaled"):
            raise unknown("style of weight standardisation", style, ("qiao", "scaled"))
        self.style = style
        self.gain = gain if gain is not None else (RELU_GAIN if style == "scaled" else 1.0)
        learned = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1)) if learnable_gain else None
        self.register_parameter("channel_gain", learned)

    def standardised_weight(self) -> Tensor:
        standard = self.standardised(self.weight)
        return standard if self.channel_gain is None else standard * self.channel_gain

    def standardised(self, weight: Tensor) -> Tensor:
        """Filters with mean zero and the norm or deviation of the style."""
        return self.numbers(weight)

    @property
    def numbers(self) -> Standard:
        """The style in numbers."""
        if self.style == "qiao":
            return Standard(self.gain, math.sqrt(self.weight[0].numel() - 1), 0.0, _QIAO_EPS)
        return Standard(self.gain, 1.0, _SMALLEST_NORM, 0.0)

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.standardised_weight(), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, style={self.style}, gain={self.gain:.4g}"


@dataclass(frozen=True)
class StandardiseWeights:
    """Every Conv2d becomes a WSConv2d on the same weight and bias; Linear layers stay.

    A filter with a single weight (depthwise 1x1) would become zero, so such layers are left alone. `linear_gain` is the
    gain of convolutions that see an output without an activation, whose variance no ReLU has made smaller.
    """

    style: Style = "qiao"
    gain: float | None = None
    learnable_gain: bool = False
    linear_gain: float | None = None

    def __post_init__(self) -> None:
        if self.style not in ("qiao", "scaled"):
            raise unknown("style of weight standardisation", self.style, ("qiao", "scaled"))

    def __call__(self, model: nn.Module) -> tuple[nn.Module, SurgeryReport]:
        linear = self._behind_linear(model)

        def make(name: str, module: nn.Module) -> nn.Module:
            return self._make(name, module, self.linear_gain if module in linear else self.gain)

        model, pairs = substitute(model, _standardisable, make)
        left = sum(type(module) is nn.Conv2d for module in model.modules())
        notes = [f"{len(pairs)} convolutions use standardised weights ({self.style})"] if pairs else []
        if linear:
            notes.append(
                f"{len(linear)} of them see an output without an activation and have the gain {self.linear_gain}"
            )
        if left:
            notes.append(f"{left} convolutions with one weight a filter left as they are")
        return model, SurgeryReport(len(pairs), tuple(notes), "convolution")

    def _behind_linear(self, model: nn.Module) -> set[nn.Module]:
        if self.linear_gain is None:
            return set()
        try:
            return {module for module in behind_linear_outputs(model) if _standardisable(module)}
        except Exception as reason:  # tracing runs the model's own code, which may raise anything
            raise ConfigError(
                f"linear_gain={self.linear_gain} needs to know which layers have an activation, but the model cannot "
                f"be traced ({type(reason).__name__}); leave it out"
            ) from reason

    def _make(self, name: str, module: nn.Module, gain: float | None) -> nn.Module:
        conv = cast(nn.Conv2d, module)
        refuse_special_conv(name, conv)
        new = rebuild_conv(WSConv2d, conv, style=self.style, gain=gain)
        if self.learnable_gain:
            new.channel_gain = nn.Parameter(conv.weight.new_ones(conv.out_channels, 1, 1, 1))
        return new


def _standardisable(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and not isinstance(module, WSConv2d) and module.weight[0].numel() > 1
