"""Scores of a run, by protocol: which model is tested on which data.

`pooled`      the global model on the whole test set
`domains`     the global model on each domain's test set, unweighted mean
`own_client`  each client's model on the test rows that look like its own data, unweighted mean
`unseen`      the model a newcomer would use, on the own test rows of clients that never train
`validation`  each client's model on the training rows it set aside; only this may choose a round
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fednorm.engines.base import start_state, step_spec
from fednorm.method import Phase
from fednorm.newcomer import reestimated, tracked
from fednorm.pieces.merges import maximum, mean, pooled
from fednorm.plan import Plan
from fednorm.server import keys_with
from fednorm.state import Kind, Policy, Tree
from fednorm.store import Store
from fednorm.tasks import Sums

Scores = dict[str, dict[str, Any]]
Adapt = Callable[[Tree, Tensor], Tree]


def score_rows(
    plan: Plan, state: Tree, pool: tuple[Tensor, Tensor], rows: Tensor | None = None, adapt: Adapt | None = None
) -> Sums:
    """The task's sums of a model on some rows of a pool (test or training), or on all of it.

    `adapt` may move the state before each batch, which then has the size of a training batch.
    """
    x, y = pool
    count = len(x) if rows is None else len(rows)
    size = plan.config.train.batch_size if adapt else plan.config.eval.chunk
    total: Sums = {}
    state = {key: state[key] for key in plan.prepared.facts.entries}
    model = plan.prepared.model.eval()
    with torch.no_grad():
        for start in range(0, count, size):
            stop = min(count, start + size)
            part: Any = slice(start, stop) if rows is None else rows[start:stop].to(x.device)
            inputs = plan.batches.inputs(x[part])
            if adapt and stop - start > 1:
                state = adapt(state, inputs)
            output = functional_call(model, state, (inputs,))
            for name, value in plan.task.score(output, y[part]).items():
                total[name] = total[name] + value if name in total else value
    return total


def averaged_local(plan: Plan, phase: Phase, store: Store) -> Tree:
    """The uniform mean, over all clients seen, of what they keep local; counters by maximum, variances as told."""
    schema = plan.schema(phase)
    keys = [key for key in keys_with(schema, Policy.LOCAL) if schema[key][0].kind is not Kind.OPTIMIZER]
    states = [store.get(client).tree for client in store.seen()]
    states = [state for state in states if all(key in state for key in keys)]
    if not keys or not states:
        return {}
    rules = {Kind.COUNTER: maximum}
    if plan.method.newcomer.variance == "pooled":
        rules[Kind.STATISTIC] = pooled
    groups: dict[tuple[str, Kind], dict[str, str]] = defaultdict(dict)
    for key in keys:
        entry = schema[key][0]
        groups[entry.layer, entry.kind][entry.part] = key
    weights = [1 / len(states)] * len(states)
    result: Tree = {}
    for (_, kind), parts in groups.items():
        sent = [{part: state[key] for part, key in parts.items()} for state in states]
        new, _ = rules.get(kind, mean)(sent[0], sent, weights, {})
        result |= {key: new[part] for part, key in parts.items()}
    return result


def client_model(plan: Plan, phase: Phase, server: Tree, store: Store, client: int, fallback: Tree) -> Tree:
    """A client's own model: shared entries from the server, its local ones, or the fallback if it has none."""
    return start_state(plan, plan.schema(phase), server, store.get(client).tree or fallback)


def evaluate(plan: Plan, phase: Phase, server: Tree, store: Store) -> Scores:
    """All protocols that apply to the method and the data."""
    federation = plan.federation
    test = (federation.test_x, federation.test_y)
    average = averaged_local(plan, phase, store)
    schema = plan.schema(phase)
    newcomer = start_state(plan, schema, server, average)
    personal = plan.method.data == "each" and bool(average)
    own_weights = Kind.WEIGHT in {schema[key][0].kind for key in average}

    def model_of(client: int) -> Tree:
        return client_model(plan, phase, server, store, client, average) if personal else newcomer

    def mean_over(
        clients: Sequence[int],
        pool: tuple[Tensor, Tensor],
        rows: Sequence[Tensor],
        model: Callable[[int], Tree],
        adapt: Adapt | None = None,
    ) -> dict[str, Any]:
        metric = plan.task.metric
        scores = {
            client: plan.task.summary(score_rows(plan, model(client), pool, own, adapt))[metric]
            for client, own in zip(clients, rows, strict=True)
            if len(own)
        }
        return {metric: sum(scores.values()) / len(scores), "worst": min(scores.values()), "per_client": scores}

    result: Scores = {}
    trained = federation.training_clients
    if own_weights:
        everything = torch.arange(len(federation.test_y))
        clients = [client for client in trained if store.get(client).tree]
        result["pooled"] = mean_over(clients, test, [everything] * len(clients), model_of)
        result["pooled"]["how"] = "mean over the clients' own models"
    else:
        how = "averaged local state" if average else "global model"
        result["pooled"] = {**plan.task.summary(score_rows(plan, newcomer, test)), "how": how}
    if federation.domains:
        sums = {name: score_rows(plan, newcomer, test, rows) for name, rows in federation.domains.items()}
        scores = {name: plan.task.summary(each)[plan.task.metric] for name, each in sums.items()}
        result["domains"] = {plan.task.metric: sum(scores.values()) / len(scores), "per_domain": scores}
    if any(len(federation.own_test[c]) for c in trained):
        result["own_client"] = mean_over(trained, test, [federation.own_test[c] for c in trained], model_of)
    unseen = sorted(federation.unseen)
    if any(len(federation.own_test[c]) for c in unseen):
        rule = plan.method.newcomer
        spec = step_spec(plan, phase, probing=False)
        result["unseen"] = mean_over(
            unseen,
            test,
            [federation.own_test[c] for c in unseen],
            lambda c: reestimated(plan, phase, newcomer, c) if rule.rule == "reestimate" else newcomer,
            (lambda state, x: tracked(spec, state, x, rule.momentum)) if rule.rule == "track" else None,
        )
        result["unseen"]["how"] = rule.rule
    if plan.config.data.val_fraction:
        held = [plan.batches.split(c)[1] for c in trained]
        result["validation"] = mean_over(trained, (federation.x, federation.y), held, model_of)
    return result
