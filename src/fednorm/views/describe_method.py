"""Facts about a method, computed from its object and a reference model's real state; none is typed by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_args, get_type_hints

from torch import nn

from fednorm import models
from fednorm.core.expression import parse_term
from fednorm.core.method import Method, Phase
from fednorm.core.optim import MOMENTUM_SGD
from fednorm.core.state import Kind, Policy
from fednorm.halves.merging import UP, Schema
from fednorm.halves.prepared import Prepared, prepare
from fednorm.methods import known_methods, parse
from fednorm.views.describe import cost, in_time, sent

REFERENCE = "resnet20"
ABSENT = "absent"
"""Stands where a policy would, for a kind that the model has none of after the method's surgery."""


def describe(expression: str | Method, model: str = REFERENCE) -> dict[str, Any]:
    """All there is to say of a method as plain JSON values; policies and costs are those on `model` with SGD momentum.

    >>> facts = describe("silobn")
    >>> facts["policies"]["statistic"], facts["local"], facts["needs"]
    ('local', ['statistic', 'counter'], ['client_state'])
    >>> facts["stages"][0]["exchanges"], round(facts["stages"][0]["percent_up"], 1)
    (1, 99.5)
    """
    method = parse(expression)
    prepared = prepare(_reference(model), method, name=f"model '{model}'")
    parts = [_part(part.label) for part in method.parts]
    stages = [_exchanges(prepared, stage, model) for stage in method.stages]
    after = [*method.finish, *([method.query] if method.query else [])]
    table = [phase["policy"] for stage in stages for phase in stage["phases"]]
    return {
        "name": method.name,
        "paper": "; ".join(dict.fromkeys(part["paper"] for part in parts)),
        "summary": "; ".join(part["summary"] for part in parts),
        "reconstruction": any(part["reconstruction"] for part in parts),
        "options": parts[0]["options"] if len(parts) == 1 else {part["name"]: part["options"] for part in parts},
        "parts": parts,
        "needs": sorted(method.needs),
        "model": model,
        "policies": {
            kind.value: in_time(Policy(row[kind]) for row in table if row[kind] != ABSENT) or ABSENT for kind in Kind
        },
        "local": [kind.value for kind in Kind if any(row[kind] == Policy.LOCAL for row in table)],
        "stages": stages,
        "after_training": _exchanges(prepared, after, model) if after else None,
        "newcomer": method.newcomer.rule,
        "data": method.data,
        "notes": list(prepared.notes),
    }


@cache
def _reference(model: str) -> nn.Module:
    term = parse_term(model, "model", "resnet20(shortcut=B)")
    return models.build(term.name, **term.options)


@cache
def _fedavg_bytes(model: str) -> int:
    """What a client sends where everything is shared: the default method is plain averaging."""
    plain = Method()
    return sent(prepare(_reference(model), plain).schema(plain.phases[0]), *UP)


def _part(label: str) -> dict[str, Any]:
    info = known_methods()[parse_term(label, "method", "fixbn(at=0.5)").name]
    takes = {name: _in_words(hint) for name, hint in get_type_hints(info.make).items()}
    return {
        "name": info.name,
        "paper": info.paper,
        "summary": info.summary,
        "options": {name: {"default": value, "takes": takes[name]} for name, value in info.options.items()},
        "reconstruction": info.reconstruction,
    }


def _in_words(hint: Any) -> str:
    """What an option takes, such as `number or window`."""
    if get_args(hint):
        return " or ".join(_in_words(choice) for choice in get_args(hint) if choice is not type(None))
    return {bool: "true or false", int: "whole number", float: "number"}.get(hint, str(hint))


def _exchanges(prepared: Prepared, phases: tuple[Phase, ...] | list[Phase], model: str) -> dict[str, Any]:
    """Some phases in a row, and what they cost one client together."""
    listed = [_phase(prepared, phase) for phase in phases]
    total = {what: sum(phase[what] for phase in listed) for what in ("exchanges", "bytes_up", "bytes_down")}
    return {**total, "percent_up": 100 * total["bytes_up"] / _fedavg_bytes(model), "phases": listed}


def _phase(prepared: Prepared, phase: Phase) -> dict[str, Any]:
    schema = prepared.schema(phase, MOMENTUM_SGD)
    exchanges, up, down = cost(prepared.method, phase, schema)
    policy = {kind.value: _policy_of(kind, schema) for kind in Kind}
    merged = [kind for kind in Kind if policy[kind] == Policy.SHARED] if exchanges else []
    return {
        "name": phase.name,
        "policy": policy,
        "weights": _by_kind(merged, phase.weigh),
        "merge": _by_kind(merged, phase.merge),
        "held": sorted(kind.value for kind in phase.rule.hold),
        "scalars": sorted(phase.measures),
        "lockstep": phase.lockstep,
        "work": phase.work,
        "union": phase.union,
        "exchanges": exchanges,
        "bytes_up": up,
        "bytes_down": down,
    }


def _policy_of(kind: Kind, schema: Schema) -> str:
    """The policy of a kind's entries; one that a phase treats in two ways reads `shared and local`."""
    return (
        " and ".join(dict.fromkeys(policy.value for entry, policy in schema.values() if entry.kind is kind)) or ABSENT
    )


def _by_kind(kinds: list[Kind], rules: Mapping[Kind, Callable[..., Any]]) -> dict[str, str]:
    return {kind.value: rule_name(rules[kind]) for kind in kinds}


def rule_name(rule: Callable[..., Any]) -> str:
    """A weighing or merging rule in words: the name of its function, or of the function that made it.

    >>> from fednorm.pieces.weights import by_loss, by_size
    >>> rule_name(by_size), rule_name(by_loss("all"))
    ('by size', 'by loss')
    """
    return getattr(rule, "__qualname__", type(rule).__name__).partition(".")[0].replace("_", " ")
