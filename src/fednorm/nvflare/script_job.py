"""One exchange in which a user's script trains: what it starts from, the rules in force, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fednorm.core.method import Method, Phase
from fednorm.core.report import Report, loss_summary
from fednorm.core.state import Kind, Policy, Tree, model_state
from fednorm.core.step import TrainStep
from fednorm.errors import ConfigError
from fednorm.halves.agreed import Agreed
from fednorm.halves.loop import LocalRules, load, phase_rules
from fednorm.halves.messages import Request, Update
from fednorm.halves.mine import ClientState, Mine


@dataclass
class Job:
    """A job for a script: `round` of `rounds`, counted from 1."""

    agreed: Agreed
    request: Request
    mine: Mine
    num_examples: int
    """that the script trains on"""
    per_epoch: int | None
    """steps of an epoch, where that is known"""
    key: Tensor
    """what layers that draw random numbers draw from"""
    answer: Callable[[Request, Update, Mine], None]
    """keeps what is the site's own, and sends the update"""
    sent: bool = False
    _start: Tree = field(default_factory=dict[str, Tensor])
    _rules: LocalRules | None = None

    @property
    def round(self) -> int:
        return self.request.round

    @property
    def rounds(self) -> int:
        return self.agreed.work.rounds

    @property
    def lr(self) -> float:
        """The learning rate that the server's schedule has in this round; a script may have its own."""
        return self.request.numbers["lr"]

    @contextmanager
    def training(self, optimizer: Optimizer | None = None) -> Generator[LocalRules]:
        """Train inside: the model has the server's entries and the site's own, and the phase's rules are in force.

        An optimizer that is given begins anew, as the method has it, and what the method does to gradients happens in
        its own `step()`; without one, step by `rules.step(optimizer)`.
        """
        prepared, phase = self.agreed.prepared, self.agreed.phase(self.request.phase)
        whole = phase.start(self.request.tree, self.mine.accepted.tree, torch.device("cpu"))
        self._start = {key: whole[key] for key in prepared.facts.entries}
        load(prepared.model, self._start)
        with phase_rules(prepared, phase.phase, self.key) as rules:
            self._rules = rules
            handles = _follow(rules, optimizer) if optimizer else []
            try:
                yield rules
            finally:
                for handle in handles:
                    handle.remove()

    def send(self, losses: Sequence[float] | None = None) -> None:
        """Keep what is the site's own and send what is shared, with the losses of all steps.

        They are those that `rules.loss` was given, unless others are.
        """
        rules = self._rules
        if rules is None:
            raise ConfigError(f"the job of round {self.round} was not trained; do it inside `with job.training():`")
        if self.sent:
            raise ConfigError(f"the job of round {self.round} was sent already; send each once")
        _refuse_without_rules(rules, self.agreed.method.name)
        seen = [float(each) for each in (rules.losses if losses is None else losses)]
        if not seen:
            raise ConfigError(
                f"the job of round {self.round} has no losses; train with rules.loss(loss), or send(losses=[...])"
            )
        facts, phase = self.agreed.prepared.facts, self.agreed.phase(self.request.phase)
        end = {key: value.cpu() for key, value in model_state(rules.model, facts.entries.values()).items()}
        scalars = {name: float(measure(end, self._start, facts)) for name, measure in phase.phase.measures.items()}
        summary = loss_summary(seen, self.per_epoch or len(seen))
        report = Report(self.request.client, self.num_examples, summary, scalars)
        parts, before = phase.split(end), self.mine.accepted
        after = ClientState(before.steps + max(rules.steps, len(seen)), {**before.tree, **parts.kept})
        update = Update(report, parts.shared, parts.reported, address=self.request.address)
        self.sent = True
        self.answer(self.request, update, self.mine.answered(self.request.address.number, after))


def refuse_beyond_scripts(method: Method) -> None:
    """Refuse methods of which a script's own loop cannot be made a client; unions and lock-step were before."""
    for phase in method.all_phases.values():
        if not trains(phase):
            continue
        why = ""
        if phase.then or phase.extras or phase.rule.closings:
            why = "does more in a phase than train"
        elif phase.policy[Kind.OPTIMIZER] is not Policy.FRESH:
            why = "keeps or shares what the optimizer remembers"
        if why:
            raise ConfigError(f"'{method.name}' cannot be a script's: it {why}; give data= in place of train_script=")


def _refuse_without_rules(rules: LocalRules, method: str) -> None:
    """Refuse work that a method's rules had no part in: it would be another method's."""
    if rules.rule.losses and not rules.losses:
        raise ConfigError(f"'{method}' adds to the loss, and was shown none; train with rules.loss(loss)")
    if (rules.rule.grads or rules.factors or rules.keyed) and not rules.steps:
        raise ConfigError(
            f"'{method}' has a part in every step, and saw none; train inside job.training(optimizer), "
            "or step by rules.step(optimizer)"
        )


def trains(phase: Phase) -> bool:
    """Whether a phase is a script's; all others are fednorm's own."""
    return any(isinstance(each.step, TrainStep) for each in phase.passes)


def _follow(rules: LocalRules, optimizer: Optimizer) -> list[Any]:
    """Let an optimizer begin anew, and step by the rules."""
    optimizer.state.clear()
    before: Tree = {}
    return [
        optimizer.register_step_pre_hook(lambda stepping, args, kwargs: before.update(rules.transform(stepping))),
        optimizer.register_step_post_hook(lambda stepping, args, kwargs: rules.stepped(before)),
    ]
