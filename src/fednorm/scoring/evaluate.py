"""Scores of a run, by protocol: which model is tested on which data.

`pooled`      the global model on the whole test set
`domains`     the global model on each domain's test set, unweighted mean
`own_client`  each client's model on the test rows that look like its own data, unweighted mean
`unseen`      the model a newcomer would use, on the own test rows of clients that never train
`validation`  each client's model on the training rows it set aside; only this may choose a round
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fednorm.core import rng
from fednorm.core.method import Phase
from fednorm.core.state import Kind, Tree
from fednorm.engines.base import start_state, step_spec
from fednorm.running.plan import Plan
from fednorm.running.store import Store
from fednorm.scoring.averages import averaged_local
from fednorm.scoring.newcomer import newcomer_model
from fednorm.scoring.tasks import Sums

Scores = dict[str, dict[str, Any]]
Adapt = Callable[[Tree, Tensor], Tree]


MOST_NUMBERS = 1 << 26
"""Numbers of a model's output that are kept at a time."""


def score_rows(
    plan: Plan, state: Tree, pool: tuple[Tensor, Tensor], rows: Tensor | None = None, adapt: Adapt | None = None
) -> Sums:
    """The task's sums of a model on some rows of a pool (test or training), or on all of it, on the host.

    `adapt` may move the state before each batch, which then has the size of a training batch.
    """
    total: Sums = {}
    for output, y in _outputs(plan, state, pool, rows, adapt):
        for name, value in plan.task.score(output, y).items():
            total[name] = total[name] + value if name in total else value
    return _on_host([total])[0]


def score_groups(plan: Plan, state: Tree, pool: tuple[Tensor, Tensor], groups: Sequence[Tensor]) -> list[Sums]:
    """`score_rows` of one model for each of many groups of rows; a row goes through the model once, whoever has it."""
    rows = torch.unique(torch.cat(list(groups)))
    kept: list[Tensor] = []
    for output, _ in _outputs(plan, state, pool, rows):
        if output[0].numel() * len(rows) > MOST_NUMBERS:
            return [score_rows(plan, state, pool, group) for group in groups]
        kept.append(output)
    outputs, labels = torch.cat(kept), pool[1]
    places = torch.empty(len(labels), dtype=torch.int64).index_copy_(0, rows, torch.arange(len(rows)))
    each = ((places[group].to(labels.device), group.to(labels.device)) for group in groups)
    return _on_host([plan.task.score(outputs[place], labels[group]) for place, group in each])


def _outputs(
    plan: Plan, state: Tree, pool: tuple[Tensor, Tensor], rows: Tensor | None, adapt: Adapt | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """(output, labels) of a model, chunk by chunk."""
    x, y = pool
    count = len(x) if rows is None else len(rows)
    size = plan.config.train.batch_size if adapt else plan.config.eval.chunk
    state = {key: state[key] for key in plan.prepared.facts.entries}
    model = plan.prepared.model.eval()
    for start in range(0, count, size):
        stop = min(count, start + size)
        part: Any = slice(start, stop) if rows is None else rows[start:stop].to(x.device)
        with torch.no_grad():
            inputs = plan.batches.inputs(x[part])
            if adapt and stop - start > 1:
                state = adapt(state, inputs)
            output = functional_call(model, state, (inputs,), tie_weights=plan.prepared.tied)
        yield output, y[part]


def _on_host(totals: Sequence[Sums]) -> list[Sums]:
    """Sums as numbers of the host; all of a name at once, since each question to a GPU costs more than its answer."""
    names = list(totals[0])
    columns = [torch.stack([total[name] for total in totals]).cpu().unbind() for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)] if names else list(totals)


def scored(plan: Plan, clients: Sequence[int]) -> tuple[Sequence[int], dict[str, str]]:
    """The clients whose scores count, and a note: all of them, or a keyed sample, the same in every round."""
    most = plan.config.eval.max_clients
    if len(clients) <= most:
        return clients, {}
    places = rng.subset(rng.key(plan.config.seed, "scored clients"), len(clients), most)
    return [clients[place] for place in places], {"sample": f"{most} of {len(clients)} clients"}


def client_model(plan: Plan, phase: Phase, server: Tree, store: Store, client: int, fallback: Tree) -> Tree:
    """A client's own model: shared entries from the server, its local ones, or the fallback if it has none."""
    return start_state(plan, plan.schema(phase), server, store.get(client).tree or fallback)


def global_model(plan: Plan, phase: Phase, server: Tree, store: Store) -> Tree:
    """The one model of all: shared entries from the server, the clients' mean of what they keep local."""
    return start_state(plan, plan.schema(phase), server, averaged_local(plan, phase, store))


def evaluate(plan: Plan, phase: Phase, server: Tree, store: Store) -> Scores:
    """All protocols that apply to the method and the data."""
    federation = plan.federation
    test = (federation.test_x, federation.test_y)
    average = averaged_local(plan, phase, store)
    schema = plan.schema(phase)
    newcomer = start_state(plan, schema, server, average)
    personal = plan.method.data == "each" and bool(average)
    own_weights = Kind.WEIGHT in {schema[key][0].kind for key in average}

    def personal_model(client: int) -> Tree:
        return client_model(plan, phase, server, store, client, average)

    model_of = personal_model if personal else None

    def mean_over(
        clients: Sequence[int],
        pool: tuple[Tensor, Tensor],
        rows: Sequence[Tensor],
        model: Callable[[int], Tree] | None,
        note: dict[str, str],
        adapt: Adapt | None = None,
    ) -> dict[str, Any]:
        """Scores of each client's model, or with None of the newcomer's, on each client's rows."""
        metric = plan.task.metric
        own = {client: some for client, some in zip(clients, rows, strict=True) if len(some)}
        if model is None and adapt is None:
            sums = score_groups(plan, newcomer, pool, list(own.values()))
        else:
            states = ((newcomer if model is None else model(client), some) for client, some in own.items())
            sums = [score_rows(plan, state, pool, some, adapt) for state, some in states]
        scores = {client: plan.task.summary(total)[metric] for client, total in zip(own, sums, strict=True)}
        mean = sum(scores.values()) / len(scores)
        return {metric: mean, "worst": min(scores.values()), "per_client": scores, **note}

    result: Scores = {}
    trained, note = scored(plan, federation.training_clients)
    if own_weights:
        everything = torch.arange(len(federation.test_y))
        owners, about = scored(plan, [client for client in store.holding(average) if client not in federation.unseen])
        result["pooled"] = mean_over(owners, test, [everything] * len(owners), model_of, about)
        result["pooled"]["how"] = "mean over the clients' own models"
    else:
        how = "averaged local state" if average else "global model"
        result["pooled"] = {**plan.task.summary(score_rows(plan, newcomer, test)), "how": how}
    if federation.domains:
        sums = {name: score_rows(plan, newcomer, test, rows) for name, rows in federation.domains.items()}
        scores = {name: plan.task.summary(each)[plan.task.metric] for name, each in sums.items()}
        result["domains"] = {plan.task.metric: sum(scores.values()) / len(scores), "per_domain": scores}
    if any(len(federation.own_test[c]) for c in trained):
        result["own_client"] = mean_over(trained, test, [federation.own_test[c] for c in trained], model_of, note)
    unseen, about = scored(plan, sorted(federation.unseen))
    if any(len(federation.own_test[c]) for c in unseen):
        rule = plan.method.newcomer
        spec = step_spec(plan, phase, probing=False)
        result["unseen"] = mean_over(
            unseen,
            test,
            [federation.own_test[c] for c in unseen],
            (lambda c: newcomer_model(plan, phase, newcomer, c)) if rule.uses_data else None,
            about,
            (lambda state, x: rule.from_batch(spec, state, x)) if rule.uses_batches else None,
        )
        result["unseen"]["how"] = rule.name
    held = [plan.batches.split(c)[1] for c in trained] if plan.config.data.val_fraction else []
    if any(map(len, held)):
        result["validation"] = mean_over(trained, (federation.x, federation.y), held, model_of, note)
    return result
