"""Changes to a method that parts are made of.

A change may be any function from a method to a method; those here are data, so that parts can be compared, printed and
sent to another process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from fednorm.core.frozen import FrozenDict
from fednorm.core.merge import Merge
from fednorm.core.method import Change, Method, Penalty, Phase, Scale, Transform
from fednorm.core.newcomer import AsGiven, Newcomer
from fednorm.core.report import Weigh
from fednorm.core.state import Kind, Policy
from fednorm.core.surgery import Surgery
from fednorm.pieces.phases import with_loss, with_lr_factors, with_merge, with_policy, with_transform, with_weights


@dataclass(frozen=True)
class Nothing:
    """FedAvg is the method that changes nothing."""

    def __call__(self, method: Method) -> Method:
        return method


@dataclass(frozen=True)
class Chain:
    """One change after the other."""

    changes: tuple[Change, ...]

    def __call__(self, method: Method) -> Method:
        for change in self.changes:
            method = change(method)
        return method


def chain(*changes: Change) -> Change:
    """One change after the other."""
    return Chain(changes)


class PhaseChange(ABC):
    """The same change to every phase of every stage."""

    @abstractmethod
    def changed(self, phase: Phase) -> Phase:
        """The phase, changed."""

    def __call__(self, method: Method) -> Method:
        return method.map_phases(self.changed)


@dataclass(frozen=True)
class Keep(PhaseChange):
    """Give kinds a policy in every phase."""

    policies: Mapping[Kind, Policy]

    def changed(self, phase: Phase) -> Phase:
        return with_policy(phase, self.policies)


def keep(**policies: str) -> Change:
    """Give kinds a policy in every phase: `keep(statistic="local")`."""
    return Keep(FrozenDict({Kind(kind): Policy(policy) for kind, policy in policies.items()}))


def policy_claims(*kinds: str) -> frozenset[str]:
    """The claims of a part that decides the policies of some kinds.

    >>> sorted(policy_claims("affine", "counter"))
    ['policy:affine', 'policy:counter']
    """
    return frozenset(f"policy:{Kind(kind).value}" for kind in kinds)


@dataclass(frozen=True)
class Operate:
    """Add surgery, done in the order of the parts; the registry fills in the part's label."""

    surgeries: tuple[Surgery, ...]

    def __call__(self, method: Method) -> Method:
        return replace(method, surgery=(*method.surgery, *(("", each) for each in self.surgeries)))


def operate(*surgeries: Surgery) -> Change:
    """Add surgery, done in the order of the parts."""
    return Operate(surgeries)


@dataclass(frozen=True)
class AddLoss(PhaseChange):
    """Add a penalty to every local loss; those of several parts sum."""

    penalty: Penalty
    numbers: Mapping[str, float]

    def changed(self, phase: Phase) -> Phase:
        return with_loss(phase, self.penalty, self.numbers)


def add_loss(penalty: Penalty, **numbers: float) -> Change:
    """Add a penalty to every local loss; those of several parts sum."""
    return AddLoss(penalty, FrozenDict(numbers))


@dataclass(frozen=True)
class AddTransform(PhaseChange):
    """Add a transform of the gradients; transforms of several parts chain in the order of the parts."""

    transform: Transform
    numbers: Mapping[str, float]

    def changed(self, phase: Phase) -> Phase:
        return with_transform(phase, self.transform, self.numbers)


def add_transform(transform: Transform, **numbers: float) -> Change:
    """Add a transform of the gradients; transforms of several parts chain in the order of the parts."""
    return AddTransform(transform, FrozenDict(numbers))


@dataclass(frozen=True)
class ScaleLr(PhaseChange):
    """Train some tensors at a multiple of the learning rate."""

    factors: Scale

    def changed(self, phase: Phase) -> Phase:
        return with_lr_factors(phase, self.factors)


def scale_lr(factors: Scale) -> Change:
    """Train some tensors at a multiple of the learning rate."""
    return ScaleLr(factors)


@dataclass(frozen=True)
class WeighBy(PhaseChange):
    """Set the clients' weights, for all kinds or for some."""

    weigh: Weigh
    kinds: tuple[Kind, ...]

    def changed(self, phase: Phase) -> Phase:
        return with_weights(phase, self.weigh, *self.kinds)


def weigh_by(weigh: Weigh, *kinds: Kind) -> Change:
    """Set the clients' weights, for all kinds or for some."""
    return WeighBy(weigh, kinds)


@dataclass(frozen=True)
class MergeBy(PhaseChange):
    """Set how some kinds are merged."""

    merge: Merge
    kinds: tuple[Kind, ...]

    def changed(self, phase: Phase) -> Phase:
        return with_merge(phase, self.merge, *self.kinds)


def merge_by(merge: Merge, *kinds: Kind) -> Change:
    """Set how some kinds are merged."""
    return MergeBy(merge, kinds)


@dataclass(frozen=True)
class Finish:
    """Add an exchange with all clients after the last round."""

    phase: Phase

    def __call__(self, method: Method) -> Method:
        return replace(method, finish=(*method.finish, self.phase))


@dataclass(frozen=True)
class Query:
    """Add an exchange with all clients before every test."""

    phase: Phase

    def __call__(self, method: Method) -> Method:
        return replace(method, query=self.phase)


@dataclass(frozen=True)
class TreatNewcomers:
    """Set how a client that never trained gets its statistics; how local variances average is another part's."""

    rule: Newcomer

    def __call__(self, method: Method) -> Method:
        return replace(method, newcomer=replace(self.rule, variance=method.newcomer.variance))


@dataclass(frozen=True)
class NewcomersUnlessTold:
    """Set how a client that never trained gets its statistics where no other part says so."""

    rule: Newcomer

    def __call__(self, method: Method) -> Method:
        return TreatNewcomers(self.rule)(method) if isinstance(method.newcomer, AsGiven) else method


@dataclass(frozen=True)
class AverageForNewcomers:
    """Set how a client that never trained averages the variances others keep local."""

    variance: Literal["mean", "pooled"]

    def __call__(self, method: Method) -> Method:
        return replace(method, newcomer=replace(method.newcomer, variance=self.variance))
