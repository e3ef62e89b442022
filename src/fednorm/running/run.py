"""The course of a run, the same for every engine: draw clients, exchange, merge, score, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fednorm.core import rng
from fednorm.core.method import Memory, Phase, Progress
from fednorm.core.state import Kind, Tree
from fednorm.data.batches import UNION
from fednorm.engines.base import Job, Outcome, start_views
from fednorm.engines.choose import ENGINES as ENGINES
from fednorm.engines.choose import close_engine, make_engine
from fednorm.engines.ranks import Alone
from fednorm.engines.stack.device_stack import LateReports, Task
from fednorm.engines.stack.slot import StackSlot, allocate_slot
from fednorm.engines.stack.stacked import StackedEngine
from fednorm.errors import ConfigError, DivergedError, FednormError, QuorumError
from fednorm.halves.merging import DOWN, UP, Stacks, flaws, keys_with, merge_updates, not_finite
from fednorm.pieces.weights import Report
from fednorm.running.config import differences, to_dict
from fednorm.running.in_step import play_together
from fednorm.running.plan import Plan
from fednorm.running.records import RoundRow as Row
from fednorm.running.records import new_row
from fednorm.running.store import ClientState, Store, to_device
from fednorm.scoring.evaluate import Scores, evaluate

CHECKPOINT_SECONDS = 2.0
"""Time between two checkpoints where the config names no number of rounds."""


def set_precision(plan: Plan) -> None:
    """Let float32 be rounded to tf32 inside products only where the config allows it."""
    torch.backends.cuda.matmul.allow_tf32 = plan.config.engine.precision != "fp32"
    torch.backends.cudnn.allow_tf32 = plan.config.engine.precision != "fp32"


def sample(plan: Plan, round: int) -> list[int]:
    """The clients of a round, ascending: all, or a keyed draw without replacement."""
    if plan.method.data == "union":
        return [UNION]
    clients = plan.federation.training_clients
    if plan.cohort_size == len(clients):
        return list(clients)
    drawn = rng.subset(rng.key(plan.config.seed, "cohort", round), len(clients), plan.cohort_size)
    return [clients[place] for place in drawn]


@dataclass(frozen=True)
class Wish:
    """An exchange that a run asks for. Without `keep` the clients' own state is left alone: a test changes nothing."""

    place: tuple[str, int, int]
    """where the method has the phase: in a stage, at the finish or as the query, and its number"""
    phase: Phase
    number: int
    cohort: Sequence[int]
    row: Row
    keep: bool = True


Asking = Generator[Wish, Sequence[Report], Any]
"""Part of a round: it asks for exchanges and is sent what the clients report."""


@dataclass
class Held:
    """What a seat holds of a run where there is none: the server's state, and what merges remember."""

    server: Tree = field(default_factory=dict)
    memory: Tree = field(default_factory=dict)


class Run:
    """A run in progress. All that changes is here and goes into the store with every commit."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        ranks: Alone | None = None,
        allocate: Callable[[Plan], StackSlot | None] = allocate_slot,
    ) -> None:
        self.plan = plan
        self.store = store
        self.ranks = ranks or Alone()
        self.ranks.check(plan.method)
        self.ranks.hand_out(plan, store)
        set_precision(plan)
        facts = store.facts()
        if facts and facts.get("config") != to_dict(plan.config):
            changed = differences(facts.get("config", {}), to_dict(plan.config))
            raise ConfigError(f"the run was started with another config: {changed}; put it back, or start a new run")
        self.engine_name, self.engine = make_engine(plan, facts.get("engine") or self.ranks.engine(plan))
        self.round: int = facts.get("round", 0)
        self.switch_memory: Memory = facts.get("switch", {})
        self.reports: Sequence[Report] = [Report(**report) for report in facts.get("reports", [])]
        self.slot = allocate(plan) if self._stays() else None
        self._held: StackSlot | Held = self.slot or Held()
        self.server = to_device(store.tree("model"), plan.device) if facts else plan.initial()
        self.merge_memory = to_device(store.tree("memory"), plan.device) if facts else {}
        self.finished: bool = facts.get("finished", False)
        self._costs: dict[tuple[str, int, int], tuple[int, int, int]] = {}
        self.unsettled: list[tuple[Row, Sequence[Report]]] = []
        """rounds that were played, whose reports were not looked at yet"""
        self._uncommitted: list[Row] = []
        self._committed_at = time.perf_counter()
        if not facts:
            self._commit()

    def _stays(self) -> bool:
        """Whether rounds can stay on the device: one process, one stack."""
        return isinstance(self.engine, StackedEngine) and type(self.ranks) is Alone

    @property
    def server(self) -> Tree:
        """The server's tree; where rounds stay on the device, views that follow them."""
        return self._held.server

    @server.setter
    def server(self, tree: Tree) -> None:
        self._held.server = tree

    @property
    def merge_memory(self) -> Tree:
        """What merges remember from round to round."""
        return self._held.memory

    @merge_memory.setter
    def merge_memory(self, tree: Tree) -> None:
        self._held.memory = tree

    def rounds(self) -> Iterator[Row]:
        """Play the remaining rounds; each row is yielded after the round is finished and, as configured, committed."""
        for _, news in play_together([self]):
            if isinstance(news, FednormError):
                raise news
            yield news

    def stop(self) -> None:
        """Commit what was played since the last checkpoint, so that an orderly stop loses nothing."""
        self.settle(len(self.unsettled))
        if self._uncommitted:
            self._commit()

    def close(self) -> None:
        """Give back what the engine holds beside memory."""
        close_engine(self.engine)

    def play(self, number: int) -> Asking:
        """One round: asks for its exchanges, is sent the reports, and returns the round's row."""
        method, config = self.plan.method, self.plan.config
        progress = Progress(number, config.rounds)
        memory, stage = method.switch(self.switch_memory, progress, self.reports)
        cohort = sample(self.plan, number)
        row = new_row(round=number, stage=stage, clients=len(cohort))
        if len(cohort) < len(self.plan.federation.training_clients) and method.data == "each":
            row["cohort"] = cohort
        for place, phase in enumerate(method.stages[stage]):
            self.reports = yield Wish(("stage", stage, place), phase, number, cohort, row)
        last = number == config.rounds
        for place, phase in enumerate(method.finish if last else ()):
            yield Wish(("finish", 0, place), phase, number, self._everyone(phase), row)
        row["lr"] = self.plan.numbers(method.stages[stage][-1], number)["lr"]
        self.round, self.switch_memory, self.finished = number, memory, last
        if number % config.eval_every == 0 or last:
            row["eval"] = yield from self._evaluate(method.tested(stage), number, last, row)
        return row

    def settle(self, count: int) -> list[Row]:
        """Complete the rows of so many rounds with what clients reported, and find out whether all can be used."""
        rounds, self.unsettled = self.unsettled[:count], self.unsettled[count:]
        for row, reports in rounds:
            row["train_loss"] = sum(report.losses["all"] for report in reports) / len(reports)
            if isinstance(reports, LateReports):
                for client in reports.unhealthy():
                    raise diverged(f"round {row['round']}, client {client}: its update is not finite")
            self._uncommitted.append(row)
        return [row for row, _ in rounds]

    def checkpoint_is_set(self) -> bool:
        """Whether just this round ends with a checkpoint, by the config or because it is the last."""
        every = self.plan.config.engine.checkpoint_every
        return self.round == self.plan.config.rounds or (every is not None and self.round % every == 0)

    def checkpoint_is_due(self) -> bool:
        """Whether a checkpoint is set, or the last one is some seconds old where the config names no number."""
        return self.checkpoint_is_set() or (self.plan.config.engine.checkpoint_every is None and self._late())

    def commit_if_due(self) -> None:
        """A checkpoint, if it is time for one; all rounds must be settled."""
        if self.checkpoint_is_due():
            self._commit()

    def _late(self) -> bool:
        """Whether the last checkpoint is old, by one clock for all ranks, since all must take part in the next."""
        return self.ranks.tell_first(lambda: time.perf_counter() - self._committed_at > CHECKPOINT_SECONDS)

    def _everyone(self, phase: Phase) -> list[int]:
        union = phase.union or self.plan.method.data == "union"
        return [UNION] if union else list(self.plan.federation.training_clients)

    def _evaluate(self, phase: Phase, number: int, last: bool, row: Row) -> Asking:
        """Score the model, with queried statistics where the method has a query; training never sees these."""
        query = self.plan.method.query
        if query is None:
            return self._scores(phase)
        before = [{key: value.clone() for key, value in tree.items()} for tree in (self.server, self.merge_memory)]
        cost = row if last else new_row(round=number, stage=row["stage"], clients=row["clients"])
        yield Wish(("query", 0, 0), query, number, self._everyone(query), cost, keep=False)
        scores = self._scores(phase)
        if not last:
            self.server, self.merge_memory = before
        return scores

    def _scores(self, phase: Phase) -> Scores:
        if self.slot and self.slot.device_stack.holds_local:
            self._bring_home()
        self.ranks.collect(self.store)
        return evaluate(self.plan, phase, self.server, self.store) if self.ranks.first else {}

    def task(self, wish: Wish) -> Task:
        """What a wish means for the clients: the batches they go on with."""
        away = self.slot.away if self.slot else {}
        used = {client: away[client] for client in wish.cohort if client in away}
        used |= {
            client: state.steps
            for client, state in self.store.get_many([c for c in wish.cohort if c not in used]).items()
        }
        firsts = [self._first_batch(wish.phase, client, used[client]) for client in wish.cohort]
        return Task(wish.place, wish.phase, wish.number, wish.cohort, firsts, wish.keep)

    def probing(self, number: int) -> bool:
        """Whether probes look at this round's steps."""
        return bool(self.plan.probes) and number % self.plan.config.eval.probe_every == 0

    def count(self, wish: Wish, accepted: int) -> None:
        """Add to a row what an exchange cost."""
        if self.plan.method.data != "each" or wish.phase.union:
            return
        if wish.place not in self._costs:
            schema = self.plan.schema(wish.phase)
            up, down = (sum(schema[key][0].bytes for key in keys_with(schema, *policies)) for policies in (UP, DOWN))
            exchanges, extra = lockstep_cost(wish.phase, schema)
            self._costs[wish.place] = (1 + exchanges if up or down else 0, down + extra, up + extra)
        row = wish.row
        exchanges, down, up = self._costs[wish.place]
        row["exchanges"] += exchanges
        row["bytes_down"] += down * len(wish.cohort)
        row["bytes_up"] += up * accepted

    def _bring_home(self) -> None:
        """Put into the store what clients keep on the device."""
        if self.slot:
            self.slot.bring_home(self.store)

    def exchange(self, wish: Wish) -> list[Report]:
        """One exchange by the run's engine: train, refuse, merge, store, count; returns what clients report."""
        self._bring_home()
        plan, phase, number, cohort, row = self.plan, wish.phase, wish.number, wish.cohort, wish.row
        schema = plan.schema(phase)
        here = self.ranks.own(plan, cohort)
        states = self.store.get_many(here)
        starts = start_views(plan, schema, self.server, [states[client].tree for client in here])
        jobs = [
            Job(
                client,
                start,
                self._first_batch(phase, client, states[client].steps),
                plan.num_steps(client, phase),
            )
            for client, start in zip(here, starts, strict=True)
        ]
        probing = self.probing(number)
        accepted: list[Outcome] = []
        stacks: list[Stacks] = []

        def train() -> dict[str, Any]:
            """Train the clients of this process, and say in JSON values what all must know of them."""
            trained = self.engine.train(phase, number, jobs, probing) if jobs else iter(())
            outcomes = sorted(trained, key=lambda o: o.update.client)
            stacks.append(Stacks([outcome.update for outcome in outcomes]))
            found = flaws([outcome.update for outcome in outcomes], schema, stacks[0])
            why = {o.update.client: each or _local_flaw(o) for o, each in zip(outcomes, found, strict=True)}
            accepted.extend(outcome for outcome in outcomes if not why[outcome.update.client])
            sent = [outcome.update for outcome in accepted]
            return {
                "refused": [(client, reason) for client, reason in why.items() if reason],
                "reports": [vars(update.report) for update in sent],
                "seen": [(o.update.client, dict(o.seen)) for o in accepted],
            }

        told = self.ranks.tell_all(train)
        self._admit({client: why for each in told for client, why in each["refused"]}, len(cohort), number, row)
        reports = [Report(**report) for each in told for report in each["reports"]]
        updates = [outcome.update for outcome in accepted]
        sent = stacks[0] if len(updates) == len(stacks[0].updates) else None
        with self.ranks.merge([len(each["reports"]) for each in told]):
            self.server, self.merge_memory = merge_updates(
                phase, self.server, updates, schema, self.merge_memory, reports, sent
            )
        self.ranks.confirm(f"phase '{phase.name}' of '{plan.method.name}'", self.server)
        steps = {job.client: job.num_steps for job in jobs}
        for outcome in accepted:
            client = outcome.update.client
            before = states[client]
            used = before.steps + (steps[client] if phase.consumes_batches else 0)
            if wish.keep and (outcome.kept or phase.consumes_batches):
                self.store.put(client, ClientState(used, {**before.tree, **outcome.kept}))
                if self.slot:
                    self.slot.forget(client)
        self.count(wish, len(reports))
        if probing:
            row.setdefault("probes", {})[phase.name] = {client: seen for each in told for client, seen in each["seen"]}
        return reports

    def _first_batch(self, phase: Phase, client: int, used: int) -> int:
        """The batch a client goes on with; a pass over its data starts with an epoch, to see every example once."""
        return used - used % self.plan.batches.per_epoch(client) if phase.work == "epoch" else used

    def _admit(self, refused: Mapping[int, str], trained: int, number: int, row: Row) -> None:
        """Go on without the refused clients, whose own state is not advanced either, or end the run."""
        if not refused:
            return
        quorum = self.plan.config.engine.quorum
        client, why = next(iter(refused.items()))
        where = f"round {number}, client {client}: {why}"
        if quorum is None:
            raise diverged(where)
        usable = trained - len(refused)
        if usable < quorum * trained or not usable:
            raise QuorumError(f"{usable} of {trained} updates usable in {where}; engine.quorum={quorum} needs more")
        row["refused"] = {**row.get("refused", {}), **refused}

    def _commit(self) -> None:
        self._bring_home()
        self.ranks.collect(self.store)
        facts = {
            "config": to_dict(self.plan.config),
            "engine": self.engine_name,
            "switch": self.switch_memory,
            "reports": [vars(report) for report in self.reports],
            "finished": self.finished,
        }
        trees: dict[str, Tree] = {"model": self.server, "memory": self.merge_memory}
        if self.ranks.first:
            self.store.commit(self.round, trees, facts, self._uncommitted)
        self._uncommitted = []
        self._committed_at = time.perf_counter()


def diverged(where: str) -> DivergedError:
    """The error of a run whose numbers are numbers no longer."""
    return DivergedError(f"diverged in {where}; lower train.lr, or set engine.quorum to go on without the client")


def lockstep_cost(phase: Phase, schema: Any) -> tuple[int, int]:
    """(exchanges, bytes a client in each direction) of the steps a cohort takes together.

    In each batch norm the cohort agrees on the mean, then the variance, then on the gradients of both: 3 exchanges of
    4 numbers a channel in all (FedTAN).
    """
    means = [entry for entry, _ in schema.values() if entry.kind is Kind.STATISTIC and entry.part == "running_mean"]
    return 3 * phase.lockstep * len(means), 4 * phase.lockstep * sum(entry.bytes for entry in means)


def _local_flaw(outcome: Outcome) -> str | None:
    bad = not_finite(outcome.kept)
    return f"'{bad}' (local) is not finite" if bad else None
