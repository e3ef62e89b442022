"""A run made ready: the config's names become a method, a model, data and a device, and what cannot work is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import nn

from fednorm import models
from fednorm.core.expression import parse_term
from fednorm.core.method import Method
from fednorm.core.optim import Optimizer
from fednorm.core.optimizers import SGD, with_nesterov
from fednorm.core.schedule import lr_factor
from fednorm.core.state import Kind, Policy
from fednorm.core.strategy import Strategy
from fednorm.core.task import AnyTask
from fednorm.core.world import World
from fednorm.data import load_dataset, make_federation
from fednorm.data.augment import parse as parse_augmentation
from fednorm.data.batches import UNION, num_held
from fednorm.data.build import check_options
from fednorm.data.checks import check
from fednorm.data.federation import Federation
from fednorm.data.from_files.source import find_source
from fednorm.data.live import usual_loaders
from fednorm.data.own import load_own, refuse_dealing
from fednorm.data.pixel_scale import with_pixel_scale
from fednorm.engines.ignored import refuse_ignored, refuse_nothing_to_narrow
from fednorm.engines.machine import find_device
from fednorm.errors import ConfigError
from fednorm.halves.habits import find_habits
from fednorm.halves.messages import LocalWork
from fednorm.halves.prepared import Prepared
from fednorm.halves.site import Sites, batches_of
from fednorm.halves.terms import agree, total_steps, typical_steps
from fednorm.models.calling import refuse_given
from fednorm.models.fitting import check_inputs
from fednorm.running.config import DataConfig, RunConfig
from fednorm.running.consent import refuse_unasked
from fednorm.running.extensions import with_extensions
from fednorm.running.initial import read_start
from fednorm.running.on_clock import Clock, make_clock, resolved, settled
from fednorm.running.own_files import build_own
from fednorm.running.tasks import settle_task
from fednorm.scoring.probes import find_probes


@dataclass(frozen=True, kw_only=True)
class Plan(Sites):
    """The sites of a whole federation in one place, and what is to be done; a function of the config and the data."""

    config: RunConfig
    federation: Federation
    clock: Clock | None = None
    """for a run in virtual time"""

    @property
    def name(self) -> str:
        """The method as results have it, with its strategy."""
        return self.config.method if self.clock else self.method.name

    @property
    def cohort_size(self) -> int:
        """How many clients a round draws, or on a clock have a job at a time."""
        if self.clock is not None:
            return self.clock.concurrency
        return self.config.cohort_size(len(self.federation.training_clients))

    @property
    def updates(self) -> int:
        """How many updates make a round, or on a clock a version."""
        if self.clock is None:
            return self.cohort_size
        return self.clock.concurrency if self.clock.strategy.barrier else self.clock.strategy.buffer

    @property
    def world(self) -> World:
        """What goes wrong with clients."""
        return World(self.config.seed, **vars(self.config.world))


def make_plan(
    config: RunConfig,
    *,
    model: nn.Module | None = None,
    federation: Federation | None = None,
    method: Method | None = None,
    task: AnyTask | None = None,
    code: Collection[str] = (),
) -> Plan:
    """Resolve a config; a model, data, method or task given as an object takes the place of the config's name.

    A config may have been read from anywhere, so code that it names is not imported unless it is among `code`, which
    is `named_code(config)` of a config that its user wrote or consented to.
    """
    refuse_unasked(config, code)
    config = with_extensions(config)
    config = settled(config) if method is None else config
    strategy, method = resolved(config, method)
    lr_factor(config.train.schedule, 1, config.rounds)
    parse_augmentation(config.train.augment)
    device = find_device(config.engine.device)
    refuse_ignored(config.engine, device, config.train.dtype)
    task, federation = settle_task(config.task, federation or build_federation(config), device, task)
    check(federation, task.kind or task.name)
    _check_augmentation(config, federation)
    clock = make_clock(config, strategy, federation)
    available = len(federation.training_clients)
    if config.clients_per_round and config.clients_per_round > available:
        raise ConfigError(
            f"clients_per_round={config.clients_per_round} but only {available} clients train; give at most that many"
        )
    network = build_model(config, federation, getattr(task, "outputs", None)) if model is None else model
    start = read_start(config.init, partial=config.init_partial)
    agreed = agree(
        start.before_surgery(network),
        method,
        local_work(config, federation, method, strategy),
        weights=config.train.weights,
        device=device,
        allow_noop=config.allow_noop,
        name=f"model '{config.model}'" if model is None else f"the given {type(model).__name__}",
    )
    agreed = start.after_surgery(agreed)
    _check_world(config, method)
    _check_batch_size(config, method, agreed.prepared)
    _check_momentum(config, method, agreed.optimizer)
    refuse_nothing_to_narrow(config.engine, agreed.prepared.model, agreed.prepared.name)
    loaders = usual_loaders() if config.engine.loaders is None else config.engine.loaders
    federation = replace(
        federation,
        live=federation.live and federation.live.with_loaders(loaders),
        live_test=federation.live_test and federation.live_test.with_loaders(loaders),
        x=federation.x.to(device),
        y=federation.y.to(device),
        test_x=federation.test_x.to(device),
        test_y=federation.test_y.to(device),
    )
    plan = Plan(
        prepared=agreed.prepared,
        work=agreed.work,
        optimizer=agreed.optimizer,
        device=device,
        batches=batches_of(federation.pool, agreed, cohort=config.cohort_size(available)),
        task=task,
        probes=find_probes(config.eval.probes),
        config=config,
        federation=federation,
        clock=clock,
    )
    _check_validation(plan)
    return replace(plan, habits=find_habits(plan))


def work_of(config: RunConfig) -> LocalWork:
    """What every client does in a round, as far as a config says without data."""
    train = config.train
    unit, amount = config.local_work()
    return LocalWork(
        seed=config.seed,
        rounds=config.rounds,
        unit=unit,
        amount=amount,
        batch_size=train.batch_size,
        augmentation=train.augment,
        val_fraction=config.data.val_fraction,
        optimizer=with_nesterov(train.optimizer) if train.nesterov else train.optimizer,
        lr=train.lr,
        head_lr=train.head_lr,
        momentum=train.momentum,
        weight_decay=train.weight_decay,
        decay_vectors=train.decay_vectors,
        schedule=train.schedule,
        warmup=train.warmup,
        dtype=train.dtype,
        chunk=config.eval.chunk,
    )


def local_work(
    config: RunConfig, federation: Federation, method: Method, strategy: Strategy | None = None
) -> LocalWork:
    """What every client does in a round, or on a clock in a job, with the steps that follow from everybody's data."""
    work = work_of(config)
    held = config.data.val_fraction
    sizes = Counter[int]()
    for size, count in size_counts(federation).items():
        sizes[size - num_held(size, held)] += count
    if strategy is not None:
        return replace(work, total_steps=total_steps(work, sizes, strategy))
    steps = typical_steps(work, sizes)
    if method.data == "union" and work.unit == "epochs":  # one client with all data, on batches as large as a cohort's
        cohort = config.cohort_size(sizes.total())
        whole = {sum(size * count for size, count in sizes.items()): 1}
        steps = typical_steps(replace(work, batch_size=work.batch_size * cohort), whole)
    return replace(work, total_steps=config.rounds * steps)


def size_counts(federation: Federation) -> Counter[int]:
    """How many training clients there are of each number of examples, validation included."""
    sizes, many = federation.sizes.unique(return_counts=True)
    counts = Counter(dict(zip(sizes.tolist(), many.tolist(), strict=True)))
    counts.subtract(int(federation.sizes[client]) for client in federation.unseen)
    return +counts


def _check_validation(plan: Plan) -> None:
    """Every client must keep something to train on, and if validation is asked for, some client something for it."""
    batches, federation, share = plan.batches, plan.federation, plan.config.data.val_fraction
    sizes = size_counts(federation)
    if plan.method.data == "each" and any(num_held(size, share) == size for size in sizes):
        client = next(c for c in federation.training_clients if not len(batches.rows(c)))
        raise ConfigError(f"client {client} has no training examples left; lower data.val_fraction")
    if plan.method.data == "union" and len(batches.rows(UNION)) == 0:
        raise ConfigError(f"client {UNION} has no training examples left; lower data.val_fraction")
    if share and not any(num_held(size, share) for size in sizes):
        raise ConfigError(f"data.val_fraction={share} sets no example of any client aside; give a larger share")


def build_federation(config: RunConfig) -> Federation:
    """The federation the config's data section describes."""
    return with_pixel_scale(_dealt(config), config.data.scaling)


def _dealt(config: RunConfig) -> Federation:
    data = config.data
    source = find_source(data.name)
    if source is not None:
        return build_own(source, config)
    own = load_own(data.name, dir=data.dir, clients=data.clients, seed=config.seed)
    if isinstance(own, Federation):
        usual = DataConfig()
        named = ("partition", "unseen", "train_limit", "size")
        refuse_dealing(data.name, **{name: (getattr(data, name), getattr(usual, name)) for name in named})
        return own
    term = parse_term(data.partition, "partition", "dir_client(alpha=0.1)")
    check_options(term.name, term.options)
    if own is not None and data.size is not None:
        own = own.resized(data.size)
    return make_federation(
        own or load_dataset(data.name, data.dir, size=data.size),
        term.name,
        data.clients,
        seed=config.seed,
        unseen=data.unseen,
        min_size=data.min_size,
        train_limit=data.train_limit,
        **term.options,
    )


def build_model(config: RunConfig, federation: Federation, outputs: int | None = None) -> nn.Module:
    """The model the config names, for the data's channels, size and classes, or with as many outputs as a task says."""
    term = parse_term(config.model, "model", "resnet20(shortcut=B)")
    check_inputs(term.name, federation.x, federation.name)
    refuse_given(term)
    return models.build(
        term.name,
        num_classes=outputs or federation.num_classes,
        in_channels=federation.in_channels,
        image_size=1 if federation.x.dim() == 2 else int(federation.x.shape[-1]),
        seed=config.seed,
        **term.options,
    )


def _check_augmentation(config: RunConfig, federation: Federation) -> None:
    augment, shape = config.train.augment, tuple(federation.x.shape[1:])
    if parse_augmentation(augment).steps and len(shape) != 3:
        raise ConfigError(
            f"train.augment='{augment}' moves the pixels of images (channels, height, width), but an example of "
            f"'{federation.name}' has shape {shape}; use train.augment=none"
        )


def _check_momentum(config: RunConfig, method: Method, optimizer: Optimizer) -> None:
    kept = any(phase.policy[Kind.OPTIMIZER] is not Policy.FRESH for phase in method.phases)
    named = [part.label for part in method.parts if part.claims == {f"policy:{Kind.OPTIMIZER}"}]
    if not (kept and named) or optimizer.buffers or config.allow_noop:
        return
    if optimizer == SGD:
        raise ConfigError(
            f"'{named[0]}' finds no momentum to maintain with train.momentum={config.train.momentum}; "
            "give --momentum 0.9, or --allow-noop to run it all the same"
        )
    raise ConfigError(
        f"'{named[0]}' finds no buffers to maintain, which optimizer '{optimizer.name}' has not; "
        "give another optimizer, or --allow-noop to run it all the same"
    )


def _check_world(config: RunConfig, method: Method) -> None:
    if config.world.stragglers and "lockstep" in method.needs:
        raise ConfigError(
            f"'{method.name}' steps in lock-step, where all wait for the slowest, so world.stragglers="
            f"{config.world.stragglers} cannot be played; set it to 0, or take another method"
        )


def _check_batch_size(config: RunConfig, method: Method, prepared: Prepared) -> None:
    uses_batch = any(entry.batch_norm for entry in prepared.entries)
    if config.train.batch_size == 1 and uses_batch and method.data == "each":
        raise ConfigError(
            "train.batch_size=1 cannot train BatchNorm, which needs statistics of at least 2 examples; "
            "use a larger batch, or a method without batch statistics such as fedavg+gn"
        )
