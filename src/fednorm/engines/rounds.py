"""The course of a run, the same for every engine: draw clients, exchange, merge, score, commit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fednorm import rng
from fednorm.batches import UNION
from fednorm.config import differences, to_dict
from fednorm.engines.base import Job, Outcome, start_state
from fednorm.engines.choose import ENGINES as ENGINES
from fednorm.engines.choose import close_engine, make_engine
from fednorm.errors import ConfigError, DivergedError, QuorumError
from fednorm.evaluate import Scores, evaluate
from fednorm.method import Memory, Phase, Progress
from fednorm.pieces.weights import Report
from fednorm.plan import Plan
from fednorm.server import DOWN, UP, flaw, keys_with, merge_updates
from fednorm.state import Kind, Tree, tree_bytes
from fednorm.store import ClientState, Store, to_device

Row = dict[str, Any]


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


class Run:
    """A run in progress. All that changes is here and goes into the store with every commit."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan = plan
        self.store = store
        set_precision(plan)
        facts = store.facts()
        if facts and facts.get("config") != to_dict(plan.config):
            changed = differences(facts.get("config", {}), to_dict(plan.config))
            raise ConfigError(f"the run was started with another config: {changed}; put it back, or start a new run")
        self.engine_name, self.engine = make_engine(plan, facts.get("engine"))
        self.round: int = facts.get("round", 0)
        self.switch_memory: Memory = facts.get("switch", {})
        self.reports = [Report(**report) for report in facts.get("reports", [])]
        self.server = to_device(store.tree("model"), plan.device) if facts else plan.initial()
        self.merge_memory = to_device(store.tree("memory"), plan.device) if facts else {}
        self.finished: bool = facts.get("finished", False)
        self._uncommitted: list[Row] = []
        if not facts:
            self._commit()

    def rounds(self) -> Iterator[Row]:
        """Play the remaining rounds; each row is yielded after the round is finished and, as configured, committed."""
        total = self.plan.config.rounds
        try:
            while self.round < total:
                started = time.perf_counter()
                row = self._play(self.round + 1)
                row["seconds"] = round(time.perf_counter() - started, 6)
                self._uncommitted.append(row)
                if self.round % self.plan.config.engine.checkpoint_every == 0 or self.round == total:
                    self._commit()
                yield row
        finally:
            close_engine(self.engine)

    def stop(self) -> None:
        """Commit what was played since the last checkpoint, so that an orderly stop loses nothing."""
        if self._uncommitted:
            self._commit()

    def _play(self, number: int) -> Row:
        method, config = self.plan.method, self.plan.config
        progress = Progress(number, config.rounds)
        memory, stage = method.switch(self.switch_memory, progress, self.reports)
        cohort = sample(self.plan, number)
        row: Row = {"round": number, "stage": stage, "clients": len(cohort)}
        row |= dict.fromkeys(("exchanges", "bytes_up", "bytes_down"), 0)
        if len(cohort) < len(self.plan.federation.training_clients) and method.data == "each":
            row["cohort"] = cohort
        for phase in method.stages[stage]:
            self.reports = self._exchange(phase, number, cohort, row)
        last = number == config.rounds
        for phase in method.finish if last else ():
            self._exchange(phase, number, self._everyone(phase), row)
        row["lr"] = self.plan.numbers(method.stages[stage][-1], number)["lr"]
        row["train_loss"] = sum(report.losses["all"] for report in self.reports) / len(self.reports)
        self.round, self.switch_memory, self.finished = number, memory, last
        if number % config.eval_every == 0 or last:
            row["eval"] = self._evaluate(method.tested(stage), number, last, row)
        return row

    def _everyone(self, phase: Phase) -> list[int]:
        union = phase.union or self.plan.method.data == "union"
        return [UNION] if union else list(self.plan.federation.training_clients)

    def _evaluate(self, phase: Phase, number: int, last: bool, row: Row) -> Scores:
        """Score the model, with queried statistics where the method has a query; training never sees these."""
        query = self.plan.method.query
        if query is None:
            return evaluate(self.plan, phase, self.server, self.store)
        before = self.server, self.merge_memory
        cost: Row = row if last else dict.fromkeys(("exchanges", "bytes_up", "bytes_down"), 0)
        self._exchange(query, number, self._everyone(query), cost, keep=False)
        scores = evaluate(self.plan, phase, self.server, self.store)
        if not last:
            self.server, self.merge_memory = before
        return scores

    def _exchange(self, phase: Phase, number: int, cohort: Sequence[int], row: Row, keep: bool = True) -> list[Report]:
        """One exchange with some clients: train, refuse, merge, store, count; returns what clients report.

        Without `keep` it leaves the clients' own state alone, since a test must not change what is tested.
        """
        plan = self.plan
        schema = plan.schema(phase)
        states = self.store.get_many(cohort)
        jobs = [
            Job(
                client,
                start_state(plan, schema, self.server, states[client].tree),
                self._first_batch(phase, client, states[client].steps),
                plan.num_steps(client, phase),
            )
            for client in cohort
        ]
        probing = bool(plan.probes) and number % plan.config.eval.probe_every == 0
        outcomes = sorted(self.engine.train(phase, number, jobs, probing), key=lambda o: o.update.client)
        accepted = self._admit(outcomes, schema, number, row)
        updates = [outcome.update for outcome in accepted]
        self.server, self.merge_memory = merge_updates(phase, self.server, updates, schema, self.merge_memory)
        steps = {job.client: job.num_steps for job in jobs}
        for outcome in accepted:
            client = outcome.update.client
            before = states[client]
            used = before.steps + (steps[client] if phase.advances else 0)
            if keep and (outcome.kept or phase.advances):
                self.store.put(client, ClientState(used, {**before.tree, **outcome.kept}))
        if plan.method.data == "each" and not phase.union:
            down = tree_bytes({key: self.server[key] for key in keys_with(schema, *DOWN)})
            exchanges, extra = lockstep_cost(phase, schema)
            row["exchanges"] += 1 + exchanges if keys_with(schema, *UP, *DOWN) else 0
            row["bytes_down"] += (down + extra) * len(cohort)
            row["bytes_up"] += sum(tree_bytes(u.shared) + tree_bytes(u.reported) + extra for u in updates)
        if probing:
            row.setdefault("probes", {})[phase.name] = {o.update.client: dict(o.seen) for o in accepted}
        return [update.report for update in updates]

    def _first_batch(self, phase: Phase, client: int, used: int) -> int:
        """The batch a client goes on with; a pass over its data starts with an epoch, to see every example once."""
        return used - used % self.plan.batches.per_epoch(client) if phase.work == "epoch" else used

    def _admit(self, outcomes: Sequence[Outcome], schema: Any, number: int, row: Row) -> list[Outcome]:
        """The outcomes that can be used; a refused client's own state is not advanced either."""
        flaws = {outcome.update.client: _flaw(outcome, schema) for outcome in outcomes}
        refused = {client: why for client, why in flaws.items() if why}
        if not refused:
            return list(outcomes)
        quorum = self.plan.config.engine.quorum
        client, why = next(iter(refused.items()))
        where = f"round {number}, client {client}: {why}"
        if quorum is None:
            raise DivergedError(
                f"diverged in {where}; lower train.lr, or set engine.quorum to go on without the client"
            )
        accepted = [outcome for outcome in outcomes if outcome.update.client not in refused]
        if len(accepted) < quorum * len(outcomes) or not accepted:
            raise QuorumError(
                f"{len(accepted)} of {len(outcomes)} updates usable in {where}; engine.quorum={quorum} needs more"
            )
        row["refused"] = {**row.get("refused", {}), **refused}
        return accepted

    def _commit(self) -> None:
        facts = {
            "config": to_dict(self.plan.config),
            "engine": self.engine_name,
            "switch": self.switch_memory,
            "reports": [vars(report) for report in self.reports],
            "finished": self.finished,
        }
        trees: dict[str, Tree] = {"model": self.server, "memory": self.merge_memory}
        self.store.commit(self.round, trees, facts, self._uncommitted)
        self._uncommitted = []


def lockstep_cost(phase: Phase, schema: Any) -> tuple[int, int]:
    """(exchanges, bytes a client in each direction) of the steps a cohort takes together.

    In each batch norm the cohort agrees on the mean, then the variance, then on the gradients of both: 3 exchanges of
    4 numbers a channel in all (FedTAN).
    """
    means = [entry for entry, _ in schema.values() if entry.kind is Kind.STATISTIC and entry.part == "running_mean"]
    return 3 * phase.lockstep * len(means), 4 * phase.lockstep * sum(entry.bytes for entry in means)


def _flaw(outcome: Outcome, schema: Any) -> str | None:
    found = flaw(outcome.update, schema)
    if found is None and any(not bool(value.isfinite().all()) for value in outcome.kept.values()):
        bad = next(key for key, value in outcome.kept.items() if not bool(value.isfinite().all()))
        return f"'{bad}' (local) is not finite"
    return found
