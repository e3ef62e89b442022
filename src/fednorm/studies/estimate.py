"""How long runs will take, so that a queue begins only what it can end."""

from __future__ import annotations

from fednorm.data.registry import DATASETS
from fednorm.running.config import RunConfig
from fednorm.running.on_clock import resolved
from fednorm.studies.library import Library

# Milliseconds of a step on an H200 in bf16 with 20 images a client: with no client, and more for each.
_STEP = {
    "resnet20": (0.44, 0.07),
    "resnet18": (0.76, 0.35),
    "digit_cnn": (0.27, 0.17),
    "mobilenet_v2": (1.2, 0.5),
    "vit_tiny": (0.42, 0.065),
}
_OTHER = (1.0, 0.3)
_ROUND, _SCORING, _START = 0.7, 0.15, 25.0
"""Milliseconds of the host for a run's round; seconds to score 10,000 images; seconds until the first round."""
_VERSION, _REVISION, _READY = 3.0, 0.3, 60.0
"""On a clock: milliseconds of the host for a version; seconds that a server computes for one itself, where its strategy
does so; seconds until stacks of all sizes are ready. The three are guesses."""
_TOGETHER = 4
"""One of so many clients under way is trained at a time: all that were not yet when the first of these is due."""
_ROWS = 50_000
"""Examples of a set that does not say how many it has."""
_CPU = 60.0
"""How much slower two CPU cores are, very roughly."""


def seconds_of(config: RunConfig, seeds: int, on_gpu: bool) -> float:
    """Seconds of a run with some seeds in one stack, by what models of its family took; rough, and meant to be.

    On a clock seeds are played one after the other, and updates in stacks of those that are under way.
    """
    base, each = _STEP.get(config.model.split("(")[0], _OTHER)
    strategy, _ = resolved(config)
    if strategy is not None:
        together = config.clock.concurrency or config.data.clients
        updates = config.rounds * (together if strategy.barrier else strategy.buffer)
        step = base * _TOGETHER / together + each * config.train.batch_size / 20
        version = _VERSION / 1000 + (_REVISION if strategy.revise else 0.0)
        seconds = updates * (config.train.local_steps or 1) * step / 1000 + config.rounds * version
        seconds += config.rounds / config.eval_every * _SCORING
        return _START + seeds * ((seconds + _READY) if on_gpu else seconds * _CPU)
    cohort = config.cohort_size(config.data.clients)
    # An epoch of a client is not known without its data: as if all had the same share of the set.
    known = DATASETS.get(config.data.name)
    rows = known.counts[0] if known and known.counts else _ROWS
    epoch = rows / config.data.clients / config.train.batch_size
    steps = config.train.local_steps or round((config.train.local_epochs or 1) * epoch)
    step = base + each * cohort * seeds * config.train.batch_size / 20
    scored = config.rounds / config.eval_every
    seconds = config.rounds * (steps * step + _ROUND * seeds) / 1000 + scored * _SCORING * seeds
    return _START + seconds * (1.0 if on_gpu else _CPU)


def usual_seconds(config: RunConfig, seeds: int, on_gpu: bool, library: Library) -> float:
    """The estimate, or what the same run took before with other seeds on such a device."""
    before = [
        record.run["seconds"]
        for record in library.records(config)
        if (record.run.get("ran", {}).get("device", "").startswith("cuda")) == on_gpu
    ]
    return max(before) * seeds if before else seconds_of(config, seeds, on_gpu)
