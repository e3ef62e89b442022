"""What an engine is: it plays the exchanges that runs ask for. Everything else about a run is the same for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch.func import grad_and_value

from fednorm.core.report import Report
from fednorm.core.state import Tree
from fednorm.core.step import Carry, Seen, Step
from fednorm.core.user_code import UserCode
from fednorm.engines.ranks import Alone
from fednorm.engines.receiving import flaws_of_outcomes, received
from fednorm.engines.tolerance import Tolerant, Train, one_by_one
from fednorm.engines.watching import Watch
from fednorm.errors import ConfigError, FednormError
from fednorm.halves.exchange import Exchange, Held, Holder
from fednorm.halves.mine import ClientState
from fednorm.halves.norm_bound import refused_by_distance
from fednorm.halves.prepared_phase import PreparedPass, PreparedPhase
from fednorm.halves.server import Server
from fednorm.halves.site import Sites, state_after
from fednorm.halves.stacks import Stacks
from fednorm.halves.training import Job, Outcome

P = ParamSpec("P")
T = TypeVar("T")


class ClientStates(Protocol):
    """Where the states of clients are kept."""

    def get_many(self, clients: Sequence[int]) -> dict[int, ClientState]: ...
    def put(self, client: int, state: ClientState) -> None: ...


class Settings(Protocol):
    """What an engine may be told about how to compute; the `engine` section of a config."""

    @property
    def name(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def workers(self) -> int | None: ...
    @property
    def threads(self) -> int | None: ...


@dataclass(frozen=True)
class Order:
    """An exchange of one run: who asks, whose work it is, and where clients' states are kept."""

    exchange: Exchange
    server: Server
    sites: Sites
    states: ClientStates
    ranks: Alone = field(default_factory=Alone)
    probing: bool = False


@dataclass(frozen=True)
class Played:
    """What an exchange that was played and merged leaves for the run to note."""

    reports: Sequence[Report]
    probed: Mapping[int, Mapping[str, float]] | None = None
    """what probes saw of each client"""
    joined: Mapping[str, float] = field(default_factory=dict[str, float])
    """what probes saw of the merge"""


MOST_AWAITED = 64
"""Exchanges whose reports may wait on the device."""


class Awaited(Sequence[Report], ABC):
    """Reports that are still on a device: they are read when somebody looks at them, and checked only then."""

    @abstractmethod
    def send(self) -> None:
        """Let the reports come to the host, where they are read later."""

    @abstractmethod
    def losses(self, name: str) -> list[tuple[int, float]]:
        """How many examples each client has, and one of the means of its training loss."""

    @abstractmethod
    def flaws(self, norm_factor: float | None) -> dict[int, str]:
        """Clients with numbers that cannot be used, and why."""


class Engine(Protocol):
    """Plays exchanges, of one run or of several at once."""

    @property
    def fell_back(self) -> str:
        """Why it had to leave its work to the sequential engine; empty where it did not."""
        ...

    @property
    def processes(self) -> int:
        """How many processes train clients."""
        ...

    @property
    def independent(self) -> bool:
        """Whether what a client brings has the same bits whoever is trained along."""
        ...

    def ahead(self, phase: PreparedPhase) -> int:
        """Jobs that are worth being given to `train` before anybody waits for them, since it works on after it returns.

        0 where it works when outcomes are asked for.
        """
        ...

    def urgent(self) -> AbstractContextManager[None]:
        """In which what is asked of the device goes before training that is under way."""
        ...

    def hold(self, sites: Sites, tree: Tree, memory: Tree) -> Holder:
        """Where a run's server state lies from now on."""
        ...

    def train(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        """The outcomes of clients' work, in any order, without a merge."""
        ...

    def exchange(self, orders: Sequence[Order]) -> list[Played | FednormError]:
        """Play and merge what runs ask for; an error is one run's, which need not be the end of others."""
        ...

    def bring_home(self, states: ClientStates, held: Holder) -> None:
        """Put into a run's store what its clients keep elsewhere."""
        ...

    def close(self) -> None:
        """Give back what is held beside memory, such as processes."""
        ...


class PlainEngine:
    """An engine that plays one run after the other and merges on the host; `train` is all that differs."""

    fell_back: str = ""
    processes: int = 1
    independent: bool = True

    def ahead(self, phase: PreparedPhase) -> int:
        return 0

    def train(self, phase: PreparedPhase, jobs: Sequence[Job], probing: bool = False) -> Iterator[Outcome]:
        """The outcomes of clients' work, in any order."""
        raise NotImplementedError

    def urgent(self) -> AbstractContextManager[None]:
        return nullcontext()

    def hold(self, sites: Sites, tree: Tree, memory: Tree) -> Holder:
        return Held(tree, memory)

    def exchange(self, orders: Sequence[Order]) -> list[Played | FednormError]:
        return [attempt(play_plainly, order, self.train) for order in orders]

    def bring_home(self, states: ClientStates, held: Holder) -> None:
        """Nothing is kept elsewhere."""

    def close(self) -> None:
        """Nothing is held."""


def play_plainly(order: Order, train: Train, tolerant: Tolerant | None = None) -> Played:
    """One exchange on the host: train the clients of this process, refuse, merge, store what they keep.

    Where the server can do without a client, training that fails is not the end: `tolerant` says who failed.
    """
    exchange, server, sites, ranks = order.exchange, order.server, order.sites, order.ranks
    phase, name = exchange.phase, sites.prepared.name
    here = ranks.own(sites.batches.pool.clients, exchange.cohort)
    states = order.states.get_many(here)
    starts = phase.starts(server.tree, [states[client].tree for client in here], sites.device)
    shares = exchange.shares
    jobs = {
        client: sites.job(phase, client, start, states[client].steps, exchange.numbers, shares.get(client, 1.0))
        for client, start in zip(here, starts, strict=True)
    }
    asked = (tolerant or one_by_one(train, name)) if server.tolerates else train
    usable: dict[int, Outcome] = {}
    stacks = Stacks([])

    def work(some: Sequence[Job]) -> dict[str, Any]:
        """Train clients of this process, and say in JSON values what all must know of them."""
        nonlocal stacks
        with UserCode(name):  # here, so that every rank is told whose mistake it was
            came, missing = received(asked(phase, some, order.probing) if some else (), some)
        stacks = Stacks([outcome.update.shared for outcome in came])
        own = [jobs[outcome.update.client] for outcome in came]
        refused = flaws_of_outcomes(sites, phase, server.tree, came, own, stacks)
        new = {outcome.update.client: outcome for outcome in came if outcome.update.client not in refused}
        usable.update(new)
        return {
            "refused": list(refused.items()),
            "missing": list(missing.items()),
            "reports": [vars(outcome.update.report) for outcome in new.values()],
            "probed": [(client, dict(outcome.update.probed)) for client, outcome in new.items()],
        }

    reports: dict[int, Report] = {}
    probed: dict[int, Mapping[str, float]] = {}
    owner: dict[int, int] = {}
    while True:
        told = ranks.tell_all(lambda: work([job for client, job in jobs.items() if client not in usable]))
        refused, missing = ({c: why for each in told for c, why in each[what]} for what in ("refused", "missing"))
        for rank, each in enumerate(told):
            reports |= {report["client"]: Report(**report) for report in each["reports"]}
            probed |= dict(each["probed"])
            owner |= {report["client"]: rank for report in each["reports"]}
        updates = [usable[client].update for client in sorted(usable)]
        if [id(update.shared) for update in updates] != [id(tree) for tree in stacks.trees]:
            stacks = Stacks([update.shared for update in updates])
        far = refused_by_distance(updates, stacks, server.tree, phase.schema, server.norm_factor, ranks.tell_all)
        for client in far:
            usable.pop(client, None)
            del reports[client], probed[client]
        if server.admit(reports, {**refused, **far}, missing):
            break
    updates = [update for update in updates if update.client in reports]
    everybody = [reports[client] for client in sorted(reports)]
    watch = Watch(sites.probes if order.probing else (), sites.prepared.facts, server.tree)
    with ranks.merge([sum(owner[client] == rank for client in reports) for rank in range(len(told))]):
        server.merge(updates, everybody, None if far else stacks)
        joined = watch.seen(server.tree, phase, [usable[client] for client in sorted(usable)], len(everybody))
    ranks.confirm(f"phase '{phase.phase.name}' of '{sites.method.name}'", server.tree)
    for client, outcome in sorted(usable.items()) if exchange.keeps else ():
        after = state_after(phase, states[client], jobs[client].num_steps, outcome.kept)
        if after is not None:
            order.states.put(client, after)
    looked = order.probing and any(probe.join is None for probe in sites.probes)
    return Played(everybody, {client: probed[client] for client in sorted(probed)} if looked else None, joined)


def attempt(function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | FednormError:
    """What a function returns, or the error it ends with: one run's, which need not be the end of others."""
    try:
        return function(*arguments, **named)
    except FednormError as error:
        return error


def mapped_step(sites: Sites, each: PreparedPass, probing: bool = False) -> Step:
    """A pass's step over a stack of clients: every tensor has a leading client axis, numbers are common."""
    spec = replace(sites.step_spec(each, probing, mapped=True), differentiate=lambda f: grad_and_value(f, has_aux=True))
    return torch.vmap(each.step(spec), in_dims=(0, 0, None))


def stack_trees(trees: Sequence[Tree]) -> Tree:
    """Trees of several clients as one tree with a leading client axis."""
    return {key: torch.stack([tree[key] for tree in trees]) for key in trees[0]}


def pick(tree: Tree, index: int) -> Tree:
    """One client's tree of a stack."""
    return {key: value[index] for key, value in tree.items()}


def pick_client(carry: Carry, seen: Seen, index: int) -> tuple[Carry, Seen]:
    """One client's part of what a mapped step leaves."""
    return Carry(*(pick(tree, index) for tree in carry)), Seen(seen.loss[index], pick(seen.probed, index))


def refuse_unequal(method: str, clients: Sequence[int], sizes: Sequence[int]) -> None:
    """Clients that step together inside one layer need batches of one size."""
    for client, size in zip(clients, sizes, strict=True):
        if size != sizes[0]:
            raise ConfigError(
                f"'{method}' steps in lock-step and needs equal batches, but client {client} has {size} "
                f"examples where client {clients[0]} has {sizes[0]}; lower train.batch_size to {min(sizes)}"
            )
