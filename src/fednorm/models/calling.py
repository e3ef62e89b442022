"""Call a model factory with what its signature takes, and say in one line what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from fednorm.core.expression import Term
from fednorm.core.user_code import failed
from fednorm.errors import ConfigError, FednormError, unknown


def accepted_keywords(factory: Callable[..., Any]) -> list[str] | None:
    """The keywords a factory takes, in order, or None if it takes any.

    >>> accepted_keywords(lambda num_classes, *, width=8: None)
    ['num_classes', 'width']
    """
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in by_keyword]


def call_factory(
    name: str, factory: Callable[..., Any], sizes: Mapping[str, int], options: Mapping[str, Any]
) -> nn.Module:
    """Build a module: the factory gets those `sizes` that it asks for, and every one of the `options`."""
    try:
        accepted = accepted_keywords(factory)
    except ValueError:
        raise ConfigError(f"model '{name}' does not say what arguments it takes; wrap it in a function") from None
    keywords = {key: value for key, value in sizes.items() if accepted is None or key in accepted} | dict(options)
    refused = sorted(set(keywords) - set(accepted)) if accepted is not None else []
    if refused:
        own = [key for key in accepted or [] if key not in sizes]
        raise ConfigError(f"model '{name}' has no option '{refused[0]}'; its options: {', '.join(own) or 'none'}")
    signature = inspect.signature(factory)
    keywords = {key: _word(value, signature.parameters.get(key)) for key, value in keywords.items()}
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise ConfigError(f"model '{name}' cannot be built: {error}; give it as an option of the model") from None
    try:
        model = factory(**keywords)
    except FednormError:
        raise
    except Exception as error:
        raise failed(f"model '{name}' cannot be built", error) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model '{name}' must return a torch.nn.Module; it returned {type(model).__name__}")
    return model


def refuse_given(term: Term) -> None:
    """Refuse options of a model that are not its own: its name, its sizes and the seed come from elsewhere."""
    for option in term.options:
        if option in ("name", "num_classes", "in_channels", "image_size", "seed"):
            raise ConfigError(f"model '{term}': '{option}' follows from the data and the run; leave it out")


def check_choice(option: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a value of a model's option that is not among its choices."""
    choices = list(choices)
    if value not in choices:
        raise unknown(option, value, choices)


def check_positive(what: str, value: object) -> None:
    """Refuse a size that is not a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{what} must be a whole number of at least 1; got {value!r}")


def _word(value: object, parameter: inspect.Parameter | None) -> object:
    """The grammar reads `none` as nothing; where a parameter takes words and cannot be nothing, it is one of them."""
    if value is not None or parameter is None:
        return value
    untyped = parameter.annotation is inspect.Parameter.empty and isinstance(parameter.default, str)
    return "none" if untyped or parameter.annotation in (str, "str") else value
