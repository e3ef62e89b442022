"""How long the parts of FedRevive's server step take, for whoever must know where the server's time goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from fednorm.core.report import Report
from fednorm.core.strategy import Arrived, Context
from fednorm.strategies.revive.server_step import ServerStep
from fednorm.strategies.revive.settings import Settings


def server_step_seconds(settings: Settings, context: Context, repeats: int = 3) -> dict[str, float]:
    """Median seconds to take a teacher, to synthesise and to distil, with all teachers there and the warm-up over.

    The teachers are the model as it starts: what a step costs does not depend on what they know.
    """
    step, tree = ServerStep(settings, context), context.initial
    recall, entries = step.begin(), context.facts.entries
    keys = [key for key, entry in entries.items() if entry.trainable]

    def arrive(client: int) -> Arrived:
        return Arrived(client, 0, settings.warmup + 1, Report(client, 1), tree, {}, tree, {})

    for client in range(settings.teachers):
        step.take(recall, arrive(client))

    def timed(work: Callable[[int], object]) -> float:
        taken: list[float] = []
        for number in range(repeats + 1):
            _wait(context.device)
            start = time.perf_counter()
            work(number)
            _wait(context.device)
            taken.append(time.perf_counter() - start)
        return median(taken[1:])  # the first one also makes room and finds kernels

    first = settings.warmup + 1
    seconds = {"teacher": timed(lambda number: step.take(recall, arrive(settings.teachers + number)))}
    if settings.synthetic:
        seconds["synthesis"] = timed(lambda number: step.synthesise(recall, tree, tree, first + number))
    seconds["distillation"] = timed(lambda number: step.distil(recall, tree, keys, first + number))
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
