"""Scores of a run, by protocol: which model is tested on which data.

`pooled`      the global model on the whole test set
`domains`     the global model on each domain's test set, unweighted mean
`own_client`  each client's model on the test rows that look like its own data, unweighted mean
`unseen`      the model a newcomer would use, on the own test rows of clients that never train
`validation`  each client's model on the training rows it set aside; only this may choose a round
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.core.state import Kind, Tree
from fednorm.core.task import AnyTask
from fednorm.engines.stack.scores import StackScorer
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.running.plan import Plan
from fednorm.running.records import MetricFacts
from fednorm.running.store import Store
from fednorm.scoring.averages import averaged_local
from fednorm.scoring.scores import Adapt, AnyExamples

Scores = dict[str, dict[str, Any]]
StateOf = Callable[[int], Tree]
"""The state of a client's own model."""


def scored(plan: Plan, clients: Sequence[int]) -> tuple[Sequence[int], dict[str, str]]:
    """The clients whose scores count, and a note: all of them, or a keyed sample, the same in every round."""
    most = plan.config.eval.max_clients
    if len(clients) <= most:
        return clients, {}
    chosen = rng.subset(rng.key(plan.work.seed, "scored clients"), len(clients), most)
    return [clients[index] for index in chosen], {"sample": f"{most} of {len(clients)} clients"}


def averaged(plan: Plan, phase: PreparedPhase, store: Store, clients: Collection[int] | None = None) -> Tree:
    """What a newcomer gets of entries that clients keep: their mean, as the method says, over these or all clients."""
    kept = (phase.schema[key][0] for key in phase.kept)
    return averaged_local([entry for entry in kept if not entry.idle], plan.method.newcomer, store, clients)


def client_model(plan: Plan, phase: PreparedPhase, server: Tree, store: Store, client: int, fallback: Tree) -> Tree:
    """A client's own model: shared entries from the server, its local ones, or the fallback if it has none."""
    return phase.start(server, store.get(client).tree or fallback, plan.device)


def client_states(phase: PreparedPhase, server: Tree, store: Store, newcomer: Tree, device: torch.device) -> StateOf:
    """`client_model` of many clients: what they have in common are the same tensors, their own are where they lie."""
    common = phase.start(server, {}, device)

    def state(client: int) -> Tree:
        mine = store.get(client).tree
        return {**common, **{key: mine[key] for key in phase.kept if key in mine}} if mine else newcomer

    return state


def newcomer_model(plan: Plan, phase: PreparedPhase, given: Tree, client: int) -> Tree:
    """What a client that never trained is tested with, from the model it is given and, by some rules, its own data."""
    rule = plan.method.newcomer
    if not rule.uses_data:
        return given
    return rule.from_data(plan.step_spec(phase.passes[-1]), given, _own_batches(plan, client))


def global_model(
    plan: Plan, phase: PreparedPhase, server: Tree, store: Store, clients: Collection[int] | None = None
) -> Tree:
    """The one model of all: shared entries from the server, the clients' mean of what they keep local."""
    return phase.start(server, averaged(plan, phase, store, clients), plan.device)


def _own_batches(plan: Plan, client: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The data of a client that never trained, in batches.

    Their order is drawn: many sets lie sorted by class, and a layer's statistics depend on how batches are composed.
    """
    rows = _shuffled(plan, client, plan.federation.clients[client], "newcomer's data")
    for part in rows.split(max(2, plan.work.batch_size)):
        if len(part) < 2 and len(rows) > 1:
            continue  # as in training, a trailing batch of one example is skipped
        yield plan.batches.plain(part)


def _shuffled(plan: Plan, client: int, rows: Tensor, what: str) -> Tensor:
    return rows[rng.permutation(rng.key(plan.work.seed, what, client), len(rows))]


def metric_facts(task: AnyTask) -> MetricFacts:
    """What rows say of the headline number."""
    return {"name": task.metric, "higher_is_better": task.higher_is_better, "percent": task.percent}


def over_clients(task: AnyTask, each: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Summaries of several clients as one: unweighted means, and every number of every client.

    A number that is not defined for some client is left out of its mean.
    """
    names = [name for name, value in next(iter(each.values())).items() if not isinstance(value, list)]
    columns = {name: {client: own[name] for client, own in each.items()} for name in names}

    def mean(column: Mapping[int, float | None]) -> float | None:
        known = [value for value in column.values() if value is not None]
        return sum(known) / len(known) if known else None

    means = {name: mean(column) for name, column in columns.items()}
    headline = columns.pop(task.metric)
    return {
        task.metric: means.pop(task.metric),
        **means,
        "worst": (min if task.higher_is_better else max)(headline.values()),
        "per_client": headline,
        "per_client_metrics": columns,
    }


def evaluate(
    plan: Plan,
    phase: PreparedPhase,
    server: Tree,
    store: Store,
    clients: Collection[int] | None = None,
    stack: StackScorer | None = None,
) -> Scores:
    """All protocols that apply to the method and the data; local state is averaged over these clients, or over all.

    With a `stack`, models of clients are tested many at once.
    """
    federation = plan.federation
    test = federation.tests
    average = averaged(plan, phase, store, clients)
    newcomer = phase.start(server, average, plan.device)
    personal = plan.method.data == "each" and bool(average)
    own_weights = Kind.WEIGHT in {phase.schema[key][0].kind for key in average}

    def personal_model(client: int) -> Tree:
        return client_model(plan, phase, server, store, client, average)

    of_stack = client_states(phase, server, store, newcomer, plan.device) if stack else None
    model_of = (of_stack or personal_model) if personal else None

    def mean_over(
        clients: Sequence[int],
        pool: AnyExamples,
        rows: Sequence[Tensor],
        model: StateOf | None,
        note: dict[str, str],
        adapt: Adapt | None = None,
    ) -> dict[str, Any]:
        """Scores of each client's model, or with None of the newcomer's, on each client's rows."""
        own = {client: some for client, some in zip(clients, rows, strict=True) if len(some)}
        if model is None and adapt is None:
            sums = plan.scorer.groups(newcomer, pool, list(own.values()))
        elif stack and model and adapt is None:
            sums = stack.each(model, pool, own)
        else:
            states = ((newcomer if model is None else model(client), some) for client, some in own.items())
            sums = [plan.scorer.rows(state, pool, some, adapt) for state, some in states]
        each = {client: plan.task.summary(total) for client, total in zip(own, sums, strict=True)}
        return {**over_clients(plan.task, each), **note}

    result: Scores = {}
    trained, note = scored(plan, federation.training_clients)
    if own_weights:
        everything = torch.arange(federation.num_tests)
        owners, about = scored(plan, [client for client in store.holding(average) if client not in federation.unseen])
        result["pooled"] = mean_over(owners, test, [everything] * len(owners), model_of, about)
        result["pooled"]["how"] = "mean over the clients' own models"
    else:
        whose = "averaged local state" if clients is None else "averaged local state of the last cohort"
        how = whose if average else "global model"
        result["pooled"] = {**plan.task.summary(plan.scorer.rows(newcomer, test)), "how": how}
    if federation.domains:
        sums = {name: plan.scorer.rows(newcomer, test, rows) for name, rows in federation.domains.items()}
        scores = {name: plan.task.summary(each)[plan.task.metric] for name, each in sums.items()}
        result["domains"] = {plan.task.metric: sum(scores.values()) / len(scores), "per_domain": scores}
    if any(len(federation.own_test[c]) for c in trained):
        result["own_client"] = mean_over(trained, test, [federation.own_test[c] for c in trained], model_of, note)
    unseen, about = scored(plan, sorted(federation.unseen))
    if any(len(federation.own_test[c]) for c in unseen):
        rule = plan.method.newcomer
        spec = plan.step_spec(phase.passes[-1])
        tested = {c: federation.own_test[c] for c in unseen}
        if rule.uses_batches:  # in an order that says nothing of the labels, as test data come in
            tested = {c: _shuffled(plan, c, rows, "newcomer's tests") for c, rows in tested.items()}
        result["unseen"] = mean_over(
            unseen,
            test,
            list(tested.values()),
            (lambda c: newcomer_model(plan, phase, newcomer, c)) if rule.uses_data else None,
            about,
            (lambda state, x: rule.from_batch(spec, state, x)) if rule.uses_batches else None,
        )
        result["unseen"]["how"] = rule.name
    held = [plan.batches.split(c)[1] for c in trained] if plan.config.data.val_fraction else []
    if any(map(len, held)):
        result["validation"] = mean_over(trained, plan.batches.pool.examples, held, model_of, note)
    return result
