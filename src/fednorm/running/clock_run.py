"""A run in virtual time: what the server's half decides as updates come, scored and committed between two instants."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from fednorm.core.state import Tree
from fednorm.core.user_code import UserCode
from fednorm.engines.clock.schedule import digest_of_file
from fednorm.engines.clock.simulation import Simulation
from fednorm.engines.machine import current, precision
from fednorm.engines.ranks import Alone
from fednorm.errors import CheckpointError, ConfigError, QuorumError
from fednorm.halves.arrivals import ArrivalServer
from fednorm.halves.exchange import Held, diverged
from fednorm.halves.landing import Arrival
from fednorm.running.config import to_dict
from fednorm.running.evaluate import evaluate, metric_facts
from fednorm.running.given import refuse_other_config
from fednorm.running.keeping import Keeper
from fednorm.running.known import known_context
from fednorm.running.on_clock import Clock
from fednorm.running.outside import ask_outside, due_outside
from fednorm.running.plan import Plan
from fednorm.running.played import PlayedRun, losses_of
from fednorm.running.records import ROW_VERSION, Ran
from fednorm.running.records import RoundRow as Row
from fednorm.running.run import CHECKPOINT_SECONDS, MakeEngine, Run, engine_of_its_own
from fednorm.running.store import Store, to_device

COMMIT_SHARE = 0.1
"""Of the time, how much checkpoints may take where the config names no number of versions between them."""


class ClockRun(PlayedRun):
    """A run on a clock. All that changes is here and goes into the store with every commit, at any event."""

    unit = "version"

    def __init__(
        self, plan: Plan, store: Store, ranks: Alone | None = None, make: MakeEngine = engine_of_its_own
    ) -> None:
        if type(ranks or Alone()) is not Alone:
            raise ConfigError(f"'{plan.name}' is on a clock, which one process keeps; run it without torchrun")
        self.plan, self.store, self.clock = plan, store, cast(Clock, plan.clock)
        facts, self._times = store.facts(), digest_of_file(self.clock.schedule)
        if facts:
            refuse_other_config(facts["config"], plan.config)
            self._refuse_other_times(facts.get("times", self._times))
        self.engine_name, self.engine = make(plan, facts.get("engine"), False)
        self._ran_before: Ran | None = facts.get("ran")
        strategy, config = self.clock.strategy, plan.config
        self.server = ArrivalServer(
            plan,
            plan.federation.training_clients,
            strategy,
            norm_factor=config.engine.norm_factor,
            keep_reported=False,  # the store has them, with the client's own state
            context=known_context(plan) if strategy.revise else None,
        )
        self.simulation = Simulation(
            self.server,
            plan,
            self.engine,
            store,
            self.clock.schedule,
            concurrency=self.clock.concurrency,
            tolerant=config.engine.quorum is not None,
        )
        self.keeper = Keeper(plan, store, facts)
        self._written: dict[str, Tree] = {}
        """trees as the store has them; one that is the same object is not written again"""
        if facts:
            self._load(facts)
        self._refused = deque[bool](facts.get("refused", []), maxlen=self.clock.concurrency)
        """of the last updates, which could not be used"""
        self._uncommitted: list[Row] = []
        self._committed_at = self._told_at = time.perf_counter()
        self._commit_seconds = 0.0
        if not facts:
            self._commit()

    @property
    def round(self) -> int:
        """Versions that were made."""
        return self.server.version

    @property
    def finished(self) -> bool:
        """Whether the last version is."""
        return self.server.finished

    def rounds(self) -> Generator[Row]:
        """Play on; each row is yielded after its version was made and, as configured, committed."""
        try:
            while not self.over:
                rows = self.step()
                if self._is_due(rows):
                    self._commit()
                yield from rows
        finally:
            self.close()

    def step(self) -> list[Row]:
        """Play on to the next instant at which updates come; rows of the versions they make."""
        with self._training(), self.engine.urgent():
            # One update after the other: each may make a version, which may be scored.
            rows = [self._row(each) for each in self.simulation.advance() if self._noted(each)]
        self._uncommitted += rows
        return rows

    @contextmanager
    def _training(self) -> Generator[None]:
        """In which clients may be trained, as the run is to be; errors of the user's code are told as such."""
        device, name = self.plan.device, self.plan.prepared.name
        with current(device), precision(self.plan.config.engine.precision), UserCode(name):
            yield

    def _noted(self, arrival: Arrival) -> bool:
        """Whether an update made a version; too many that cannot be used end the run."""
        quorum, client = self.plan.config.engine.quorum, arrival.client
        self._refused.append(bool(arrival.refused))
        if arrival.refused:
            where = f"version {self.round + 1}, client {client}: {arrival.refused}"
            if quorum is None:
                raise diverged(self.round + 1, where)
            there = len(self._refused) - sum(self._refused)
            if len(self._refused) == self._refused.maxlen and (not there or there < quorum * len(self._refused)):
                raise QuorumError(
                    f"{there} of the last {len(self._refused)} updates usable in {where}; "
                    f"engine.quorum={quorum} needs more"
                )
        return arrival.row is not None

    def _row(self, arrival: Arrival) -> Row:
        """The row of the version that an update completed, with its scores where it is to be scored."""
        row, version, reports = dict(arrival.row or {}), arrival.version, self.server.reports
        row |= {**losses_of(reports), "time": self.simulation.time}
        last = version == self.plan.work.rounds
        tested = last or version % self.plan.config.eval_every == 0
        held = self._asked_outside(row, version, tested, last)
        if tested:
            phase = self.plan.evaluated(row["stage"])
            scores = evaluate(self.plan, phase, held.tree, self.store, stack=self.stack_scorer)
            row |= {"eval": scores, "metric": metric_facts(self.plan.task)}
            if self.plan.config.keep == "best" and self.keeper.is_best(scores):
                self.keeper.keep_best(version, row["stage"], held.tree, scores)
        self.keeper.write_model(version, row["stage"], self.server.tree)
        now = time.perf_counter()
        row["seconds"], self._told_at = round(now - self._told_at, 6), now
        return cast(Row, {"version": ROW_VERSION, **row})

    def _asked_outside(self, row: dict[str, Any], version: int, tested: bool, last: bool) -> Held:
        """What the server holds for a test, after what the method asks of all clients; it costs no virtual time."""
        ids = due_outside(self.plan, version, tested)
        if not ids:
            return self.server.held
        held, cost = ask_outside(self.plan, self.store, self.engine, self.server.held, version, row["stage"], ids)
        for name in ("exchanges", "bytes_up", "bytes_down"):
            row[name] += cost[name]
        if last:
            self.server.held = held
        return held

    def stop(self) -> None:
        """Commit what was played since the last checkpoint, so that an orderly stop loses nothing."""
        self._commit()

    def _is_due(self, rows: list[Row]) -> bool:
        """Whether it is time for a checkpoint: by the config, after the last version, or since some seconds passed."""
        every, versions = self.plan.config.engine.checkpoint_every, [row["round"] for row in rows]
        if self.server.finished or any(self.keeper.is_due(version) for version in versions):
            return True
        if every is not None:
            return every > 0 and any(version % every == 0 for version in versions)
        wait = max(CHECKPOINT_SECONDS, self._commit_seconds / COMMIT_SHARE)
        return time.perf_counter() - self._committed_at > wait

    def _refuse_other_times(self, before: str) -> None:
        if before != self._times:
            raise CheckpointError(
                f"'{self.plan.config.clock.times}' is not what it was when the run began; "
                "put the old times back, or start a new run"
            )

    def _load(self, facts: dict[str, Any]) -> None:
        """Go on from the last commit."""
        self._written = {name: self.store.tree(name) for name in self.store.tree_names() if name != "best"}
        trees = {name: to_device(tree, self.plan.device) for name, tree in self._written.items()}
        self.simulation.load(facts["clock"], trees)

    def _commit(self) -> None:
        began = time.perf_counter()
        # A model for each client under way would be most of what is written, and nobody wants to go on from there.
        over = self.server.finished and self.plan.config.engine.checkpoint_every == 0
        with self._training():  # of those under way
            clock, trees = self.simulation.state(over=over)
        facts: dict[str, Any] = {"clock": clock, "config": to_dict(self.plan.config), "engine": self.engine_name}
        facts |= {"over": over, "finished": self.server.finished, "ran": self.ran(), "refused": list(self._refused)}
        facts["times"] = self._times
        new = {name: tree for name, tree in trees.items() if tree is not self._written.get(name)}
        gone = self._written.keys() - trees.keys()
        self._written = dict(trees)
        best = self.keeper.take_best(facts, new)
        self.store.commit(self.round, new, facts, self._uncommitted, best, gone)
        self._uncommitted = []
        self._committed_at = time.perf_counter()
        self._commit_seconds = self._committed_at - began


def run_of(
    plan: Plan, store: Store, ranks: Alone | None = None, make: MakeEngine = engine_of_its_own
) -> Run | ClockRun:
    """A run of a plan, in rounds or on its clock."""
    return (Run if plan.clock is None else ClockRun)(plan, store, ranks, make)
