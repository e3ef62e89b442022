"""Models that live elsewhere: timm, torchvision, and the user's own `package.module:factory`."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fednorm.core.user_code import failed
from fednorm.errors import ConfigError, first_line, require, unknown
from fednorm.models.calling import call_factory

# A model's name may come from a file of somebody else's, and some options of these libraries read files or fetch them:
# only those that shape the network, or regularise it, are passed on.
_TIMM_OPTIONS = frozenset({
    "act_layer", "attn_drop_rate", "avg_down", "base_width", "cardinality", "class_token", "conv_stem", "depth",
    "depths", "drop_block_rate", "drop_path_rate", "drop_rate", "dynamic_img_size", "embed_dim", "fc_norm",
    "global_pool", "head_hidden_size", "head_init_scale", "img_size", "in_chans", "init_values", "layers",
    "ls_init_value", "mlp_ratio", "no_embed_class", "norm_layer", "num_classes", "num_features", "num_heads",
    "output_stride", "patch_size", "pos_drop_rate", "pos_embed", "pre_norm", "proj_drop_rate", "qk_norm", "qkv_bias",
    "reg_tokens", "replace_stem_pool", "stem_size", "stem_type", "stem_width", "strict_img_size", "swiglu_mlp",
    "width", "window_size", "zero_init_last",
})  # fmt: skip
_TORCHVISION_OPTIONS = frozenset({
    "attention_dropout", "aux_logits", "bn_size", "drop_rate", "dropout", "groups", "growth_rate", "image_size",
    "init_weights", "memory_efficient", "num_classes", "patch_size", "representation_size", "stochastic_depth_prob",
    "transform_input", "version", "width_mult", "width_per_group", "zero_init_residual",
})  # fmt: skip
OLDEST_TIMM = (1, 0, 26)
"""The first that reads checkpoints without running what is in them, should one ever get there."""


def build(name: str, sizes: Mapping[str, int], options: Mapping[str, Any]) -> nn.Module:
    """Build `SOURCE:NAME`, where the source is timm, torchvision or an importable module."""
    source, _, target = name.partition(":")
    if source == "timm":
        return _from_timm(name, target, sizes, options)
    if source == "torchvision":
        return _from_torchvision(name, target, sizes, options)
    with working_directory_importable():
        return call_factory(name, _find_factory(name, source, target), sizes, options)


def _from_timm(name: str, target: str, sizes: Mapping[str, int], options: Mapping[str, Any]) -> nn.Module:
    _refuse_others(name, options, _TIMM_OPTIONS)
    timm = _import_optional("timm", name)
    _refuse_old(name, str(timm.__version__))
    if not timm.is_model(target):
        raise _unknown_elsewhere("timm model", target, timm.list_models())
    keywords: dict[str, Any] = {"num_classes": sizes["num_classes"], "in_chans": sizes["in_channels"]}
    pretrained = timm.get_pretrained_cfg(target)
    if pretrained is not None and pretrained.fixed_input_size:
        keywords["img_size"] = sizes["image_size"]
    return _construct(name, timm.create_model, target, pretrained=False, **keywords | dict(options))


def _from_torchvision(name: str, target: str, sizes: Mapping[str, int], options: Mapping[str, Any]) -> nn.Module:
    _refuse_others(name, options, _TORCHVISION_OPTIONS)
    models = _import_optional("torchvision", name).models
    # Its segmentation and detection builders download backbone weights unasked, and do not return plain logits.
    known = models.list_models(module=models)
    if target not in known:
        raise _unknown_elsewhere("torchvision model", target, known)
    if sizes["in_channels"] != 3:
        raise ConfigError(
            f"model '{name}' takes images of 3 channels, not {sizes['in_channels']}; timm's models take any number"
        )
    keywords: dict[str, Any] = {"num_classes": sizes["num_classes"]}
    if models.get_model_builder(target).__module__ == models.vision_transformer.__name__:
        keywords["image_size"] = sizes["image_size"]
    return _construct(name, models.get_model, target, weights=None, **keywords | dict(options))


def _refuse_others(name: str, options: Mapping[str, Any], known: frozenset[str]) -> None:
    for option in options:
        if option not in known:
            raise ConfigError(
                f"model '{name}': option '{option}' is not passed on, since it could read files or fetch them; "
                f"known: {', '.join(sorted(known))}. For others write a factory, package.module:factory"
            )


def _refuse_old(name: str, version: str) -> None:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST_TIMM:
        oldest = ".".join(map(str, OLDEST_TIMM))
        raise ConfigError(
            f"model '{name}': timm {version} may run code out of a checkpoint, {oldest} does not; "
            f'pip install "timm>={oldest}"'
        )


def _unknown_elsewhere(what: str, target: str, names: list[str]) -> ConfigError:
    # Others know a thousand names; the message names the nearest few.
    return unknown(what, target, difflib.get_close_matches(target, names, n=5, cutoff=0.0))


def _construct(name: str, constructor: Callable[..., nn.Module], target: str, **keywords: Any) -> nn.Module:
    try:
        return constructor(target, **keywords)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"model '{name}' refuses its sizes or options: {first_line(error)}") from error


def _import_optional(module: str, name: str) -> ModuleType:
    require(module, "zoo", f"model '{name}'")
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        # torchvision's compiled operators load only beside the torch build they were made for.
        raise ConfigError(
            f"model '{name}': {module} is installed but does not load beside torch {torch.__version__} "
            f"({first_line(error)}); install the builds that belong together"
        ) from error


@contextlib.contextmanager
def working_directory_importable() -> Iterator[None]:
    """Let modules of the current folder be found, as `python -m` does, and only while a factory is at work."""
    here = os.getcwd()
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)


def _find_factory(name: str, source: str, target: str) -> Callable[..., Any]:
    if not all(part.isidentifier() for part in [*source.split("."), target]):
        raise ConfigError(f"model '{name}' is no reference to code; expected 'package.module:factory'")
    try:
        module = importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise ConfigError(f"model '{name}': module '{source}' needs '{error.name}'; install it") from error
        raise ConfigError(
            f"model '{name}': there is no module '{source}'; run in its folder or put that on PYTHONPATH"
        ) from None
    except (Exception, SystemExit) as error:  # a script without a guard may even end Python
        raise failed(f"model '{name}': module '{source}' cannot be imported", error) from error
    if not hasattr(module, target):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown(f"in module '{source}', factory", target, functions)
    factory = getattr(module, target)
    if not callable(factory):
        raise ConfigError(f"model '{name}' must be a function or class; it is {type(factory).__name__}")
    return factory
