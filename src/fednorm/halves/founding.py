"""How a federation whose clients are elsewhere begins: clients introduce themselves, the server names its terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from fednorm.core.method import Method
from fednorm.data.batches import num_held
from fednorm.errors import ConfigError
from fednorm.halves.messages import Hello, LocalWork, Welcome
from fednorm.halves.norm_bound import NORM_FACTOR
from fednorm.halves.server import Server
from fednorm.halves.terms import agree, model_digest, refuse_needs, terms_of, typical_steps
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
    work = replace(work, total_steps=work.rounds * typical_steps(work, Counter(sizes.values())))
    agreed = agree(model, chosen, work, weights=weights, device=device)
    terms = terms_of(agreed, run=run, weights=weights, model=type(model).__name__, task=task)
    server = Server(
        agreed,
        range(len(names)),
        per_round=per_round,
        quorum=quorum,
        retries=retries,
        norm_factor=norm_factor,
        score_every=score_every,
        terms=terms,
        sizes=sizes,
    )
    return server, {name: Welcome(client=number, terms=terms) for number, name in enumerate(names)}
