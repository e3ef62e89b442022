"""Facts about a method, computed from its object and a reference model's real state; none is typed by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, get_args, get_type_hints

from torch import nn

from fednorm import models
from fednorm.core.expression import parse_term
from fednorm.core.method import Method, Part, Pass, Phase
from fednorm.core.optimizers import MOMENTUM_SGD
from fednorm.core.state import Kind, Policy
from fednorm.halves.cost import exchange_cost
from fednorm.halves.prepared import Prepared, prepare
from fednorm.halves.schema import Schema
from fednorm.methods import known_methods, parse
from fednorm.models.calling import refuse_given
from fednorm.views.describe_model import cost, in_time
from fednorm.views.describe_piece import describe_piece, explain_piece

REFERENCE = "resnet20"
ABSENT = "absent"
"""Stands where a policy would, for a kind that the model has none of after the method's surgery."""


def describe_method(expression: str | Method, model: str = REFERENCE) -> dict[str, Any]:
    """All there is to say of a method as plain JSON values; policies and costs are those on `model` with SGD momentum.

    >>> facts = describe_method("silobn")
    >>> facts["policies"]["statistic"], facts["local"], facts["needs"]
    ('local', ['statistic', 'counter'], ['client_state'])
    >>> facts["stages"][0]["exchanges"], round(facts["stages"][0]["percent_up"], 1)
    (1, 99.5)
    """
    prepared = prepare(_reference(model), parse(expression), name=f"model '{model}'")
    return {**method_facts(prepared, _fedavg_bytes(model)), "model": model}


def method_facts(prepared: Prepared, fedavg_bytes: int) -> dict[str, Any]:
    """`describe_method` of a method that met its model already, on which averaging everything sends `fedavg_bytes`."""
    method = prepared.method
    parts = [_part(part) for part in method.parts]
    stages = [_exchanges(prepared, stage, fedavg_bytes) for stage in method.stages]
    table = [phase["policy"] for stage in stages for phase in stage["phases"]]
    return {
        "name": method.name,
        "paper": "; ".join(dict.fromkeys(part["paper"] for part in parts)),
        "summary": "; ".join(part["summary"] for part in parts),
        "reconstruction": any(part["reconstruction"] for part in parts),
        "options": parts[0]["options"] if len(parts) == 1 else {part["name"]: part["options"] for part in parts},
        "parts": parts,
        "claims": sorted({claim for part in method.parts for claim in part.claims}),
        "needs": sorted(method.needs),
        "data": method.data,
        "surgery": [describe_piece(surgery) for _, surgery in method.surgery],
        "policies": {
            kind.value: in_time(Policy(row[kind]) for row in table if row[kind] != ABSENT) or ABSENT for kind in Kind
        },
        "local": [kind.value for kind in Kind if any(row[kind] == Policy.LOCAL for row in table)],
        "stages": stages,
        "switch": describe_piece(method.switch),
        "finish": _exchanges(prepared, method.finish, fedavg_bytes) if method.finish else None,
        "query": _exchanges(prepared, [method.query], fedavg_bytes) if method.query else None,
        "newcomers": describe_piece(method.newcomer),
        "pieces": {describe_piece(piece): explain_piece(piece) for piece in _pieces(method)},
        "notes": list(prepared.notes),
    }


def _pieces(method: Method) -> list[Any]:
    """All that a method is made of, in the order in which it is told."""
    found: list[Any] = [surgery for _, surgery in method.surgery]
    found += [method.switch] * (len(method.stages) > 1)
    for phase in method.all_phases.values():
        for each in phase.passes:
            rule = each.rule
            found += [each.step, *rule.losses, *rule.grads, *rule.lr_factors, *rule.closings]
        found += [*phase.measures.values(), *phase.weigh.values(), *phase.merge.values()]
        found += [piece for extra in phase.extras.values() for piece in (extra.weigh, extra.merge)]
    return [*found, method.newcomer]


@cache
def _reference(model: str) -> nn.Module:
    term = parse_term(model, "model", "resnet20(shortcut=B)")
    refuse_given(term)
    return models.build(term.name, **term.options)


@cache
def _fedavg_bytes(model: str) -> int:
    return fedavg_bytes(_reference(model))


def fedavg_bytes(model: nn.Module) -> int:
    """What a client sends where everything is shared: the default method is plain averaging."""
    plain = Method()
    return exchange_cost(plain, plain.phases[0], prepare(model, plain).schema(plain.phases[0])).up


def _part(part: Part) -> dict[str, Any]:
    info = known_methods()[parse_term(part.label, "method", "fixbn(at=0.5)").name]
    takes = options_in_words(info.make)
    return {
        "name": info.name,
        "paper": info.paper,
        "summary": info.summary,
        "options": {name: {"default": value, "takes": takes[name]} for name, value in info.options.items()},
        "claims": sorted(part.claims),
        "reconstruction": info.reconstruction,
    }


def options_in_words(make: Callable[..., object]) -> dict[str, str]:
    """What each option of a method or a strategy takes."""
    return {name: _in_words(hint) for name, hint in get_type_hints(make).items()}


def _in_words(hint: Any) -> str:
    """What an option takes, such as `number or window`."""
    if get_args(hint):
        return " or ".join(_in_words(choice) for choice in get_args(hint) if choice is not type(None))
    return {bool: "true or false", int: "whole number", float: "number"}.get(hint, str(hint))


def _exchanges(prepared: Prepared, phases: Sequence[Phase], fedavg_bytes: int) -> dict[str, Any]:
    """Some phases in a row, and what they cost one client together."""
    listed = [_phase(prepared, phase) for phase in phases]
    total = {what: sum(phase[what] for phase in listed) for what in ("exchanges", "bytes_up", "bytes_down")}
    return {**total, "percent_up": 100 * total["bytes_up"] / fedavg_bytes, "phases": listed}


def _phase(prepared: Prepared, phase: Phase) -> dict[str, Any]:
    schema = prepared.schema(phase, MOMENTUM_SGD)
    spent = cost(prepared, phase, MOMENTUM_SGD)
    policy = {kind.value: _policy_of(kind, schema) for kind in Kind}
    merged = [kind for kind in Kind if policy[kind] == Policy.SHARED] if spent.exchanges else []
    return {
        "name": phase.name,
        **_pass(phase.passes[0]),
        "then": [_pass(each) for each in phase.then],
        "union": phase.union,
        "consumes_batches": phase.consumes_batches,
        "lockstep": phase.lockstep,
        "extras": {
            name: {
                "policy": extra.policy.value,
                "weights": describe_piece(extra.weigh),
                "merge": describe_piece(extra.merge),
            }
            for name, extra in phase.extras.items()
        },
        "measures": {name: describe_piece(measure) for name, measure in phase.measures.items()},
        "policy": policy,
        "weights": _by_kind(merged, phase.weigh),
        "merge": _by_kind(merged, phase.merge),
        "exchanges": spent.exchanges,
        "bytes_up": spent.up,
        "bytes_down": spent.down,
    }


def _pass(each: Pass) -> dict[str, Any]:
    """One pass of a client's work."""
    rule = each.rule
    return {
        "step": describe_piece(each.step),
        "work": each.work,
        "trains": rule.trains,
        "losses": [describe_piece(penalty) for penalty in rule.losses],
        "grads": [describe_piece(transform) for transform in rule.grads],
        "numbers": dict(rule.numbers),
        "lr_factors": [describe_piece(factors) for factors in rule.lr_factors],
        "held": sorted(kind.value for kind in rule.hold),
        "closings": [describe_piece(closing) for closing in rule.closings],
    }


def _policy_of(kind: Kind, schema: Schema) -> str:
    """The policy of a kind's entries; one that a phase treats in two ways reads `shared and local`."""
    return (
        " and ".join(
            dict.fromkeys(policy.value for entry, policy in schema.values() if entry.kind is kind and not entry.extra)
        )
        or ABSENT
    )


def _by_kind(kinds: list[Kind], rules: Mapping[Kind, Any]) -> dict[str, str]:
    return {kind.value: describe_piece(rules[kind]) for kind in kinds}
