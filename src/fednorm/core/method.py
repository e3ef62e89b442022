"""A method is data: these frozen classes say what a treatment of normalization does, and nothing here does it.

A method names the surgery on the model, the stages of a run, in each stage the phases (one exchange each) of a round,
and when to go from one stage to the next. Engines, the command line and the adapters read the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import FunctionType
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from fednorm.core.frozen import FrozenDict
from fednorm.core.merge import Maximum, Mean, Merge
from fednorm.core.newcomer import AsGiven, Newcomer
from fednorm.core.report import BySize, Report, Weigh
from fednorm.core.state import Entry, Kind, Policy, Tree
from fednorm.core.step import StepMaker, train_step
from fednorm.core.surgery import Surgery

Numbers = Mapping[str, float | Tensor]
"""Named numbers of one client's training (lr, mu, ...): floats, or tensors when an engine maps over clients."""


@dataclass(frozen=True)
class Facts:
    """What pieces may know about the model they work on: its entries by key and the keys of its last linear layer."""

    entries: Mapping[str, Entry]
    head: frozenset[str]


Penalty = Callable[[Tree, Tree, Numbers], Tensor]
"""(parameters, their broadcast values, numbers) -> a scalar that is added to the loss."""

Transform = Callable[[Tree, Tree, Numbers, Facts], Tree]
"""(gradients, parameters, numbers, facts) -> gradients."""

Measure = Callable[[Tree, Tree, Facts], Tensor]
"""(state at the end of a client's work, state at its start, facts) -> a scalar the client reports."""

Scale = Callable[[nn.Module], Mapping[str, float]]
"""model -> factors on the learning rate by key."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one client trains. Structure is static, numbers are data, so an engine may map a rule over many clients."""

    losses: tuple[Penalty, ...] = ()
    grads: tuple[Transform, ...] = ()
    hold: frozenset[Kind] = frozenset()
    """`statistic`: batch norms use their running statistics and leave them; `affine`: theirs gets no gradient."""
    numbers: Mapping[str, float] = FrozenDict()
    lr_factors: tuple[Scale, ...] = ()

    def __post_init__(self) -> None:
        _freeze(self, "numbers")


def _freeze(owner: Rule | Phase, *names: str) -> None:
    """Make mappings that were given read-only and hashable, as all else in a frozen class is."""
    for name in names:
        object.__setattr__(owner, name, FrozenDict(getattr(owner, name)))


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
    step: StepMaker = train_step
    rule: Rule = Rule()
    policy: Mapping[Kind, Policy] = FEDAVG
    weigh: Mapping[Kind, Weigh] = BY_SIZE
    merge: Mapping[Kind, Merge] = MEAN
    work: Literal["local", "epoch", "batch"] = "local"
    """`local`: the configured local steps or epochs; `epoch`: one pass over the client's data; `batch`: one step."""
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

    def __post_init__(self) -> None:
        _freeze(self, "policy", "weigh", "merge", "measures")

    def __repr__(self) -> str:
        """What differs from the plain phase; steps may be functions, which say no more than their name."""
        plain = Phase()
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        shown = {name: value for name, value in own.items() if value != getattr(plain, name)}
        texts = {name: v.__name__ if isinstance(v, FunctionType) else repr(v) for name, v in shown.items()}
        return f"Phase({', '.join(f'{name}={text}' for name, text in texts.items())})"

    def policy_of(self, entry: Entry) -> Policy:
        """The policy of an entry. The affine of norms without batch statistics (GN, LN) goes with the weights."""
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
    def needs(self) -> frozenset[str]:
        """What an engine must offer: `client_state` that outlives a round, a cohort that steps in `lockstep`."""
        local = any(policy is Policy.LOCAL for phase in self.phases for policy in phase.policy.values())
        lockstep = any(phase.lockstep for phase in self.phases)
        needs = {"client_state": local and self.data == "each", "lockstep": lockstep}
        return frozenset(need for need, needed in needs.items() if needed)

    def tested(self, stage: int) -> Phase:
        """The last phase of a stage, with what the query fills counted as shared: what a tested model consists of."""
        phase = self.stages[stage][-1]
        if self.query is None:
            return phase
        filled = {kind: policy for kind, policy in self.query.policy.items() if policy is Policy.SHARED}
        return replace(phase, policy={**phase.policy, **filled})

    def map_phases(self, change: Callable[[Phase], Phase]) -> Method:
        """The same method with every phase of every stage changed."""
        return replace(self, stages=tuple(tuple(change(phase) for phase in stage) for stage in self.stages))

    def map_rules(self, change: Callable[[Rule], Rule]) -> Method:
        """The same method with every client rule changed."""
        return self.map_phases(lambda phase: replace(phase, rule=change(phase.rule)))
