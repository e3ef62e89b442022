"""How long runs will take, so that a queue begins only what it can end."""

from __future__ import annotations

import collections
import math

from fednorm.core.expression import parse_term
from fednorm.data.augment import parse, sizes
from fednorm.data.registry import DATASETS
from fednorm.running.config import RunConfig
from fednorm.running.on_clock import resolved
from fednorm.studies.playing import Place

# Milliseconds of a step on an H200 in bf16 with 20 images a client: with no client, and more for each; and the pixels
# along a side of the images that it was timed with.
_STEP = {
    "resnet20": (0.44, 0.07, 32),
    "resnet18": (0.76, 0.35, 32),
    "digit_cnn": (0.27, 0.17, 32),
    "mobilenet_v2": (1.2, 0.5, 32),
    "vit_tiny": (0.42, 0.065, 32),
    "alexnet_bn": (1.0, 0.39, 96),
    "deeplabv3plus": (1.0, 4.3, 192),
}
_OTHER = (1.0, 0.3, 32)
_SIZES = {
    "tiny_imagenet": (64, 64),
    "imagenet1k": (64, 64),
    "pacs": (227, 227),
    "office_caltech10": (256, 256),
    "domainnet10": (256, 256),
    "camvid": (360, 480),
    "cityscapes": (1024, 2048),
}
"""Height and width of a set's images in its full form, where they are far from the 32 pixels of all others."""
_ROUND, _SCORING, _START = 0.7, 0.15, 25.0
"""Milliseconds of the host for a run's round; seconds to score 10,000 images of 32 pixels; seconds until the first
round."""
_VERSION, _REVISION, _READY = 3.0, 0.3, 60.0
"""On a clock: milliseconds of the host for a version; seconds that a server computes for one itself, where its strategy
does so; seconds until stacks of all sizes are ready. The three are guesses."""
_TOGETHER = 4
"""One of so many clients under way is trained at a time: all that were not yet when the first of these is due."""
_ROWS, _TESTS = 50_000, 10_000
"""Examples of a set that does not say how many it has, for training and for tests."""
_CPU = 60.0
"""How much slower two CPU cores are, very roughly."""


def seconds_of(config: RunConfig, seeds: int, on_gpu: bool) -> float:
    """Seconds of a run with some seeds in one stack, by what models of its family took; rough, and meant to be.

    On a clock seeds are played one after the other, and updates in stacks of those that are under way.
    """
    model = parse_term(config.model, "model", "resnet20")
    base, each, side = _STEP.get(model.name, _OTHER)
    height, width = _image_size(config)
    # A stem for ImageNet leaves a quarter of height and width to all layers behind it; the others were timed.
    left = 1 / 16 if model.options.get("stem") == "imagenet" else 1.0
    each *= left * math.prod(sizes(parse(config.train.augment), height, width)[-1]) / side**2
    known = DATASETS.get(config.data.name)
    rows, tests = known.counts if known and known.counts else (_ROWS, _TESTS)
    scoring = _SCORING * tests / 10_000 * left * height * width / 32**2
    strategy, _ = resolved(config)
    if strategy is not None:
        together = config.clock.concurrency or config.data.clients
        updates = config.rounds * (together if strategy.barrier else strategy.buffer)
        step = base * _TOGETHER / together + each * config.train.batch_size / 20
        version = _VERSION / 1000 + (_REVISION if strategy.revise else 0.0)
        seconds = updates * (config.train.local_steps or 1) * step / 1000 + config.rounds * version
        seconds += config.rounds / config.eval_every * scoring
        return _START + seeds * ((seconds + _READY) if on_gpu else seconds * _CPU)
    cohort = config.cohort_size(config.data.clients)
    # How many examples a client has is not known without its data: where the partition does not say so, as if all had
    # the same share of the set.
    division = parse_term(config.data.partition, "partition", "iid")
    share = int(division.options.get("per_client", rows / config.data.clients))
    steps = config.train.local_steps or round((config.train.local_epochs or 1) * share / config.train.batch_size)
    step = base + each * cohort * seeds * config.train.batch_size / 20
    scored = config.rounds / config.eval_every
    seconds = config.rounds * (steps * step + _ROUND * seeds) / 1000 + scored * scoring * seeds
    return _START + seconds * (1.0 if on_gpu else _CPU)


def _image_size(config: RunConfig) -> tuple[int, int]:
    """Height and width of a run's images before they are augmented."""
    height, width = _SIZES.get(config.data.name, (32, 32))
    return (height, width) if config.data.size is None else (config.data.size, config.data.size * width // height)


def usual_seconds(config: RunConfig, seeds: int, place: Place) -> float:
    """The estimate, set right by what the same run took before with other seeds in this precision on such a device."""
    on_gpu = place.on_gpu
    shares = [
        record.run["seconds"]
        for record in place.library.records(config)
        if record.precision == place.numbers
        and record.run.get("ran", {}).get("device", "").startswith("cuda") == on_gpu
    ]
    # What a record has is its run's share of the seconds of a stack, and not who shared it: seeds with the same share
    # are taken for one stack, since to the millisecond no two stacks take the same. Another method in it is not seen.
    slower = [share * count / seconds_of(config, count, on_gpu) for share, count in collections.Counter(shares).items()]
    return seconds_of(config, seeds, on_gpu) * max(slower, default=1.0)
