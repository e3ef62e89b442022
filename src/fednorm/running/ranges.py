"""Which numbers a config may hold, and which of its settings exclude each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fednorm.core.schedule import check_warmup
from fednorm.data.from_files.source import find_source
from fednorm.errors import ConfigError

if TYPE_CHECKING:
    from fednorm.running.config import RunConfig


def check_ranges(config: RunConfig) -> None:
    """Refuse numbers that cannot be, and settings that exclude each other, by name."""
    train, data = config.train, config.data
    if train.local_steps is not None and train.local_epochs is not None:
        raise ConfigError(
            f"local_steps={train.local_steps} and local_epochs={train.local_epochs} exclude each other; give one"
        )
    if config.clients_per_round is not None and config.client_fraction is not None:
        raise ConfigError(
            f"clients_per_round={config.clients_per_round} and client_fraction={config.client_fraction} exclude each "
            "other; give one"
        )
    at_least = {
        "rounds": (config.rounds, 1),
        "seed": (config.seed, 0),
        "clients_per_round": (config.clients_per_round, 1),
        "keep_every": (config.keep_every, 0),
        "train.local_steps": (train.local_steps, 1),
        "train.local_epochs": (train.local_epochs, 1),
        "train.batch_size": (train.batch_size, 1),
        "train.lr": (train.lr, 0),
        "train.head_lr": (train.head_lr, 0),
        "train.momentum": (train.momentum, 0),
        "train.weight_decay": (train.weight_decay, 0),
        "data.clients": (data.clients, 1),
        "data.unseen": (data.unseen, 0),
        "data.min_size": (data.min_size, 1),
        "data.train_limit": (data.train_limit, 1),
        "data.size": (data.size, 1),
        "eval.every": (config.eval.every, 0),
        "eval.chunk": (config.eval.chunk, 1),
        "eval.max_clients": (config.eval.max_clients, 1),
        "eval.probe_every": (config.eval.probe_every, 1),
        "clock.concurrency": (config.clock.concurrency, 1),
        "engine.threads": (config.engine.threads, 0),
        "engine.workers": (config.engine.workers, 0),
        "engine.loaders": (config.engine.loaders, 0),
        "engine.retries": (config.engine.retries, 0),
        "engine.norm_factor": (config.engine.norm_factor, 0),
        "engine.checkpoint_every": (config.engine.checkpoint_every, 0),
    }
    for name, (value, least) in at_least.items():
        if value is not None and not least <= value < math.inf:  # also refuses NaN
            raise ConfigError(f"{name}={value} is out of range; give {least} or more")
    at_most = {
        "data.size": (data.size, 1 << 14),
        "engine.threads": (config.engine.threads, 1 << 12),
        "engine.workers": (config.engine.workers, 1 << 12),
        "engine.loaders": (config.engine.loaders, 1 << 12),
    }
    for name, (value, most) in at_most.items():
        if value is not None and value > most:
            raise ConfigError(f"{name}={value} is out of range; give {most} or less")
    if not 0 <= data.val_fraction < 1:
        raise ConfigError(f"data.val_fraction={data.val_fraction} is out of range; give 0 up to below 1")
    if config.engine.quorum is not None and not 0 < config.engine.quorum <= 1:
        raise ConfigError(f"engine.quorum={config.engine.quorum} is out of range; give a share above 0, up to 1")
    if config.keep == "best" and not data.val_fraction:
        raise ConfigError(
            "keep=best chooses by validation, and data.val_fraction=0 sets nothing aside; give --val-fraction 0.1"
        )
    if config.init_partial and not config.init:
        raise ConfigError("init_partial says how to read a file, and none is given; give --init FILE")
    if config.client_fraction is not None and not 0 < config.client_fraction <= 1:
        raise ConfigError(f"client_fraction={config.client_fraction} is out of range; give a share above 0, up to 1")
    world = config.world
    if not 0 <= world.dropout < 1:
        raise ConfigError(f"world.dropout={world.dropout} is out of range; give 0 up to below 1")
    if not 0 <= world.stragglers <= 1:
        raise ConfigError(f"world.stragglers={world.stragglers} is out of range; give 0 up to 1")
    if not 0 < world.slowness <= 1:
        raise ConfigError(f"world.slowness={world.slowness} is out of range; give a share above 0, up to 1")
    check_warmup(train.warmup, config.rounds)
    if not 0 < data.test_fraction < 1:
        raise ConfigError(f"data.test_fraction={data.test_fraction} is out of range; give a share above 0 and below 1")
    # How many clients there are is not known before files that bring their own are read.
    if data.unseen >= data.clients and find_source(data.name) is None:
        raise ConfigError(f"data.unseen={data.unseen} leaves no client of {data.clients} to train; give less")
