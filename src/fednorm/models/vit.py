"""A small vision transformer with LayerNorm, for the runs that ask what a method does without BatchNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fednorm.errors import ConfigError
from fednorm.models.calling import check_positive
from fednorm.models.registry import register_model


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        each = width // self.heads
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, each).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.reshape(3, batch * self.heads, tokens, each).unbind(0)
        # Plain products: vmap runs torch's fused kernels one client at a time. Up to torch 2.13 one axis for batch and
        # heads was enough to keep them away.
        with sdpa_kernel(SDPBackend.MATH):
            mixed = F.scaled_dot_product_attention(query, key, value).reshape(batch, self.heads, tokens, each)
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class EncoderBlock(nn.Module):
    """Attention, then a two-layer perceptron, each on the normed input and added to it (pre-norm)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Patches, learned positions, encoder blocks, the mean over the tokens, a linear layer."""

    def __init__(
        self, num_classes: int, in_channels: int, patches: int, *, patch: int, width: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(in_channels, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.empty(1, patches, width))
        self.blocks = nn.Sequential(*[EncoderBlock(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(tokens + self.positions)).mean(1))


@register_model(
    "vit_tiny",
    summary="a small vision transformer with LayerNorm; options patch, width, depth, heads",
    paper="after Dosovitskiy et al. 2021, An Image is Worth 16x16 Words (arXiv 2010.11929); sizes are this project's",
)
def vit_tiny(
    num_classes: int,
    in_channels: int,
    image_size: int,
    patch: int = 4,
    width: int = 96,
    depth: int = 4,
    heads: int = 3,
) -> nn.Module:
    for what, value in {"patch": patch, "width": width, "depth": depth, "heads": heads}.items():
        check_positive(what, value)
    if image_size % patch:
        raise ConfigError(f"model 'vit_tiny': image size {image_size} is no multiple of patch {patch}; set patch")
    if width % heads:
        raise ConfigError(f"model 'vit_tiny': width {width} is no multiple of heads {heads}; set width or heads")
    patches = (image_size // patch) ** 2
    return VisionTransformer(num_classes, in_channels, patches, patch=patch, width=width, depth=depth, heads=heads)
