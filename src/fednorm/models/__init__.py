"""Models by name: the papers' architectures in plain torch, and doors to other libraries and to your own code."""

# The modules enter their models into the registry when imported; the order here is the order of the listing.
from fednorm.models import resnet, mobilenet, cnn, deeplab, mlp, vit, text  # noqa: F401, I001
from fednorm.models.blocks import ResidualBlock
from fednorm.models.registry import MODELS, ModelInfo, build, list_models, register_model

__all__ = ["MODELS", "ModelInfo", "ResidualBlock", "build", "list_models", "register_model"]
