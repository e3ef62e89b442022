"""Methods by name: `register` adds one, `parse` reads an expression such as `fixbn(at=0.5)+local-momentum`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

from fednorm.core.claims import MERGE_STATISTICS, MERGE_TRAINED, PROXIMAL_TERM, WEIGHTS
from fednorm.core.expression import Term, parse_terms
from fednorm.core.extending import Published, check_name, load_installed, summary_of
from fednorm.core.method import Method, Part
from fednorm.core.numbers import refuse_numbers
from fednorm.core.phases import Purpose
from fednorm.core.state import Kind, Policy
from fednorm.core.user_code import UserCode
from fednorm.errors import ConfigError, unknown

Factory = Callable[..., Part]


@dataclass(frozen=True)
class MethodInfo(Published[Part]):
    """What the registry knows about a method's name."""

    @property
    def needs(self) -> frozenset[str]:
        return parse(self.name).needs


_REGISTRY: dict[str, MethodInfo] = {}


def register(
    name: str, *, paper: str = "", summary: str = "", reconstruction: bool = False
) -> Callable[[Factory], Factory]:
    """Make a function that returns a `Part` available under a name; its keyword arguments are the options.

    Without a summary the first line of its docstring is one.
    """

    def add(make: Factory) -> Factory:
        known = _REGISTRY.get(name)
        check_name("method", name, make, known.make if known else None)
        _REGISTRY[name] = MethodInfo(name, paper, summary_of(make, summary), make, reconstruction)
        return make

    return add


def known_methods() -> Mapping[str, MethodInfo]:
    """All methods registered so far, by name; `fednorm.methods` has the same function with the built-in ones."""
    load_installed()
    return dict(sorted(_REGISTRY.items()))


_PLAIN = Method()
_MODEL = "the model"  # none is there yet
_EXAMPLE = "fixbn(at=0.5)+local-momentum"


def parse(expression: str | Method) -> Method:
    """The method an expression describes: parts joined by `+`, each with optional arguments.

    Take it from `fednorm.methods`, whose import registers the built-in methods.

    >>> from fednorm.methods import parse
    >>> parse("fedprox(mu=0.1)+gn").name
    'fedprox(mu=0.1)+gn'
    """
    return expression if isinstance(expression, Method) else extended(_PLAIN, expression)


def extended(method: Method, expression: str) -> Method:
    """A method with further parts, as if its name had ended with them."""
    known = _REGISTRY
    labels = [] if method is _PLAIN else [method.name]
    claimed = {claim: part.label for part in method.parts for claim in part.claims}
    for term in parse_terms(expression, "method", _EXAMPLE):
        if term.name not in known and term.name not in known_methods():
            raise unknown("method", term.name, known, "fednorm methods")
        part = _made(term, known[term.name].make)
        for claim in sorted(part.claims):
            if claim in claimed:
                raise ConfigError(
                    f"'{claimed[claim]}' and '{part.label}' cannot be combined: "
                    f"both decide {_in_words(claim)}; keep one"
                )
            claimed[claim] = part.label
        labels.append(part.label)
        with UserCode(_MODEL):
            method = part.change(method)
        surgery = tuple((owner or part.label, operation) for owner, operation in method.surgery)
        method = replace(method, surgery=surgery, parts=(*method.parts, part))
    method = replace(method, name="+".join(labels))
    refuse_contradictions(method)
    return method


def _made(term: Term, make: Factory) -> Part:
    with UserCode(_MODEL):
        part = make(**checked_options(term, make))
    if not isinstance(part, Part):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"method '{term.name}' must return a Part; it returned {type(part).__name__}")
    return replace(part, label=str(term))


def refuse_contradictions(method: Method) -> None:
    """Refuse combinations whose parts claim nothing twice and still cannot work together."""
    last = method.stages[-1][-1]
    own = (Policy.LOCAL, Policy.REPORTED)
    local = {kind for kind, policy in last.policy.items() if policy in own and kind is not Kind.OPTIMIZER}
    if method.data == "union" and (local or "lockstep" in method.needs):
        raise ConfigError(
            f"'{method.name}' cannot work: centralized training has no clients that could keep state or step "
            "together; leave out centralized or the other part"
        )
    refuse_numbers(method)
    _refuse_what_cannot_merge(method)
    _refuse_lockstep(method, local)
    for phase in (phase for id, phase in method.all_phases.items() if id.purpose is not Purpose.TRAIN):
        for kind in sorted(local & {kind for kind, policy in phase.policy.items() if policy is Policy.SHARED}):
            raise ConfigError(
                f"'{method.name}' cannot work: its last exchange would average the {kind} that clients keep local; "
                "leave one of the two parts out"
            )


_MERGED = {MERGE_STATISTICS: Kind.STATISTIC, MERGE_TRAINED: Kind.WEIGHT, WEIGHTS: Kind.WEIGHT}
_NEEDS_SERVER = frozenset({MERGE_STATISTICS, MERGE_TRAINED, PROXIMAL_TERM})


def _refuse_what_cannot_merge(method: Method) -> None:
    """Refuse parts about the merging of what is never sent, or of what only one model has."""
    for part in method.parts:
        if method.data == "union" and part.claims & _NEEDS_SERVER:
            raise ConfigError(
                f"'{method.name}' cannot work: centralized training has no server that merges or sends a model; "
                f"leave out centralized or '{part.label}'"
            )
        for claim in sorted(part.claims & _MERGED.keys()):
            kind = _MERGED[claim]
            if all(phase.policy[kind] is not Policy.SHARED for phase in method.phases):
                raise ConfigError(
                    f"'{method.name}' cannot work: '{part.label}' decides how the {kind} of clients is merged, "
                    "which another part does not send; leave one of the two parts out"
                )


def _refuse_lockstep(method: Method, local: set[Kind]) -> None:
    """Refuse clients that step together where they may not tell their statistics, or learn nothing from it."""
    together = [phase for phase in method.phases if phase.lockstep]
    if together and Kind.STATISTIC in local:
        raise ConfigError(
            f"'{method.name}' cannot work: clients in lock-step exchange the statistics of their batches, which they "
            "are to keep local; leave one of the two parts out"
        )
    if any(phase.then for phase in together):
        raise ConfigError(
            f"'{method.name}' cannot work: clients in lock-step take the steps of one pass together, and here their "
            "work has several; leave one of the two parts out"
        )
    if any(not phase.consumes_batches for phase in together):
        raise ConfigError(
            f"'{method.name}' cannot work: clients in lock-step exchange gradients of statistics, and in an exchange "
            "of statistics alone there are none; leave one of the two parts out"
        )


def _in_words(claim: str) -> str:
    subject, _, detail = claim.partition(":")
    return f"the {subject} of {detail}" if detail else f"the {subject}"


def checked_options(term: Term, make: Callable[..., Any], handed: Collection[str] = ()) -> dict[str, Any]:
    """The options of a term, each known to the factory and of the type its signature states.

    Parameters that are `handed` over otherwise are no options.
    """
    hints = get_type_hints(make)
    known = [name for name in inspect.signature(make).parameters if name not in handed]
    values: dict[str, Any] = {}
    for key, value in term.options.items():
        if key not in known:
            if not known:
                raise ConfigError(f"'{term.name}' takes no options but was given '{key}'; write just '{term.name}'")
            raise unknown(f"option of '{term.name}'", key, known)
        hint = hints.get(key, object)
        # `float | Literal["window"]` offers a type and a word
        options = [option for each in get_args(hint) or (hint,) for option in get_args(each) or (each,)]
        if float in options and int not in options and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if value is None and type(None) not in options and (str in options or "none" in options):
            value = "none"  # the grammar reads it as nothing
        if not any(_fits(value, option) for option in options):
            raise ConfigError(f"'{term}': {value!r} does not fit; {key} takes {_in_ordinary_words(options)}")
        values[key] = value
    return values


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", type(None): "none"}


def _in_ordinary_words(options: Sequence[Any]) -> str:
    """What an option takes: values of some types, or one of some words."""
    told = [_WORDS.get(each, repr(each)) for each in options if not (each is int and float in options)]
    return " or ".join(told)


def _fits(value: Any, option: Any) -> bool:
    if not isinstance(option, type):
        return value == option
    return isinstance(value, option) and (option in (bool, object) or not isinstance(value, bool))
