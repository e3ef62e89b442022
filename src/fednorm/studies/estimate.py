"""How long runs will take, so that a queue begins only what it can end."""

from __future__ import annotations

from fednorm.data.registry import DATASETS
from fednorm.running.config import RunConfig
from fednorm.studies.library import Library

# Milliseconds of a step on an H200 in bf16 with 20 images a client: with no client, and more for each.
_STEP = {
    "resnet20": (0.5, 0.08),
    "resnet18": (0.8, 0.42),
    "digit_cnn": (0.4, 0.21),
    "mobilenet_v2": (3.0, 1.3),
    "vit_tiny": (0.4, 0.1),
}
_OTHER = (1.0, 0.3)
_ROUND, _SCORING, _START = 0.7, 0.15, 25.0
"""Milliseconds of the host for a run's round; seconds to score 10,000 images; seconds until the first round."""
_ROWS = 50_000
"""Examples of a set that does not say how many it has."""
_CPU = 60.0
"""How much slower two CPU cores are, very roughly."""


def seconds_of(config: RunConfig, seeds: int, on_gpu: bool) -> float:
    """Seconds of a run with some seeds in one stack, by what models of its family took; rough, and meant to be."""
    base, each = _STEP.get(config.model.split("(")[0], _OTHER)
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
