"""A method meets a model: surgery is done, entries are listed, and a part with nothing to act on is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import nn

from fednorm.core.method import Facts, Method, Phase, Rule
from fednorm.core.numbers import refuse_numbers
from fednorm.core.optim import Optimizer
from fednorm.core.roles import last_layer
from fednorm.core.state import Entry, Kind, Policy, Tree, entries, is_batch_norm, model_state
from fednorm.core.user_code import UserCode
from fednorm.errors import ConfigError, UserCodeError, first_line
from fednorm.layers.embeddings import refuse_special_embeddings
from fednorm.layers.keyed import key_names
from fednorm.pieces.surgery import KeyDropout

_SURGERY_DONE = "_fednorm_surgery_done"


@dataclass(frozen=True)
class Prepared:
    """A model after a method's surgery, with all that engines and adapters need to know about its state."""

    method: Method
    model: nn.Module
    facts: Facts
    keyed: tuple[str, ...]
    initial: Tree
    notes: tuple[str, ...]
    name: str = "the model"
    """what an error calls the model"""

    @property
    def entries(self) -> Iterable[Entry]:
        return self.facts.entries.values()

    def trained(self, rule: Rule) -> list[Entry]:
        """The entries that get gradients under a rule."""
        held = Kind.AFFINE in rule.hold
        choices: dict[str, Callable[[str], bool]] = {
            "all": lambda key: True,
            "head": self.facts.head.__contains__,
            "body": self._is_body,
        }
        chosen = choices[rule.trains]
        return [
            entry
            for entry in self.entries
            if entry.trainable and chosen(entry.key) and not (held and entry.kind is Kind.AFFINE and entry.batch_norm)
        ]

    def _is_body(self, key: str) -> bool:
        return key not in self.facts.head

    @property
    def vectors(self) -> frozenset[str]:
        """Keys of the trained tensors with fewer than two axes: gamma, beta, biases, scalars."""
        return frozenset(entry.key for entry in self.entries if entry.trainable and len(entry.shape) < 2)

    @cached_property
    def tied(self) -> bool:
        """Whether a tensor of the model has several names, of which a state has one; not cheap to find out."""
        names = (self.model.named_parameters, self.model.named_buffers)
        return any(len(list(each())) < len(list(each(remove_duplicate=False))) for each in names)

    def schema(self, phase: Phase, optimizer: Optimizer | None = None) -> dict[str, tuple[Entry, Policy]]:
        """Entry and policy by key, with the optimizer's buffers and the extras that the phase knows."""
        found = {entry.key: entry for each in phase.passes for entry in self.trained(each.rule)}
        trained = [entry for entry in self.entries if entry.key in found]
        extras = [
            Entry(f"{name}:{e.key}", Kind.EXTRA, e.layer, e.part, False, e.shape, e.dtype, extra=name)
            for name in phase.extras
            for e in trained
        ]
        listing = [*self.entries, *(optimizer.entries(trained) if optimizer else ()), *extras]
        return {entry.key: (entry, phase.policy_of(entry)) for entry in listing}


def prepare(
    model: nn.Module,
    method: Method,
    *,
    allow_noop: bool = False,
    name: str = "the model",
    dtype: torch.dtype | None = None,
) -> Prepared:
    """Apply a method's surgery to a copy of the model, on the host and in this type of number, and list the result."""
    refuse_special_embeddings(model)
    refuse_numbers(method)
    model = _copied(model, name).to("cpu", dtype)
    notes: list[str] = []
    for part, surgery in method.surgery:
        with UserCode(name):
            model, report = surgery(model)
        notes += report.notes
        if report.changed == 0 and not allow_noop:
            raise ConfigError(_noop(method, part, name, f"{report.target} to work on"))
    model, report = KeyDropout()(model)
    notes += report.notes
    facts = facts_of(model)
    listing = list(facts.entries.values())
    if not any(entry.trainable for entry in listing):
        raise ConfigError(f"{name} has no trainable parameters; nothing can be learned")
    if not allow_noop:
        refuse_noop(method, facts, name)
    model.__dict__[_SURGERY_DONE] = tuple(part for part, _ in method.surgery)
    initial = model_state(model, listing)
    return Prepared(method, model.eval(), facts, tuple(key_names(model)), initial, tuple(notes), name)


def _copied(model: nn.Module, name: str) -> nn.Module:
    """A copy, since runs leave the user's own model as it is."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise UserCodeError(
            f"{name} cannot be copied, and runs work on a copy ({first_line(error)}); "
            "let it hold layers, parameters and plain values only"
        ) from error


def surgery_done(model: nn.Module) -> tuple[str, ...] | None:
    """The parts whose surgery `prepare` did on this model, or on the one it was copied from; None if it did none."""
    return model.__dict__.get(_SURGERY_DONE)


def facts_of(model: nn.Module) -> Facts:
    """What pieces may know about a model whose surgery is done."""
    listing = entries(model)
    modules = cast(Iterable[tuple[str, nn.Module]], model.named_modules())
    momenta = {layer: getattr(module, "momentum", None) for layer, module in modules if is_batch_norm(module)}
    moving = {layer: share for layer, share in momenta.items() if isinstance(share, float) and share > 0}
    return Facts({entry.key: entry for entry in listing}, last_layer(model, listing), moving)


def refuse_noop(method: Method, facts: Facts, name: str) -> None:
    """Refuse a method with a part that has nothing to act on."""
    kinds = {entry.kind for entry in facts.entries.values() if entry.batch_norm}
    for part in method.parts:
        if part.acts_on and not part.acts_on & kinds:
            raise ConfigError(_noop(method, part.label, name, "BatchNorm layer to act on"))


def _noop(method: Method, label: str, name: str, target: str) -> str:
    rest = "+".join(part.label for part in method.parts if part.label != label) or "fedavg"
    return (
        f"'{label}' finds no {target} in {name} and would equal '{rest}'; "
        f"use '{rest}', another model, or --allow-noop to run it all the same"
    )


def lr_factors(prepared: Prepared, rule: Rule) -> Mapping[str, float]:
    """Factors on the learning rate by key; two rules that name the same key multiply."""
    factors: dict[str, float] = {}
    for scale in rule.lr_factors:
        for key, factor in scale(prepared.model).items():
            factors[key] = factors.get(key, 1.0) * factor
    return factors
