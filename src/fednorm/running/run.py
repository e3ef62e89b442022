"""A run in progress: what the server's half decides, played by an engine, scored and committed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import cast

from fednorm.core.phases import Purpose
from fednorm.core.report import Report
from fednorm.engines.base import Awaited, Engine, Order, Played
from fednorm.engines.choose import make_engine
from fednorm.engines.ranks import Alone
from fednorm.errors import FednormError
from fednorm.halves.exchange import diverged
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.running.cohorts import averaged_clients
from fednorm.running.config import to_dict
from fednorm.running.evaluate import Scores, evaluate, metric_facts
from fednorm.running.failing import WorldServer
from fednorm.running.given import refuse_other_config
from fednorm.running.in_step import play_in_step
from fednorm.running.keeping import Keeper
from fednorm.running.plan import Plan
from fednorm.running.played import PlayedRun, losses_of
from fednorm.running.records import ROW_VERSION, Ran
from fednorm.running.records import RoundRow as Row
from fednorm.running.store import Store, to_device

CHECKPOINT_SECONDS = 2.0
"""Time between two checkpoints where the config names no number of rounds."""

Asking = Generator[Order, Played, None]
"""A round: it asks for exchanges and is sent what came of them."""

MakeEngine = Callable[[Plan, str | None, bool], tuple[str, Engine]]
"""(plan, the engine it was begun with, whether rounds may stay on the device) -> the engine's name, and the engine."""


def engine_of_its_own(plan: Plan, remembered: str | None, stays: bool) -> tuple[str, Engine]:
    """An engine for one run alone."""
    return make_engine([plan], plan.config.engine, cohort=plan.cohort_size, remembered=remembered, stays=stays)


class Run(PlayedRun):
    """A run in progress. All that changes is here and goes into the store with every commit."""

    unit = "round"

    def __init__(
        self, plan: Plan, store: Store, ranks: Alone | None = None, make: MakeEngine = engine_of_its_own
    ) -> None:
        self.plan = plan
        self.store = store
        self.ranks = ranks or Alone()
        self.ranks.check(plan.method)
        self.ranks.hand_out(plan.federation.training_clients, store)
        facts = store.facts()
        if facts:
            refuse_other_config(facts["config"], plan.config)
        # Rounds stay on the device only where one process plays them all.
        remembered, alone = facts.get("engine") or self.ranks.engine(plan.device), type(self.ranks) is Alone
        self.engine_name, self.engine = make(plan, remembered, alone)
        self._ran_before: Ran | None = facts.get("ran")
        stored = {name: to_device(store.tree(name), plan.device) for name in ("model", "memory") if facts}
        self.server = WorldServer(
            plan,
            plan.federation.training_clients,
            world=plan.world,
            per_round=plan.cohort_size,
            quorum=plan.config.engine.quorum,
            retries=plan.config.engine.retries,
            norm_factor=plan.config.engine.norm_factor,
            score_every=plan.config.eval_every,
            held=self.engine.hold(plan, stored.get("model") or plan.initial(), stored.get("memory", {})),
            keep_reported=False,  # the store has them, with the client's own state
        )
        if facts:
            self.server.load(facts)
        self.keeper = Keeper(plan, store, facts)
        self.unsettled: list[tuple[Row, Sequence[Report], list[Awaited]]] = []
        """rounds that were played, whose reports, and those of all their exchanges, were not looked at yet"""
        self._uncommitted: list[Row] = []
        self._committed_at = self._settled_at = time.perf_counter()
        self.told_seconds = math.inf
        """of a round, in the row that was told last"""
        if not facts:
            self._commit()

    @property
    def round(self) -> int:
        """Rounds that are over."""
        return self.server.round

    @property
    def finished(self) -> bool:
        """Whether the last round is."""
        return self.server.finished

    def rounds(self) -> Generator[Row]:
        """Play the remaining rounds; each row is yielded after the round is finished and, as configured, committed."""
        with closing(play_in_step([self])) as course:  # an interrupt inside a forgotten generator would be lost
            for _, news in course:
                if isinstance(news, FednormError):
                    raise news
                yield news

    def stop(self) -> None:
        """Commit what was played since the last checkpoint, so that an orderly stop loses nothing."""
        self.settle(len(self.unsettled))
        if self._uncommitted:
            self._commit()

    def play(self) -> Asking:
        """The next round: asks for its exchanges and is sent what came of them; then its row waits to be settled."""
        server, number = self.server, self.server.round + 1
        awaited: list[Awaited] = []
        while server.round < number:
            exchange = server.open()
            if exchange is None:
                break
            if exchange.purpose is Purpose.SCORE:
                server.row["eval"] = self._scores(exchange.phase)
                server.row["metric"] = metric_facts(self.plan.task)
                server.note_scores()
            else:
                played = yield Order(exchange, server, self.plan, self.store, self.ranks, self._probing(number))
                server.note(played.reports, played.probed, played.joined)
                if isinstance(played.reports, Awaited):
                    awaited.append(played.reports)
        self.unsettled.append((cast(Row, {"version": ROW_VERSION, **server.row}), server.reports, awaited))

    def _probing(self, number: int) -> bool:
        """Whether probes look at this round's steps."""
        return bool(self.plan.probes) and number % self.plan.config.eval.probe_every == 0

    def _scores(self, phase: PreparedPhase) -> Scores:
        self._bring_home()
        self.ranks.collect(self.store)
        clients = averaged_clients(self.plan, self.server.row["round"])
        tree, stack = self.server.tree, self.stack_scorer
        scores = evaluate(self.plan, phase, tree, self.store, clients, stack) if self.ranks.first else {}
        if self.plan.config.keep == "best" and self.ranks.tell_first(lambda: self.keeper.is_best(scores)):
            self.keeper.keep_best(self.server.row["round"], self.server.stage, self.server.tree, scores)
        return scores

    def settle(self, count: int) -> list[Row]:
        """Complete the rows of this many rounds with what clients reported, and find out whether all can be used."""
        rounds, self.unsettled = self.unsettled[:count], self.unsettled[count:]
        now = time.perf_counter()
        for row, reports, awaited in rounds:
            row |= cast(Row, losses_of(reports))
            # Whoever was told of the last rounds may have taken their time before they stop the run.
            row["seconds"] = min(self.told_seconds, round((now - self._settled_at) / len(rounds), 6))
            for each in awaited:
                for client, why in each.flaws(self.server.norm_factor).items():
                    raise diverged(row["round"], f"round {row['round']}, client {client}: {why}")
            self._uncommitted.append(row)
        self._settled_at = now
        return [row for row, _, _ in rounds]

    def send_reports(self) -> None:
        """Let all reports that are still on the device come to the host, behind the rounds under way."""
        for _, _, awaited in self.unsettled:
            for each in awaited:
                each.send()

    @property
    def is_ahead(self) -> bool:
        """Whether the last round's reports are still on the device."""
        return isinstance(self.server.reports, Awaited)

    def checkpoint_is_set(self) -> bool:
        """Whether just this round ends with a checkpoint, by the config or because it is the last."""
        every = self.plan.config.engine.checkpoint_every
        return self.server.finished or (bool(every) and self.round % every == 0) or self.keeper.is_due(self.round)

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

    def _bring_home(self) -> None:
        """Put into the store what clients keep on the device."""
        self.engine.bring_home(self.store, self.server.held)

    def _commit(self) -> None:
        self._bring_home()
        self.ranks.collect(self.store)
        facts, trees = self.server.state()
        facts |= {"config": to_dict(self.plan.config), "engine": self.engine_name, "finished": self.server.finished}
        best = self.keeper.take_best(facts, trees)
        facts["ran"] = self.ran()
        if self.ranks.first:
            self.keeper.write_model(self.round, self.server.stage, self.server.tree)
            self.store.commit(facts.pop("round"), trees, facts, self._uncommitted, best)
        self._uncommitted = []
        self._committed_at = time.perf_counter()
