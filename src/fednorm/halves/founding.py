"""How a federation whose clients are elsewhere begins: clients introduce themselves, the server names its terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from fednorm import strategies
from fednorm.core.method import Method
from fednorm.core.strategy import Strategy
from fednorm.data.batches import num_held
from fednorm.errors import ConfigError
from fednorm.halves.agreed import Agreed
from fednorm.halves.arrivals import ArrivalServer
from fednorm.halves.landing import context_of
from fednorm.halves.messages import Hello, LocalWork, Terms, Welcome
from fednorm.halves.norm_bound import NORM_FACTOR
from fednorm.halves.server import Server
from fednorm.halves.terms import agree, model_digest, refuse_needs, terms_of, total_steps
from fednorm.halves.wire import check_hello
from fednorm.methods import parse


def found(
    hellos: Sequence[Hello],
    model: nn.Module,
    method: str | Method,
    work: LocalWork,
    *,
    run: str,
    per_round: int | None = None,
    quorum: float | None = None,
    retries: int = 0,
    norm_factor: float | None = NORM_FACTOR,
    score_every: int | None = None,
    weights: str = "size",
    task: str = "",
    device: torch.device | str = "cpu",
) -> tuple[Server, dict[str, Welcome]]:
    """The server of a federation of these clients, and what to answer each of them, by name.

    Clients are numbered in the order of their names, so the order in which they come changes nothing. Methods that
    need all data or all clients in one place are refused by name. Where `task` names one, such as
    `regression(loss=l1)`, sites with another are refused.
    """
    chosen = parse(method)
    refuse_needs(chosen)
    met = _meet(hellos, model, chosen, work, run=run, weights=weights, task=task, device=device)
    server = Server(
        met.agreed,
        range(len(met.sizes)),
        per_round=per_round,
        quorum=quorum,
        retries=retries,
        norm_factor=norm_factor,
        score_every=score_every,
        terms=met.terms,
        sizes=met.sizes,
    )
    return server, met.welcomes


def found_arrivals(
    hellos: Sequence[Hello],
    model: nn.Module,
    method: str | Method,
    work: LocalWork,
    strategy: str | Strategy,
    *,
    run: str,
    norm_factor: float | None = NORM_FACTOR,
    weights: str = "size",
    task: str = "",
    device: torch.device | str = "cpu",
    **knows: Any,
) -> tuple[ArrivalServer, dict[str, Welcome]]:
    """`found` where clients come one by one, and a round of the work is a version of the model.

    The terms name the method with all parts that the strategy needs. `knows` is what else a strategy that computes
    something itself may know: fields of `core.strategy.Context`, such as `num_classes` and `input_shape`.
    """
    chosen = strategies.parse(strategy)
    joined = strategies.joined(chosen, method)
    met = _meet(hellos, model, joined, work, run=run, weights=weights, task=task, device=device, strategy=chosen)
    clients = range(len(met.sizes))
    server = ArrivalServer(
        met.agreed,
        clients,
        chosen,
        norm_factor=norm_factor,
        terms=met.terms,
        sizes=met.sizes,
        context=context_of(met.agreed, clients, **knows) if chosen.revise else None,
    )
    return server, met.welcomes


class _Met(NamedTuple):
    """What follows from the hellos of all clients."""

    agreed: Agreed
    terms: Terms
    sizes: dict[int, int]
    welcomes: dict[str, Welcome]


def _meet(
    hellos: Sequence[Hello],
    model: nn.Module,
    method: Method,
    work: LocalWork,
    *,
    run: str,
    weights: str,
    task: str,
    device: torch.device | str,
    strategy: Strategy | None = None,
) -> _Met:
    names = sorted(hello.name for hello in hellos)
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(f"{count} clients are called '{name}'; give each a name of its own")
    if not names:
        raise ConfigError("no client said hello; a federation needs at least one")
    schema = model_digest(model)
    for hello in hellos:
        check_hello(hello, schema)
    by_name = {hello.name: hello.num_examples for hello in hellos}
    sizes = {number: by_name[name] - num_held(by_name[name], work.val_fraction) for number, name in enumerate(names)}
    work = replace(work, total_steps=total_steps(work, Counter(sizes.values()), strategy))
    agreed = agree(model, method, work, weights=weights, device=device)
    terms = terms_of(agreed, run=run, weights=weights, model=type(model).__name__, task=task)
    welcomes = {name: Welcome(client=number, terms=terms) for number, name in enumerate(names)}
    return _Met(agreed, terms, sizes, welcomes)
