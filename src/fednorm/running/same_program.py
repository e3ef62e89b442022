"""Which runs are the same program, and their engine.

Runs of one program differ in numbers alone: seeds, learning rates, penalties, the round of a switch. Everything that a
step, a merge or a model is made of must be the same, whatever the methods are called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fednorm.core.method import Method, Phase, Rule
from fednorm.core.phases import PhaseId
from fednorm.data.federation import Federation
from fednorm.engines.base import Engine
from fednorm.engines.choose import make_engine
from fednorm.engines.machine import find_device
from fednorm.engines.stack import slot
from fednorm.engines.stack.device_stack import MOST_LOCAL_BYTES
from fednorm.engines.stack.slot import can_stay, local_bytes
from fednorm.halves.prepared import Prepared
from fednorm.methods import parse
from fednorm.running.config import EvalConfig, RunConfig
from fednorm.running.on_clock import names_strategy
from fednorm.running.plan import Plan
from fednorm.running.run import MakeEngine, engine_of_its_own


def same_program(a: Plan, b: Plan) -> bool:
    """Whether one program can play both runs as far as they go the same way, their numbers being data to it."""
    return (
        same_settings(a.config, b.config)
        and same_phases(a.method, b.method)
        and a.optimizer == b.optimizer
        and a.task == b.task
        and a.device == b.device
        and a.cohort_size == b.cohort_size
        and _same_examples(a.federation, b.federation)
        and _same_model(a.prepared, b.prepared)
        and a.initial().keys() == b.initial().keys()
    )


def shares_stack(a: RunConfig, b: RunConfig) -> bool:
    """Whether two runs will likely share a stack, as far as configs tell: only then are their plans made together."""
    device = find_device(a.engine.device).type
    if any(names_strategy(each.method) or each.clock.strategy for each in (a, b)):
        return False  # every clock has its own order of updates
    stays = a.engine.name in ("auto", "stacked") and device in slot.DEVICES and same_bits(a, device)
    return stays and a.engine.quorum is None and same_settings(a, b) and same_phases(parse(a.method), parse(b.method))


def same_bits(config: RunConfig, device: str) -> bool:
    """Whether a run in company gives the bits it gives alone, so that neither `--jobs` nor a resume changes any.

    In float32 without tf32 cuDNN computes a GPU's convolutions, and takes other ways for other numbers of clients.
    """
    return device != "cuda" or config.engine.precision != "fp32"


def same_settings(a: RunConfig, b: RunConfig) -> bool:
    """Whether two configs differ only in what a program is sent with each exchange, or never sees.

    Sent: the seed's batches and weights, the learning rate and its schedule, momentum, weight decay, the round. Never
    seen: the number of rounds, what is scored and when, checkpoints. Whether there is momentum at all is up to the
    optimizer, and a model that knows the number of rounds (BatchRenorm) is another model.
    """
    return _settings(a) == _settings(b)


def _settings(config: RunConfig) -> RunConfig:
    train = replace(config.train, lr=0.0, momentum=0.0, weight_decay=0.0, schedule="constant", warmup=0.0)
    engine = replace(config.engine, checkpoint_every=None)
    free = {"method": "", "seed": 0, "rounds": 1, "init": None, "eval": EvalConfig()}
    return replace(config, train=train, engine=engine, **free)


def same_phases(a: Method, b: Method) -> bool:
    """Whether one method's exchanges are among the other's, up to the numbers of rules; when they switch is their own.

    So one that is another up to some round, or up to what comes after the last, shares the rounds before.

    >>> same_phases(parse("fixbn(at=0.3)+fedprox(mu=0.1)"), parse("fixbn(at=0.6)+fedprox(mu=1)"))
    True
    >>> same_phases(parse("fedavg"), parse("fixbn"))
    True
    >>> same_phases(parse("fedadam(lr=0.1)"), parse("fedadam(lr=0.2)"))
    False
    """
    fewer, more = sorted((_exchanges(a), _exchanges(b)), key=len)
    return a.data == b.data and fewer.items() <= more.items()


def _exchanges(method: Method) -> dict[PhaseId, Phase]:
    """Every exchange of a method, without the numbers of its rules."""

    def without_numbers(rule: Rule) -> Rule:
        return replace(rule, numbers=dict.fromkeys(rule.numbers, 0.0))

    return {id: phase.map_rules(without_numbers) for id, phase in method.all_phases.items()}


def _same_examples(a: Federation, b: Federation) -> bool:
    """Whether batches of both can be gathered from one pool."""

    def look(data: Federation) -> list[Any]:
        shapes = [(tensor.shape[1:], tensor.dtype) for tensor in (data.x, data.y)]
        return [
            data.name,
            data.task,
            data.num_classes,
            data.ignore_index,
            data.mean,
            data.std,
            len(data.clients),
            shapes,
        ]

    return look(a) == look(b)


def _same_model(a: Prepared, b: Prepared) -> bool:
    """Whether two models are the same function of their state: the same modules with the same settings."""
    modules, others = (list(prepared.model.named_modules(remove_duplicate=False)) for prepared in (a, b))
    return (
        a.facts == b.facts
        and a.keyed == b.keyed
        and [(name, type(module)) for name, module in modules] == [(name, type(module)) for name, module in others]
        and all(
            _same_values(_module_settings(one), _module_settings(other))
            for (_, one), (_, other) in zip(modules, others, strict=True)
        )
        and _same_values(_constants(a), _constants(b))
    )


def _same_values(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_same_value(value, b[name]) for name, value in a.items())


def _same_value(a: Any, b: Any) -> bool:
    """Whether a setting is the same in two models; what cannot be compared is taken for different."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    try:
        return type(a) is type(b) and bool(a == b)
    except (RuntimeError, ValueError):  # arrays, or tensors inside of something
        return False


_STATE = {"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"}
"""What a module's state and children lie in; recurrent layers list their parameters a second and a third time."""


def _module_settings(module: nn.Module) -> dict[str, Any]:
    """All that a module knows beside its state and its children; hooks without the numbers they were given.

    Our own notes on a model name the parts that changed it, with options that may be numbers of a rule.
    """
    return {
        name: list(value.values()) if isinstance(value, OrderedDict) else value
        for name, value in vars(module).items()
        if name not in _STATE and not name.startswith("_fednorm")
    }


def _constants(prepared: Prepared) -> dict[str, Tensor]:
    """Tensors of a model that are not part of its state: a program takes them from the first run's model."""
    aside = prepared.facts.entries.keys() | set(prepared.keyed)
    return {name: tensor for name, tensor in prepared.model.named_buffers() if name not in aside}


def engine_maker(plans: Sequence[Plan]) -> MakeEngine:
    """How to make the engines of some runs: those that are the same program share one, and so a stack.

    It is made when the first of them asks. A stack is laid out for the phases of its first run, which has all of them.
    """
    groups: list[list[Plan]] = []
    for plan in plans:
        if _shares(plan):
            for group in groups:
                most = max(local_bytes(group[0]), local_bytes(plan))
                if same_program(group[0], plan) and most * (len(group) + 1) <= MOST_LOCAL_BYTES:
                    group.append(plan)
                    group.sort(key=lambda each: -len(each.method.all_phases))
                    break
            else:
                groups.append([plan])
    group_of = {id(plan): group for group in groups for plan in group}
    made: dict[int, tuple[str, Engine]] = {}

    def make(plan: Plan, remembered: str | None, stays: bool) -> tuple[str, Engine]:
        group = group_of.get(id(plan), [])
        if len(group) < 2 or not stays:
            return engine_of_its_own(plan, remembered, stays)
        if id(group) not in made:
            made[id(group)] = make_engine(group, plan.config.engine, cohort=plan.cohort_size, remembered="stacked")
        return made[id(group)]

    return make


def _shares(plan: Plan) -> bool:
    """Whether a plan's rounds are played on a device that several runs may share."""
    name = plan.config.engine.name
    stacked = name == "stacked" or (name == "auto" and plan.device.type == "cuda")
    alike = same_bits(plan.config, plan.device.type)
    return stacked and alike and plan.config.engine.quorum is None and can_stay(plan)
