"""What a run would send and how long it would take, from the real payload and a few real steps."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from fednorm.core.user_code import UserCode
from fednorm.data.batches import UNION
from fednorm.data.client_facts import held
from fednorm.engines.choose import seconds_of_step, steps_per_round
from fednorm.running.config import to_dict
from fednorm.running.plan import Plan
from fednorm.running.run import engine_of_its_own
from fednorm.running.threads import threads_of
from fednorm.views.describe_model import exchanges

TIMED_STEPS, TIMED_CLIENTS = 3, 10


def preview(plan: Plan) -> dict[str, Any]:
    """Config, bytes a client sends and receives in a round of each stage, the clients' data, and the time it takes."""
    federation = plan.federation
    return {
        "config": to_dict(plan.config),
        "notes": list(plan.prepared.notes),
        "bytes_per_client": exchanges(plan.prepared, plan.optimizer),
        "clients_per_round": plan.updates if plan.method.data == "each" else 1,
        "clients": held(federation),
        "data_notes": list(federation.notes),
        "estimate": estimate(plan),
    }


def estimate(plan: Plan) -> dict[str, float]:
    """Seconds of a step and of scoring one example, measured, and of the whole run, multiplied out."""
    with threads_of(plan):
        step, example = _seconds_of_step(plan), _seconds_of_example(plan)
    config, federation = plan.config, plan.federation
    union = plan.method.data == "union"
    everyone = (UNION,) if union else federation.training_clients
    share = 1.0 if union else plan.updates / len(everyone)
    steps = share * steps_per_round(plan, everyone)
    scored = federation.num_tests + sum(map(len, federation.own_test))
    evaluations = math.ceil(config.rounds / config.eval_every)
    seconds = config.rounds * steps * step + evaluations * scored * example
    return {"seconds": seconds, "seconds_per_step": step, "steps_per_round": steps, "evaluations": evaluations}


def _seconds_of_step(plan: Plan) -> float:
    """Seconds of one step of one client, in the company of a few: an engine may train many at once."""
    _, engine = engine_of_its_own(plan, None, False)
    clients = min(plan.cohort_size, TIMED_CLIENTS)
    try:
        seconds_of_step(plan, engine, clients, 1)  # the first step also pays for what torch sets up once
        return seconds_of_step(plan, engine, clients, TIMED_STEPS)
    finally:
        engine.close()


def _seconds_of_example(plan: Plan) -> float:
    federation = plan.federation
    rows = torch.arange(min(federation.num_tests, plan.config.eval.chunk))
    started = time.perf_counter()
    with UserCode(plan.prepared.name):
        sums = plan.scorer.rows(plan.initial(), federation.tests, rows)
    float(sums["loss"])  # waits for the device
    return (time.perf_counter() - started) / len(rows)
