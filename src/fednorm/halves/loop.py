"""Methods for people who write their own training loop: split a model, load it, train it by the rules, merge.

Surgery comes first and once: `model = prepare(model, parse(expression)).model`. Then, in every round, each client calls
`load`, trains inside `local_rules`, and calls `split`; the server calls `merge`. What a client keeps (`mine`, and the
optimizer for methods that maintain momentum) is the caller's to store.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fednorm.core import rng
from fednorm.core.method import Facts, Method, Phase, Progress, Rule
from fednorm.core.report import Report
from fednorm.core.state import Entry, Kind, Policy, Tree, is_batch_norm, model_state
from fednorm.core.step import Carry, TrainStep, training_mode
from fednorm.errors import ConfigError
from fednorm.halves.guard import flaw
from fednorm.halves.merging import merge_updates
from fednorm.halves.messages import Update
from fednorm.halves.prepared import Prepared, facts_of, lr_factors, refuse_noop, surgery_done
from fednorm.halves.schema import OWN, keys_with
from fednorm.layers.keyed import key_names
from fednorm.methods import parse

__all__ = ["LocalRules", "load", "local_rules", "merge", "split", "update"]


def split(
    model: nn.Module, method: str | Method, *, round: int | None = None, rounds: int | None = None
) -> tuple[Tree, Tree]:
    """(what goes to the server, what this client keeps), both copies.

    Without a round it is the split of the first stage, which is what a server starts from.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> shared, mine = split(net, "silobn")
    >>> list(mine)
    ['1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    method = _playable(method)
    phase = method.stages[0][0] if round is None else _phase(method, round, rounds)
    schema = _view(model, method).schema(phase)
    state = model_state(model, [entry for entry, _ in schema.values()])
    sent, kept = keys_with(schema, Policy.SHARED), keys_with(schema, *OWN)
    return {key: state[key] for key in sent}, {key: state[key] for key in kept}


def load(model: nn.Module, shared: Tree, mine: Tree | None = None) -> None:
    """Copy the server's entries and the client's own into the model; entries in neither stay as they are."""
    mine = mine or {}
    facts = facts_of(model)
    for key in sorted(shared.keys() & mine.keys()):
        raise ConfigError(f"'{key}' is in both trees; pass what `merge` and `split` returned for one method")
    both = {**shared, **mine}
    for key, tensor in both.items():
        _check_fits(key, tensor, facts)
    model.load_state_dict(both, strict=False)


def update(client: int, num_examples: int, shared: Tree, losses: Mapping[str, float] | None = None) -> Update:
    """What a client sends; `losses` only for methods that weigh clients by their loss (`loss_summary` makes them)."""
    return Update(Report(client, num_examples, losses or {}), shared)


def merge(
    updates: Sequence[Update],
    model: nn.Module,
    method: str | Method,
    *,
    server: Tree,
    round: int | None = None,
    rounds: int | None = None,
) -> Tree:
    """The server's next tree: shared entries merged in float64 by client id, all others as they were.

    `server` is the last result, or `split(model, method)[0]` before the first round. The model only says what each
    entry is; its values are not read.
    """
    method = _playable(method)
    phase = _phase(method, round, rounds)
    schema = _view(model, method).schema(phase)
    for key in keys_with(schema, Policy.SHARED):
        if key not in server:
            raise ConfigError(f"the server's tree has no '{key}'; start from split(model, method)[0]")
    clients = [each.client for each in updates]
    for each in updates:
        why = flaw(each, schema)
        if why:
            raise ConfigError(f"client {each.client}: {why}; its update cannot be merged")
        if clients.count(each.client) > 1:
            raise ConfigError(f"client {each.client} sent {clients.count(each.client)} updates; merge one per client")
    try:
        merged, memory = merge_updates(phase, server, updates, schema, {})
    except KeyError as missing:
        raise ConfigError(
            f"'{method.name}' weighs clients by a number that is not reported ({missing}); give every update its losses"
        ) from None
    if memory:
        raise _refusal(method, "remembers something at the server between rounds")
    return merged


@dataclass
class LocalRules:
    """The rules in force inside `local_rules`."""

    model: nn.Module
    rule: Rule
    facts: Facts
    factors: Mapping[str, float]
    key: Tensor
    keyed: tuple[str, ...] = ()
    params: dict[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])
    anchor: Tree = field(default_factory=dict[str, Tensor])
    steps: int = 0
    losses: list[Tensor] = field(default_factory=list[Tensor])
    """what `loss` was given, for reports"""

    def loss(self, loss: Tensor) -> Tensor:
        """The loss with the method's penalty terms added; they pull towards the parameters at entry."""
        self.losses.append(loss.detach())
        for penalty in self.rule.losses:
            loss = loss + penalty(self._carry(dict(self.params)), self.rule.numbers)
        return loss

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Transform the gradients, then let the optimizer step."""
        before = self.transform(optimizer)
        optimizer.step()
        self.stepped(before)

    def transform(self, optimizer: torch.optim.Optimizer) -> Tree:
        """Transform the gradients before a step; what `stepped` must be given after it."""
        numbers = {**_numbers(optimizer), **self.rule.numbers}
        # As in the engines: a parameter the loss does not depend on steps by weight decay alone.
        grads: Tree = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in self.params.items()}
        params: Tree = {key: parameter.detach() for key, parameter in self.params.items()}
        for transform in self.rule.grads:
            grads = transform(grads, self._carry(params), numbers, self.facts)
        for key, parameter in self.params.items():
            parameter.grad = grads[key]
        return {key: params[key].clone() for key in self.factors}

    def stepped(self, before: Tree) -> None:
        """Scale the step that was just taken, for parameters with a learning rate of their own."""
        with torch.no_grad():
            for key, factor in self.factors.items():
                # A step is linear in the learning rate, so scaling the step scales the rate.
                self.params[key].copy_(before[key] + factor * (self.params[key] - before[key]))
        self.steps += 1
        self.draw()

    def _carry(self, params: Tree) -> Carry:
        """The client as penalties and transforms see it."""
        return Carry(params=params, state={}, optimizer={}, extras={}, anchor=self.anchor)

    def draw(self) -> None:
        """Give the layers that draw random numbers the key of the next step."""
        key = rng.key(self.key, self.steps)
        for name in self.keyed:
            self.model.get_buffer(name).copy_(key)


@contextmanager
def local_rules(
    model: nn.Module,
    method: str | Method,
    *,
    round: int | None = None,
    rounds: int | None = None,
    key: Tensor | None = None,
) -> Generator[LocalRules]:
    """Train a client inside this context: the model is in training mode, as far as the method's stage wants it to be.

    Batch norms whose statistics are held stay in evaluation mode even if `model.train()` is called inside. A held
    affine gets no gradient. Modes and `requires_grad` come back at the end. `key` feeds keyed dropout; give each client
    and round its own, as in `fednorm.core.rng.key(seed, client, round)`.
    """
    method = _playable(method)
    key = rng.key("own loop", round or 0) if key is None else key
    with phase_rules(_view(model, method), _phase(method, round, rounds), key) as rules:
        yield rules


@contextmanager
def phase_rules(view: Prepared, phase: Phase, key: Tensor) -> Generator[LocalRules]:
    """`local_rules` of one phase, for who knows which it is."""
    model = view.model
    trained = [entry.key for entry in view.trained(phase.rule)]
    rules = LocalRules(
        model=model,
        rule=phase.rule,
        facts=view.facts,
        factors=lr_factors(view, phase.rule),
        key=key,
        keyed=view.keyed,
        params={name: model.get_parameter(name) for name in trained},
        anchor={name: model.get_parameter(name).detach().clone() for name in trained},
    )
    rules.draw()
    modes = {module: module.training for module in model.modules()}
    held = [model.get_parameter(entry.key) for entry in view.entries if entry.trainable and entry.key not in trained]
    hooks = []
    try:
        for parameter in held:
            parameter.requires_grad_(False)
            parameter.grad = None
        if Kind.STATISTIC in phase.rule.hold:
            hooks = [m.register_forward_pre_hook(_stay_in_eval) for m in model.modules() if is_batch_norm(m)]
        with training_mode(model, phase.rule.hold):
            yield rules
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in held:
            parameter.requires_grad_(True)
        for module, mode in modes.items():
            module.training = mode


def _stay_in_eval(module: nn.Module, args: object) -> None:
    module.eval()


def _numbers(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The numbers a gradient transform may ask for, from the optimizer's first group."""
    group = optimizer.param_groups[0]
    return {name: float(group.get(name, 0.0)) for name in ("lr", "momentum", "weight_decay")}


def _check_fits(key: str, tensor: Tensor, facts: Facts) -> None:
    entry: Entry | None = facts.entries.get(key)
    if entry is None:
        raise ConfigError(f"the model has no '{key}'; load a tree of this model, after the same surgery")
    if tuple(tensor.shape) != entry.shape:
        raise ConfigError(
            f"'{key}' has shape {tuple(tensor.shape)}, the model's has {entry.shape}; load a tree of this model"
        )


def _view(model: nn.Module, method: Method) -> Prepared:
    """The model as a prepared one, without a copy; refused where surgery is missing or nothing could act."""
    done = surgery_done(model)
    wanted = tuple(part for part, _ in method.surgery)
    if wanted and done != wanted:
        raise ConfigError(
            f"'{method.name}' changes the model's layers first; use `prepare(model, parse('{method.name}')).model`"
        )
    facts = facts_of(model)
    if done is None:
        refuse_noop(method, facts, "the model")
    return Prepared(method, model, facts, tuple(key_names(model)), {}, ())


def _refusal(method: Method, why: str) -> ConfigError:
    return ConfigError(f"'{method.name}' cannot run in an own loop: it {why}; use fednorm.run instead")


def _playable(expression: str | Method) -> Method:
    """The method, if one exchange a round with nothing remembered at the server is all it needs."""
    method = parse(expression)
    if method.data == "union":
        raise _refusal(method, "trains on everybody's data and exchanges nothing")
    if "lockstep" in method.needs:
        raise _refusal(method, "needs all clients in lockstep")
    if method.finish or method.query or any(len(stage) != 1 for stage in method.stages):
        raise _refusal(method, "needs more than one exchange in a round")
    for phase in method.phases:
        odd = {kind for kind, policy in phase.policy.items() if policy in (Policy.FRESH, Policy.REPORTED)}
        more = phase.step != TrainStep() or phase.then or phase.extras or phase.rule.closings
        if more or odd - {Kind.OPTIMIZER} or phase.policy[Kind.OPTIMIZER] is Policy.SHARED:
            raise _refusal(method, "does more than train and exchange a model's state")
    # A function that does not say what it looks at may look at reports.
    if len(method.stages) > 1 and getattr(method.switch, "uses_reports", True):
        raise _refusal(method, "decides about its stages from what clients report")
    return method


def _phase(method: Method, round: int | None, rounds: int | None) -> Phase:
    """The one phase of a round."""
    if len(method.stages) == 1:
        return method.stages[0][0]
    if round is None or rounds is None:
        raise ConfigError(f"'{method.name}' changes in the course of a run; give round= and rounds=")
    if not 1 <= round <= rounds:
        raise ConfigError(f"round={round} is not one of the {rounds} rounds; count from 1")
    return method.stages[method.switch({}, Progress(round, rounds), [])[1]][0]
