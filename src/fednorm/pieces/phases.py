"""One phase, changed: what `changes` does to all phases of a method, and methods with several phases to one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fednorm.core.merge import Merge
from fednorm.core.method import Penalty, Phase, Scale, Transform
from fednorm.core.numbers import joined
from fednorm.core.report import Weigh
from fednorm.core.state import Kind, Policy


def with_policy(phase: Phase, policies: Mapping[Kind, Policy]) -> Phase:
    """Some kinds have these policies.

    >>> with_policy(Phase(), {Kind.STATISTIC: Policy.FROZEN}).policy[Kind.STATISTIC].value
    'frozen'
    """
    return replace(phase, policy={**phase.policy, **policies})


def with_loss(phase: Phase, penalty: Penalty, numbers: Mapping[str, float]) -> Phase:
    """The local loss has one more penalty, which finds its numbers under their names."""
    return phase.map_rules(
        lambda rule: replace(rule, losses=(*rule.losses, penalty), numbers=joined(rule.numbers, numbers))
    )


def with_transform(phase: Phase, transform: Transform, numbers: Mapping[str, float]) -> Phase:
    """The gradients go through one more transform, which finds its numbers under their names."""
    return phase.map_rules(
        lambda rule: replace(rule, grads=(*rule.grads, transform), numbers=joined(rule.numbers, numbers))
    )


def with_lr_factors(phase: Phase, factors: Scale) -> Phase:
    """Some tensors train at a multiple of the learning rate."""
    return phase.map_rules(lambda rule: replace(rule, lr_factors=(*rule.lr_factors, factors)))


def with_weights(phase: Phase, weigh: Weigh, *kinds: Kind) -> Phase:
    """Clients weigh by this rule in the merge of some kinds, or of all."""
    return replace(phase, weigh={**phase.weigh, **dict.fromkeys(kinds or Kind, weigh)})


def with_merge(phase: Phase, merge: Merge, *kinds: Kind) -> Phase:
    """Some kinds are merged by this rule."""
    return replace(phase, merge={**phase.merge, **dict.fromkeys(kinds, merge)})


def hold(phase: Phase, *kinds: Kind) -> Phase:
    """Local training leaves these kinds of batch-norm state as they are (`Rule.hold`)."""
    return phase.map_rules(lambda rule: replace(rule, hold=rule.hold | set(kinds)))
