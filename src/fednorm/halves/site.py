"""One client's half of a method: it trains on its own data, wherever it runs, and needs no other client."""

from __future__ import annotations

import copy
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import nn

from fednorm import __version__
from fednorm.core.optim import Grouped, Stepping
from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.probe import Probe
from fednorm.core.state import Tree
from fednorm.core.step import StepSpec
from fednorm.core.task import AnyTask
from fednorm.core.world import steps_done
from fednorm.data.batches import Batches
from fednorm.data.pool import Pool, own_pool
from fednorm.errors import ConfigError, StateError, WireError
from fednorm.halves.agreed import Agreed
from fednorm.halves.habits import NO_HABITS, Habits, find_habits
from fednorm.halves.messages import Hello, Request, Scores, Terms, Update
from fednorm.halves.mine import ClientState, Mine
from fednorm.halves.prepared_phase import PreparedPass, PreparedPhase
from fednorm.halves.terms import agree, model_digest, refuse_other_terms
from fednorm.halves.training import Job, Trainer
from fednorm.halves.wire import check_request
from fednorm.scoring.scores import Examples, Scorer

log = logging.getLogger("fednorm.site")


@dataclass(frozen=True, kw_only=True)
class Sites(Agreed):
    """Clients that train here: one at a site, all of them in a simulator, where an engine may train many at once."""

    batches: Batches
    task: AnyTask
    probes: tuple[Probe, ...] = ()
    habits: Habits = NO_HABITS

    def step_spec(self, each: PreparedPass, probing: bool = False, mapped: bool = False) -> StepSpec:
        """The static part of a step; `mapped` for one that is mapped over clients."""
        return StepSpec(
            model=self.prepared.model,
            facts=self.prepared.facts,
            rule=each.rule,
            optimizer=self.optimizer if mapped else self._stepping,
            task=self.task,
            tied=self.prepared.tied,
            keyed=self.prepared.keyed,
            drawing=self.habits.drawing(mapped),
            factors=each.factors,
            spared=frozenset() if self.work.decay_vectors else self.prepared.vectors,
            probes=self.probes if probing else (),
        )

    @property
    def _stepping(self) -> Stepping:
        """The optimizer for one client at a time: on a CPU calls are what small tensors cost."""
        together = self.optimizer.together if self.device.type == "cpu" else None
        return Grouped(together, self.optimizer.buffers) if together else self.optimizer

    def steps(self, client: int, phase: PreparedPhase, share: float = 1.0) -> tuple[int, ...]:
        """Steps a client takes in each pass of a phase, where a slow one does a share of its local work."""
        return tuple(self._steps_of(client, each, share) for each in phase.passes)

    def num_steps(self, client: int, phase: PreparedPhase, share: float = 1.0) -> int:
        """Steps a client takes in a phase."""
        return sum(self.steps(client, phase, share))

    def _steps_of(self, client: int, each: PreparedPass, share: float) -> int:
        steps = each.steps(self.work, self.batches.per_epoch(client))
        return steps if share == 1 or each.is_fixed else steps_done(steps, share)

    def first_batch(self, phase: PreparedPhase, client: int, used: int) -> int:
        """The batch a client goes on with; a pass over its data starts with an epoch, to see every example once."""
        return used - used % self.batches.per_epoch(client) if phase.phase.work == "epoch" else used

    def job(
        self,
        phase: PreparedPhase,
        client: int,
        start: Tree,
        used: int,
        numbers: Mapping[str, float],
        share: float = 1.0,
    ) -> Job:
        """A client's work in a phase, after this many batches of its life, by the numbers of a round."""
        return Job(client, start, self.first_batch(phase, client, used), self.steps(client, phase, share), numbers)

    def with_own_model(self) -> Self:
        """The same with a copy of the model: layers may count their calls, and an engine may replace some."""
        return replace(self, prepared=replace(self.prepared, model=copy.deepcopy(self.prepared.model)))

    @cached_property
    def scorer(self) -> Scorer:
        return Scorer(
            model=self.prepared.model,
            keys=self.prepared.facts.entries.keys(),
            tied=self.prepared.tied,
            task=self.task,
            inputs=self.batches.inputs,
            chunk=self.work.chunk,
            batch_size=self.work.batch_size,
            device=self.device,
        )


def state_after(phase: PreparedPhase, before: ClientState, steps: int, kept: Tree) -> ClientState | None:
    """A client's state after its work of some steps counts; None where the phase leaves it as it was."""
    consumes = phase.phase.consumes_batches
    if not (kept or consumes):
        return None
    return ClientState(before.steps + (steps if consumes else 0), {**before.tree, **kept})


class Site:
    """One client of a federation, at the terms it agreed on with the server.

    `work` and `score` are functions of a request and of what the client keeps; nothing is remembered in between, so a
    request that comes twice is answered twice with the same bytes. The caller keeps `Mine` where it survives. With
    `any_start`, what is this client's own may begin with other values than the server's model has.
    """

    def __init__(
        self,
        terms: Terms,
        client: int,
        model: nn.Module,
        train: Examples,
        *,
        task: AnyTask,
        test: Examples | None = None,
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
        device: torch.device | str = "cpu",
        allow_noop: bool = False,
        lost_state: Literal["refuse", "anew"] = "refuse",
        any_start: bool = False,
    ) -> None:
        where = torch.device(device)
        agreed = agree(model, terms.method, terms.work, weights=terms.weights, device=where, allow_noop=allow_noop)
        refuse_other_terms(terms, agreed, task.name, any_start=any_start)
        x, y = (part.to(where) for part in train)
        self.terms = terms
        self.client = client
        self.lost_state = lost_state
        self.sites = Sites(
            prepared=agreed.prepared,
            work=agreed.work,
            optimizer=agreed.optimizer,
            device=where,
            batches=batches_of(own_pool(client, x, y, mean=mean, std=std), agreed),
            task=task,
        )
        if not len(self.sites.batches.rows(client)):
            raise ConfigError(f"client {client} has no training examples; give it data, or a lower val_fraction")
        self.sites = replace(self.sites, habits=find_habits(self.sites))
        self._test = None if test is None else tuple(part.to(where) for part in test)
        self._trainer = Trainer(self.sites)

    @staticmethod
    def hello(name: str, model: nn.Module, num_examples: int) -> Hello:
        """How a client with this model and this many training examples introduces itself."""
        versions = {"fednorm": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
        return Hello(name=name, num_examples=num_examples, schema=model_digest(model), versions=versions)

    def answer(self, request: Request, mine: Mine) -> tuple[Update | Scores, Mine]:
        """Do what a request asks for, work or a test: what goes to the server, and what this client keeps."""
        if request.purpose is Purpose.SCORE:
            return self._score(request, mine)
        return self.work(request, mine)

    def work(self, request: Request, mine: Mine) -> tuple[Update, Mine]:
        """Train, or take statistics: what goes to the server, and what this client keeps.

        What it keeps counts once a later request names this exchange as accepted.
        """
        phase = self._checked(request)
        if request.purpose is Purpose.SCORE:
            raise self._refused(request, "it asks for a test, not for work")
        mine = self.settled(request, mine)
        before = mine.accepted
        start = phase.start(request.tree, before.tree, self.sites.device)
        job = self.sites.job(phase, self.client, start, before.steps, request.numbers)
        (done,) = self._trainer.train(phase, [job], request.probing)
        update = replace(done.update, address=request.address)
        after = state_after(phase, before, job.num_steps, done.kept)
        if request.purpose is Purpose.QUERY or after is None:
            return update, mine
        return update, mine.answered(request.address.number, after)

    def score(self, request: Request, mine: Mine) -> Scores:
        """Sums of this client's model on its own test data, and on what it set aside for validation."""
        return self._score(request, mine)[0]

    def _score(self, request: Request, mine: Mine) -> tuple[Scores, Mine]:
        phase = self._checked(request)
        if request.purpose is not Purpose.SCORE:
            raise self._refused(request, "it asks for work, not for a test")
        mine = self.settled(request, mine)
        state = phase.start(request.tree, mine.accepted.tree, self.sites.device)
        pool = self.sites.batches.pool
        held = self.sites.batches.split(self.client)[1]
        sums: dict[str, Mapping[str, Any]] = {}
        if self._test is not None:
            sums["own_client"] = self.sites.scorer.rows(state, (self._test[0], self._test[1]))
        if len(held):
            sums["validation"] = self.sites.scorer.rows(state, pool.examples, held)
        return Scores(client=self.client, address=request.address, sums=sums), mine

    def settled(self, request: Request, mine: Mine) -> Mine:
        """What this client keeps as of the exchange that a request goes on from.

        A client whose state was lost is refused, or with `lost_state="anew"` goes on as one that has just come.
        """
        try:
            return mine.as_of(request.accepted)
        except StateError as lost:
            if self.lost_state == "refuse":
                raise
            log.warning("client %d starts anew: %s", self.client, lost)
            return Mine(exchange=request.accepted)

    def _checked(self, request: Request) -> PreparedPhase:
        """The phase a request names, once it is sure that the request is for this client and these terms."""
        if request.client != self.client:
            raise self._refused(
                request, f"a request for client {request.client} came to client {self.client}; send it there"
            )
        method = self.sites.method
        scored = [PhaseId(Purpose.SCORE, stage) for stage in range(len(method.stages))]
        if request.phase not in (*method.all_phases, *scored):
            raise self._refused(request, f"'{self.terms.method}' has no phase {request.phase}")
        phase = self.sites.phase(request.phase)
        check_request(request, self.terms.digest, {key: phase.schema[key][0] for key in phase.sent})
        return phase

    def _refused(self, request: Request, why: str) -> WireError:
        return WireError(why, client=self.client, exchange=request.address.number)


def batches_of(pool: Pool, agreed: Agreed, *, cohort: int = 1) -> Batches:
    """The batches of a pool's clients at the local work agreed on; centralized training joins those of a cohort."""
    work = agreed.work
    return Batches(
        pool=pool,
        seed=work.seed,
        batch_size=work.batch_size,
        union_batch_size=work.batch_size * cohort,
        augmentation=work.augmentation,
        val_fraction=work.val_fraction,
        dtype=getattr(torch, work.dtype),
        remembered=max(4096, 2 * cohort),
    )
