"""A method is data: these frozen classes say what a treatment of normalization does, and nothing here does it.

A method names the surgery on the model, the stages of a run, in each stage the phases (one exchange each) of a round,
and when to go from one stage to the next. Engines, the command line and the adapters read the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from fednorm.core.frozen import FrozenDict
from fednorm.core.merge import Maximum, Mean, Merge
from fednorm.core.newcomer import AsGiven, Newcomer
from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.report import BySize, Report, Weigh
from fednorm.core.state import Entry, Kind, Policy, Tree
from fednorm.core.step import Carry, StepMaker, TrainStep
from fednorm.core.surgery import Surgery

Numbers = Mapping[str, float | Tensor]
"""Named numbers of one client's training (lr, mu, ...): floats, or tensors when an engine maps over clients."""


@dataclass(frozen=True)
class Facts:
    """What pieces may know about the model they work on: its entries by key and the keys of its last linear layer."""

    entries: Mapping[str, Entry]
    head: frozenset[str]
    momenta: Mapping[str, float] = FrozenDict()
    """share of a batch in the running statistics, by layer, of batch norms that keep a moving average"""


Penalty = Callable[[Carry, Numbers], Tensor]
"""(client, numbers) -> a scalar that is added to the loss; it is differentiated by the client's parameters."""

Transform = Callable[[Tree, Carry, Numbers, Facts], Tree]
"""(gradients, client before the step, numbers, facts) -> gradients."""

Measure = Callable[[Tree, Tree, Facts], Tensor]
"""(state at the end of a client's work, state at its start, facts) -> a scalar the client reports."""

Closing = Callable[[Tree, Tree, Numbers, Facts], Tree]
"""(state at the end of a client's work, state at its start, numbers with `steps`, facts) -> entries to replace.

What a method keeps for itself (`Method.extras`) changes here, once a round, such as a control variate.
"""

Scale = Callable[[nn.Module], Mapping[str, float]]
"""model -> factors on the learning rate by key."""


def _freeze(owner: object, *names: str) -> None:
    """Make mappings that were given read-only and hashable, as all else in a frozen class is."""
    for name in names:
        object.__setattr__(owner, name, FrozenDict(getattr(owner, name)))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one client trains. Structure is static, numbers are data, so an engine may map a rule over many clients."""

    losses: tuple[Penalty, ...] = ()
    grads: tuple[Transform, ...] = ()
    hold: frozenset[Kind] = frozenset()
    """`statistic`: batch norms use their running statistics and leave them; `affine`: theirs gets no gradient."""
    numbers: Mapping[str, float] = FrozenDict()
    lr_factors: tuple[Scale, ...] = ()
    trains: Literal["all", "head", "body"] = "all"
    """What gets gradients: everything, the last layer alone, or all but it."""
    closings: tuple[Closing, ...] = ()

    def __post_init__(self) -> None:
        _freeze(self, "numbers")


_TRAIN, _BY_SIZE, _MEAN = TrainStep(), BySize(), Mean()
Work = Literal["local", "epoch", "batch"]
"""`local`: the configured local steps or epochs; `epoch`: one pass over the client's data; `batch`: one step."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A part of a client's work in a phase, such as training the head before the body."""

    step: StepMaker = _TRAIN
    rule: Rule = Rule()
    work: Work = "local"


@dataclass(frozen=True, kw_only=True)
class Extra:
    """What happens in a phase to a tensor beside each trained parameter that the method declares for itself.

    It starts at zero. Penalties and transforms read it from the client's `extras` as `NAME:KEY`, closings change it.
    """

    policy: Policy
    weigh: Weigh = _BY_SIZE
    merge: Merge = _MEAN


FEDAVG: Mapping[Kind, Policy] = FrozenDict(
    {
        Kind.WEIGHT: Policy.SHARED,
        Kind.AFFINE: Policy.SHARED,
        Kind.STATISTIC: Policy.SHARED,
        Kind.COUNTER: Policy.SHARED,
        Kind.OPTIMIZER: Policy.FRESH,
        Kind.EXTRA: Policy.SHARED,
    }
)
BY_SIZE: Mapping[Kind, Weigh] = FrozenDict(dict.fromkeys(Kind, BySize()))
MEAN: Mapping[Kind, Merge] = FrozenDict({**dict.fromkeys(Kind, Mean()), Kind.COUNTER: Maximum()})


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One exchange: what comes down, what the client does, what goes up, how the server merges it."""

    name: str = "train"
    step: StepMaker = _TRAIN
    rule: Rule = Rule()
    policy: Mapping[Kind, Policy] = FEDAVG
    weigh: Mapping[Kind, Weigh] = BY_SIZE
    merge: Mapping[Kind, Merge] = MEAN
    extras: Mapping[str, Extra] = FrozenDict()
    """Entries the method declares for itself, by name."""
    work: Work = "local"
    then: tuple[Pass, ...] = ()
    """Further passes of the client's work, after the one that `step`, `rule` and `work` describe."""
    union: bool = False
    """Whether the phase sees everybody's data as one client's: no federation could do it, a study may."""
    consumes_batches: bool = True
    """Whether the phase uses up the client's batches, or looks at those the next phase will see."""
    lockstep: int = 0
    """How many first steps the cohort takes together, with a mean over the clients inside the model."""
    fresh_after_lockstep: bool = False
    """Whether the optimizer starts anew after the steps in lock-step."""
    measures: Mapping[str, Measure] = FrozenDict()
    """Scalars each client reports of its work."""

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (Pass(step=self.step, rule=self.rule, work=self.work), *self.then)

    def __post_init__(self) -> None:
        _freeze(self, "policy", "weigh", "merge", "measures", "extras")

    def __repr__(self) -> str:
        """What differs from the plain phase."""
        plain = Phase()
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        shown = (f"{name}={value!r}" for name, value in own.items() if value != getattr(plain, name))
        return f"Phase({', '.join(shown)})"

    def map_rules(self, change: Callable[[Rule], Rule]) -> Phase:
        """The same phase with the rule of every pass changed."""
        then = tuple(replace(each, rule=change(each.rule)) for each in self.then)
        return replace(self, rule=change(self.rule), then=then)

    def rules_of(self, entry: Entry) -> tuple[Merge, Weigh]:
        """How the server merges an entry, and how clients weigh in it."""
        if entry.extra:
            return self.extras[entry.extra].merge, self.extras[entry.extra].weigh
        return self.merge[entry.kind], self.weigh[entry.kind]

    def policy_of(self, entry: Entry) -> Policy:
        """The policy of an entry. The affine of norms without batch statistics (GN, LN) goes with the weights."""
        if entry.extra:
            return self.extras[entry.extra].policy
        kind = Kind.WEIGHT if entry.kind is Kind.AFFINE and not entry.batch_norm else entry.kind
        return self.policy[kind]


@dataclass(frozen=True)
class Progress:
    """Where a run stands: round `round` of `rounds`, counted from 1."""

    round: int
    rounds: int


Memory = dict[str, Any]
"""What a switch remembers between rounds: JSON values only, since it is checkpointed."""

Switch = Callable[[Memory, Progress, Sequence[Report]], tuple[Memory, int]]
"""(memory, progress, last round's reports) -> (memory, stage of this round).

One that looks at progress alone says so with `uses_reports = False`.
"""


@dataclass(frozen=True)
class Stay:
    """One stage, for ever."""

    uses_reports: ClassVar[bool] = False

    def __call__(self, memory: Memory, progress: Progress, reports: Sequence[Report]) -> tuple[Memory, int]:
        return memory, 0


Change = Callable[["Method"], "Method"]


@dataclass(frozen=True)
class Part:
    """A named change to a method, with what it claims for itself: two parts with the same claim do not combine."""

    change: Change
    claims: frozenset[str] = frozenset()
    acts_on: frozenset[Kind] = frozenset()
    """Kinds of batch-norm state without which the part would do nothing."""
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A whole treatment of a federation: see the module's docstring. The default is FedAvg."""

    name: str = "fedavg"
    data: Literal["each", "union"] = "each"
    """`union`: one model trains on all clients' data, as if there were no federation."""
    surgery: tuple[tuple[str, Surgery], ...] = ()
    stages: tuple[tuple[Phase, ...], ...] = ((Phase(),),)
    switch: Switch = Stay()
    finish: tuple[Phase, ...] = ()
    """Exchanges with all clients after the last round."""
    query: Phase | None = None
    """An exchange with all clients before every test, for statistics that training neither makes nor sees."""
    newcomer: Newcomer = field(default_factory=AsGiven)
    """How a client that never trained gets its statistics."""
    parts: tuple[Part, ...] = ()

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(phase for stage in self.stages for phase in stage)

    @property
    def all_phases(self) -> dict[PhaseId, Phase]:
        """Every exchange the method has, by its address: training of all stages, finish, query."""
        found = {
            PhaseId(Purpose.TRAIN, stage, index): phase
            for stage, phases in enumerate(self.stages)
            for index, phase in enumerate(phases)
        }
        found |= {PhaseId(Purpose.FINISH, 0, index): phase for index, phase in enumerate(self.finish)}
        return found | ({PhaseId(Purpose.QUERY): self.query} if self.query else {})

    def phase_at(self, id: PhaseId) -> Phase:
        """The phase with an address; under `score`, what a tested model consists of in that stage.

        That is the stage's last phase, with what the query fills counted as shared.
        """
        if id.purpose is not Purpose.SCORE:
            return self.all_phases[id]
        phase = self.stages[id.stage][-1]
        if self.query is None:
            return phase
        filled = {kind: policy for kind, policy in self.query.policy.items() if policy is Policy.SHARED}
        return replace(phase, policy={**phase.policy, **filled})

    def sees_union(self, phase: Phase) -> bool:
        """Whether everybody's data is one client's in a phase."""
        return phase.union or self.data == "union"

    @property
    def needs(self) -> frozenset[str]:
        """What must be offered: `client_state` that outlives a round, a cohort that steps in `lockstep`, the `union`
        of all data in one place."""
        phases = self.all_phases.values()
        policies = [policy for phase in self.phases for policy in phase.policy.values()]
        policies += [extra.policy for phase in self.phases for extra in phase.extras.values()]
        local = any(policy in (Policy.LOCAL, Policy.REPORTED) for policy in policies)
        needs = {
            "client_state": local and self.data == "each",
            "lockstep": any(phase.lockstep for phase in phases),
            "union": any(self.sees_union(phase) for phase in phases),
        }
        return frozenset(need for need, needed in needs.items() if needed)

    def map_phases(self, change: Callable[[Phase], Phase]) -> Method:
        """The same method with every phase of every stage changed."""
        return replace(self, stages=tuple(tuple(change(phase) for phase in stage) for stage in self.stages))

    def map_rules(self, change: Callable[[Rule], Rule]) -> Method:
        """The same method with every client rule changed."""
        return self.map_phases(lambda phase: phase.map_rules(change))
