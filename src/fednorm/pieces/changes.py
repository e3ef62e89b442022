"""Changes to a method that parts are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from fednorm.core.method import Change, Method, Rule, Scale, Penalty, Transform
from fednorm.core.state import Kind, Policy
from fednorm.pieces.merges import Merge
from fednorm.pieces.surgery import Surgery
from fednorm.pieces.weights import Weigh


def nothing(method: Method) -> Method:
    """FedAvg is the method that changes nothing."""
    return method


def chain(*changes: Change) -> Change:
    """One change after the other."""

    def change(method: Method) -> Method:
        for each in changes:
            method = each(method)
        return method

    return change


def keep(**policies: str) -> Change:
    """Give kinds a policy in every phase: `keep(statistic="local")`."""
    chosen = {Kind(kind): Policy(policy) for kind, policy in policies.items()}
    return lambda method: method.map_phases(lambda phase: replace(phase, policy={**phase.policy, **chosen}))


def average_for_newcomers(variance: Literal["mean", "pooled"]) -> Change:
    """How a client that never trained averages the variances others keep local."""
    return lambda method: replace(method, newcomer=replace(method.newcomer, variance=variance))


def policy_claims(*kinds: str) -> frozenset[str]:
    """The claims of a part that decides the policies of some kinds.

    >>> sorted(policy_claims("affine", "counter"))
    ['policy:affine', 'policy:counter']
    """
    return frozenset(f"policy:{Kind(kind).value}" for kind in kinds)


def operate(*surgeries: Surgery) -> Change:
    """Add surgery, done in the order of the parts; the registry fills in the part's label."""
    return lambda method: replace(method, surgery=(*method.surgery, *(("", each) for each in surgeries)))


def add_loss(term: Penalty, **numbers: float) -> Change:
    """Add a term to every local loss; losses of several parts sum."""

    def change(rule: Rule) -> Rule:
        return replace(rule, losses=(*rule.losses, term), numbers={**rule.numbers, **numbers})

    return lambda method: method.map_rules(change)


def add_transform(transform: Transform, **numbers: float) -> Change:
    """Add a transform of the gradients; transforms of several parts chain in the order of the parts."""

    def change(rule: Rule) -> Rule:
        return replace(rule, grads=(*rule.grads, transform), numbers={**rule.numbers, **numbers})

    return lambda method: method.map_rules(change)


def scale_lr(factors: Scale) -> Change:
    """Train some tensors at a multiple of the learning rate."""
    return lambda method: method.map_rules(lambda rule: replace(rule, lr_factors=(*rule.lr_factors, factors)))


def weigh_by(weigh: Weigh, *kinds: Kind) -> Change:
    """Set the clients' weights, for all kinds or for some."""
    chosen: Mapping[Kind, Weigh] = dict.fromkeys(kinds or Kind, weigh)
    return lambda method: method.map_phases(lambda phase: replace(phase, weigh={**phase.weigh, **chosen}))


def merge_by(merge: Merge, *kinds: Kind) -> Change:
    """Set how some kinds are merged."""
    return lambda method: method.map_phases(
        lambda phase: replace(phase, merge={**phase.merge, **dict.fromkeys(kinds, merge)})
    )
