"""Settings of embeddings that do not go with states passed from hand to hand."""

from __future__ import annotations

from torch import nn

from fednorm.errors import ConfigError


def refuse_special_embeddings(model: nn.Module) -> None:
    """Refuse gradients that are no plain tensors, and weights that a forward pass changes in place, tests included."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        odd = "sparse=True" if module.sparse else f"max_norm={module.max_norm}" if module.max_norm is not None else ""
        if odd:
            why = (
                "whose gradients cannot be merged" if module.sparse else "which changes its weights as it looks them up"
            )
            raise ConfigError(
                f"layer '{name or '(root)'}' ({type(module).__name__}) has {odd}, {why}; build it without"
            )
