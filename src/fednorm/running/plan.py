"""A run made ready: the config's names become a method, a model, data and a device, and what cannot work is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fednorm import models
from fednorm.core.expression import parse_term
from fednorm.core.method import Method, Phase
from fednorm.core.optim import Optimizer, optimizer
from fednorm.core.report import BySize, Uniform
from fednorm.core.schedule import lr_factor
from fednorm.core.state import Kind, Policy, Tree, entries
from fednorm.data import load_dataset, make_federation
from fednorm.data.augment import parse as parse_augmentation
from fednorm.data.batches import UNION, Batches
from fednorm.data.federation import Federation
from fednorm.data.streams import batches_per_epoch
from fednorm.errors import CheckpointError, ConfigError
from fednorm.halves.merging import Schema
from fednorm.halves.prepared import Prepared, prepare
from fednorm.layers.scheduled import set_total_steps
from fednorm.methods import parse
from fednorm.running.config import RunConfig
from fednorm.running.store import load_tree
from fednorm.scoring.probes import Probe, find_probes
from fednorm.scoring.tasks import Task, make_task

_MOST_SCHEMAS = 64
"""Methods have a handful of phases; a phase made anew for every test must not fill memory."""


@dataclass(frozen=True)
class Plan:
    """Everything an engine needs; a function of the config and the data alone."""

    config: RunConfig
    method: Method
    prepared: Prepared
    federation: Federation
    batches: Batches
    task: Task
    optimizer: Optimizer
    device: torch.device
    probes: tuple[Probe, ...]
    _schemas: dict[int, tuple[Phase, Schema]] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def cohort_size(self) -> int:
        return cohort_size(self.config, self.federation)

    @property
    def phases(self) -> tuple[Phase, ...]:
        query = (self.method.query,) if self.method.query else ()
        return self.method.phases + self.method.finish + query

    def schema(self, phase: Phase) -> Schema:
        """Entry and policy by key in a phase; listed once, since every client of every round asks."""
        held = self._schemas.get(id(phase))
        if held is None or held[0] is not phase:
            if len(self._schemas) >= _MOST_SCHEMAS:
                self._schemas.clear()
            held = self._schemas[id(phase)] = phase, self.prepared.schema(phase, self.optimizer)
        return held[1]

    def initial(self) -> Tree:
        """The server's first state; entries of the optimizer start at zero where the server keeps them."""
        tree = {key: value.to(self.device) for key, value in self.prepared.initial.items()}
        for phase in self.phases:
            for key, (entry, policy) in self.schema(phase).items():
                if entry.kind is Kind.OPTIMIZER and policy in (Policy.SHARED, Policy.FROZEN):
                    tree[key] = torch.zeros(entry.shape, dtype=entry.dtype, device=self.device)
        return tree

    def num_steps(self, client: int, phase: Phase) -> int:
        """Steps a client takes in a phase."""
        fixed = {"epoch": ("epochs", 1), "batch": ("steps", 1)}
        unit, amount = fixed[phase.work] if phase.work in fixed else self.config.local_work()
        return amount if unit == "steps" else amount * self.batches.per_epoch(client)

    def numbers(self, phase: Phase, round: int) -> dict[str, float]:
        """The numbers of a client's training in a round."""
        train = self.config.train
        lr = train.lr * lr_factor(train.schedule, round, self.config.rounds)
        shared = {"lr": lr, "momentum": train.momentum, "weight_decay": train.weight_decay}
        return {**shared, **phase.rule.numbers}


def cohort_size(config: RunConfig, federation: Federation) -> int:
    """How many clients a round draws."""
    available = len(federation.training_clients)
    return min(config.clients_per_round or available, available)


def make_plan(
    config: RunConfig,
    *,
    model: nn.Module | None = None,
    federation: Federation | None = None,
    method: Method | None = None,
    task: Task | None = None,
) -> Plan:
    """Resolve a config; a model, data, method or task given as an object takes the place of the config's name."""
    method = with_weights(method or parse(config.method), config.train.weights)
    lr_factor(config.train.schedule, 1, config.rounds)
    parse_augmentation(config.train.augment)
    device = find_device(config.engine.device)
    dtype = getattr(torch, config.train.dtype)
    federation = federation or build_federation(config)
    if config.clients_per_round and config.clients_per_round > len(federation.training_clients):
        raise ConfigError(
            f"clients_per_round={config.clients_per_round} but only {len(federation.training_clients)} clients train; "
            "give at most that many"
        )
    network = (model or build_model(config, federation)).to(dtype)
    if config.init:
        load_initial(network, load_tree(Path(config.init)), config.init)
    name = f"model '{config.model}'" if model is None else f"the given {type(model).__name__}"
    prepared = prepare(network.cpu(), method, allow_noop=config.allow_noop, name=name)
    prepared.model.to(device)
    _check_batch_size(config, method, prepared)
    _check_momentum(config, method)
    cohort = cohort_size(config, federation)
    federation = replace(
        federation,
        x=federation.x.to(device),
        y=federation.y.to(device),
        test_x=federation.test_x.to(device),
        test_y=federation.test_y.to(device),
    )
    batches = Batches(
        federation=federation,
        seed=config.seed,
        batch_size=config.train.batch_size,
        union_batch_size=config.train.batch_size * cohort,
        augmentation=config.train.augment,
        val_fraction=config.data.val_fraction,
        dtype=dtype,
        remembered=max(4096, 2 * cohort),
    )
    set_total_steps(prepared.model, config.rounds * _typical_steps(config, batches, method))
    _check_validation(config, batches, method)
    return Plan(
        config=config,
        method=method,
        prepared=prepared,
        federation=federation,
        batches=batches,
        task=task or make_task(federation.task, federation.num_classes, federation.ignore_index),
        optimizer=optimizer(config.train.optimizer, config.train.momentum),
        device=device,
        probes=find_probes(config.eval.probes),
    )


def _typical_steps(config: RunConfig, batches: Batches, method: Method) -> int:
    """Steps of an average client in a round, for layers whose schedule spans the training."""
    unit, amount = config.local_work()
    if unit == "steps":
        return amount
    if method.data == "union":
        return max(1, amount * batches.per_epoch(UNION))
    # By size, since there may be a million clients but not a million sizes.
    counts = batches.size_counts()
    size = batches.batch_size
    steps = sum(count * batches_per_epoch(n - batches.num_held(n), size) for n, count in counts.items())
    return max(1, round(amount * steps / counts.total()))


def _check_validation(config: RunConfig, batches: Batches, method: Method) -> None:
    """Every client must keep something to train on, and if validation is asked for, some client something for it."""
    sizes = batches.size_counts()
    federation = batches.federation
    if method.data == "each" and any(batches.num_held(size) == size for size in sizes):
        client = next(c for c in federation.training_clients if not len(batches.rows(c)))
        raise ConfigError(f"client {client} has no training examples left; lower data.val_fraction")
    if method.data == "union" and len(batches.rows(UNION)) == 0:
        raise ConfigError(f"client {UNION} has no training examples left; lower data.val_fraction")
    if config.data.val_fraction and not any(batches.num_held(size) for size in sizes):
        raise ConfigError(
            f"data.val_fraction={config.data.val_fraction} sets no example of any client aside; give a larger share"
        )


def with_weights(method: Method, weights: str) -> Method:
    """The method with `uniform` where it would weigh by size; weights a method sets itself stay."""
    if weights != "uniform":
        return method

    def change(phase: Phase) -> Phase:
        swapped = {kind: Uniform() if weigh == BySize() else weigh for kind, weigh in phase.weigh.items()}
        return replace(phase, weigh=swapped)

    return method.map_phases(change)


def find_device(name: str) -> torch.device:
    """The torch device for `auto`, `cpu`, `cuda`, `cuda:1` or `mps`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device '{name}' is not known; give auto, cpu, cuda, cuda:1 or mps") from None
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device.type, False) or (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise ConfigError(f"device '{name}' is not available on this machine; give auto or cpu")
    return device


def build_federation(config: RunConfig) -> Federation:
    """The federation the config's data section describes."""
    data = config.data
    term = parse_term(data.partition, "partition", "dir_client(alpha=0.1)")
    return make_federation(
        load_dataset(data.name, data.dir),
        term.name,
        data.clients,
        seed=config.seed,
        unseen=data.unseen,
        min_size=data.min_size,
        train_limit=data.train_limit,
        **term.options,
    )


def build_model(config: RunConfig, federation: Federation) -> nn.Module:
    """The model the config names, for the data's channels, size and classes."""
    term = parse_term(config.model, "model", "resnet20(shortcut=B)")
    return models.build(
        term.name,
        num_classes=federation.num_classes,
        in_channels=federation.in_channels,
        image_size=int(federation.x.shape[-1]),
        seed=config.seed,
        **term.options,
    )


def load_initial(model: nn.Module, tree: Mapping[str, Any], source: str) -> None:
    """Load a pretrained checkpoint; every entry must be there, with its shape."""
    for entry in entries(model):
        if entry.key not in tree:
            raise CheckpointError(
                f"'{source}' does not fit the model: it has no '{entry.key}'; give a checkpoint of this model"
            )
        if tuple(tree[entry.key].shape) != entry.shape:
            raise CheckpointError(
                f"'{source}' does not fit the model: '{entry.key}' has shape {tuple(tree[entry.key].shape)}, "
                f"expected {entry.shape}; give a checkpoint of this model and number of classes"
            )
    model.load_state_dict({key: tree[key] for key in model.state_dict() if key in tree}, strict=False)


def _check_momentum(config: RunConfig, method: Method) -> None:
    kept = any(phase.policy[Kind.OPTIMIZER] is not Policy.FRESH for phase in method.phases)
    named = [part.label for part in method.parts if part.claims == {f"policy:{Kind.OPTIMIZER}"}]
    if (
        kept
        and named
        and not optimizer(config.train.optimizer, config.train.momentum).buffers
        and not config.allow_noop
    ):
        raise ConfigError(
            f"'{named[0]}' finds no momentum to maintain with train.momentum={config.train.momentum}; "
            "give --momentum 0.9, or --allow-noop to run it all the same"
        )


def _check_batch_size(config: RunConfig, method: Method, prepared: Prepared) -> None:
    uses_batch = any(entry.batch_norm for entry in prepared.entries)
    if config.train.batch_size == 1 and uses_batch and method.data == "each":
        raise ConfigError(
            "train.batch_size=1 cannot train BatchNorm, which needs statistics of at least 2 examples; "
            "use a larger batch, or a method without batch statistics such as fedavg+gn"
        )
