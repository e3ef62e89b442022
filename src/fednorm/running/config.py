"""What a run is: frozen dataclasses, filled from a TOML file, `--set` and flags, checked in one place.

The string under each field is its help text.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fednorm.core.expression import MOST
from fednorm.errors import ConfigError, unknown
from fednorm.running.ranges import check_ranges


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data, and how it is spread over the clients."""

    name: str = "fashion_mnist_small"
    """data set (`fednorm datasets` lists them), or your own: folder:DIR, table:FILE, npz:FILE"""
    dir: str | None = None
    """folder with the data sets; default: the environment variable FEDNORM_DATA"""
    partition: str = "shards"
    """how data is dealt, such as iid, shards, dir_client(alpha=0.1)"""
    clients: int = 5
    """number of clients"""
    unseen: int = 0
    """how many clients, the last ones, never train and are scored as newcomers"""
    min_size: int = 2
    """fewest examples a client may have"""
    val_fraction: float = 0.0
    """share of each client's training data set aside to choose the best round"""
    train_limit: int | None = None
    """use at most this many training examples"""
    size: int | None = None
    """pixels a side that images are brought to; default: as they are"""
    scaling: Literal["auto", "unit", "symmetric", "standard"] = "auto"
    """scale of pixels: unit (0 to 1), symmetric (-1 to 1), standard (by mean and deviation); auto: the set's own"""
    target: str | None = None
    """column of a table to be predicted; several, with commas between, for many labels or numbers"""
    client: str | None = None
    """column of a table that names each row's client; default: the partition deals the rows"""
    split: str | None = None
    """column of a table that says train or test; default: a share of each client's rows is drawn for tests"""
    features: tuple[str, ...] = ()
    """columns of a table to learn from; default: all others"""
    categories: tuple[str, ...] = ()
    """columns of a table whose numbers are codes, to be treated as categories"""
    standardize: Literal["pooled", "client", "none"] = "pooled"
    """whose mean and deviation a table's numbers are scaled by: of all training clients, each client's own, or none"""
    missing: Literal["refuse", "mean"] = "refuse"
    """what becomes of missing numbers in a table: refused by row and column, or replaced by the mean"""
    test_fraction: float = 0.2
    """share of each client's rows set aside for tests, where your files do not say which"""
    digest: str | None = None
    """digest of your own files when the run began; other data are refused"""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What clients do in a round."""

    local_steps: int | None = None
    """steps a client takes in a round (exclusive with local_epochs)"""
    local_epochs: int | None = None
    """passes over its data a client makes in a round (exclusive with local_steps)"""
    batch_size: int = 20
    """examples in a client's batch"""
    optimizer: str = "sgd"
    """local optimizer: sgd, sgd(nesterov=true), adam(beta1=0.9,beta2=0.999,eps=1e-8), adamw(...), or one of your own"""
    nesterov: bool = False
    """whether the momentum of sgd is Nesterov's"""
    lr: float = 0.05
    """learning rate of the first round"""
    head_lr: float | None = None
    """learning rate of the head: the last layer, or all but the backbone in models that have one; default: train.lr"""
    momentum: float = 0.9
    """momentum of SGD"""
    weight_decay: float = 0.0
    """weight decay"""
    decay_vectors: bool = True
    """whether weight decay also acts on vectors: gamma, beta and biases"""
    schedule: str = "constant"
    """learning rate by round: constant, step (x0.1 at 50 % and 75 %), step(factor=0.1,at=0.3/0.6), cosine, linear"""
    warmup: float = 0.0
    """rounds in which the learning rate rises to what the schedule says, or a share of all rounds below 1"""
    augment: str = "none"
    """augmentation of training batches: none, flip, crop(2)+flip, resized_crop(low=0.08,high=1)+flip, rotate, window"""
    weights: Literal["size", "uniform"] = "size"
    """weights of the clients in the average"""
    dtype: Literal["float32", "float64"] = "float32"
    """type of the model's numbers"""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What is scored, and when."""

    every: int = 0
    """score the model every N rounds; 0: about twenty times in a run"""
    chunk: int = 500
    """examples scored at once"""
    max_clients: int = 1000
    """score the own models of at most this many clients: a sample drawn by the seed, which the result says"""
    average: Literal["all", "last_cohort"] = "all"
    """whose local state is averaged for the pooled score and for newcomers: all clients', or those of the last round"""
    probes: tuple[str, ...] = ()
    """quantities to record: grad-norm, drift, running-mean, running-var of each client's last step, statistics-shift,
    mean-shift, var-shift, batch-shift of its work, global-shift, client-spread of the merge"""
    probe_every: int = 1
    """record the probes every N rounds"""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Where and how the run is computed."""

    name: Literal["auto", "sequential", "stacked", "workers"] = "auto"
    """engine: sequential, workers (CPU processes, same bits), stacked (all clients at once); auto: stacked on GPUs"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps"""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """numbers inside a GPU's convolutions and norms (bf16: stacked engine); weights, statistics, merges keep theirs"""
    threads: int = 0
    """CPU threads; 0: torch's choice, and one beside a GPU, with the engine auto or in a comparison on a CPU"""
    workers: int = 0
    """processes of the workers engine; 0: one per core"""
    loaders: int | None = None
    """processes that read data which are not kept in memory; 0: none; default: one per core, up to 4"""
    quorum: float | None = None
    """go on without clients that fail or are refused, while this share remains; default: stop at the first"""
    retries: int = 0
    """times that clients which failed or were refused are asked again, where too few remain without them"""
    norm_factor: float | None = 1000.0
    """refuse updates this many times as long as the median client's; 0: whatever their length"""
    checkpoint_every: int | None = None
    """rounds between two checkpoints; none: every 2 seconds, so after every round that takes longer; 0: at the end"""


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """What goes wrong with clients; keyed by seed, round and client, so the same in every engine."""

    dropout: float = 0.0
    """probability that a client drawn for a round is gone and takes no part in it; one client always stays"""
    stragglers: float = 0.0
    """probability that a client is slow in a round and does only a part of its local steps"""
    slowness: float = 0.5
    """least share of its steps that a slow client does; the share is drawn evenly from here up to 1"""


@dataclass(frozen=True, kw_only=True)
class ClockConfig:
    """Virtual time: for runs whose server takes updates as they come, and for those that are compared with them."""

    strategy: str | None = None
    """what a server does with updates that come one by one, such as fedbuff(b=10); rounds are then its versions"""
    concurrency: int | None = None
    """clients that have a job at a time; default: all"""
    times: str = "default"
    """how long jobs take: default, shifted, exponential(mean=1.0), equal, file:PATH, or one of your own"""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: one method, one seed."""

    method: str = "fedavg"
    """method expression, such as fixbn or fedprox(mu=0.01)+gn"""
    model: str = "small_resnet"
    """model name, such as resnet20(shortcut=B), timm:NAME, package.module:factory"""
    task: str | None = None
    """what outputs mean: classification(weights=balanced), multilabel, regression(loss=l1); default: the data's own"""
    rounds: int = 40
    """communication rounds"""
    clients_per_round: int | None = None
    """clients drawn for each round; default: all (exclusive with client_fraction)"""
    client_fraction: float | None = None
    """share of the clients drawn for each round, at least one client (exclusive with clients_per_round)"""
    seed: int = 0
    """seed of everything random"""
    init: str | None = None
    """safetensors file to start from: of the model, or of a run with the same method"""
    init_partial: bool = False
    """start from whatever of that file fits by name and shape, and say what did not"""
    keep: Literal["last", "best"] = "last"
    """models to keep: the last, or also the best by validation (needs data.val_fraction)"""
    keep_every: int = 0
    """write the global model every N rounds, as round-N.safetensors; 0: never"""
    use: tuple[str, ...] = ()
    """Python files or modules to import, which register methods, models, data sets and the like"""
    allow_noop: bool = False
    """run a method that finds nothing to act on"""
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    clock: ClockConfig = field(default_factory=ClockConfig)

    def __post_init__(self) -> None:
        check_ranges(self)

    def local_work(self) -> tuple[Literal["steps", "epochs"], int]:
        """Local steps or epochs of a round; one epoch where neither is given."""
        if self.train.local_steps is not None:
            return "steps", self.train.local_steps
        return "epochs", self.train.local_epochs or 1

    def cohort_size(self, available: int) -> int:
        """How many of the clients that train a round draws."""
        if self.client_fraction is not None:
            return max(1, int(self.client_fraction * available + 0.5))
        return min(self.clients_per_round or available, available)

    @property
    def eval_every(self) -> int:
        return self.eval.every or max(1, self.rounds // 20)


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON values."""
    return {
        f.name: to_dict(value) if is_dataclass(value) else list(value) if isinstance(value, tuple) else value
        for f in fields(config)
        for value in [getattr(config, f.name)]
    }


def from_dict(values: Mapping[str, Any], cls: type[Any] = RunConfig, prefix: str = "") -> Any:
    """A config from nested plain values; an unknown key or a value of the wrong type is refused by name."""
    hints = _hints(cls)
    known = [f.name for f in fields(cls)]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise unknown("config field", f"{prefix}{key}", [f"{prefix}{name}" for name in known])
        hint = hints[key]
        if isinstance(hint, type) and is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{prefix}{key}={value!r} is not a table; write [{prefix}{key}] with its fields below"
                )
            arguments[key] = from_dict(value, hint, f"{prefix}{key}.")
        else:
            arguments[key] = _coerce(f"{prefix}{key}", value, hint)
    return cls(**arguments)


@cache
def _hints(cls: type[Any]) -> Mapping[str, Any]:
    """The types of a class's fields; kept, since studies make thousands of configs."""
    return get_type_hints(cls)


def _coerce(name: str, value: Any, hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            value = [item for item in str(value).split(",") if item]
        return tuple(_coerce(name, item, args[0]) for item in value)
    options = args if origin in (Literal, Union, types.UnionType) else (hint,)
    if isinstance(value, int) and abs(value) > MOST:
        shown = str(value) if abs(value) < 10**30 else f"{str(value)[:12]}..."
        raise ConfigError(f"{name}={shown} is out of range; give {MOST} or less")
    if float in options and int not in options and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    for option in options:
        if option is type(None) and value is None:
            return None
        if isinstance(option, type) and type(value) is option:
            return value
        if not isinstance(option, type) and value == option:
            return value
    shown = [o.__name__ if isinstance(o, type) else repr(o) for o in options if o is not type(None)]
    raise ConfigError(f"{name}={value!r} does not fit; give {' or '.join(shown)}")


def updated(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The config with dotted fields set: `updated(config, {"train.lr": 0.1})`."""
    nested = to_dict(config)
    for path, value in changes.items():
        *parents, last = path.split(".")
        table = nested
        for parent in parents:
            table = table.get(parent)
            if not isinstance(table, dict):
                raise unknown("config field", path, all_fields())
        if last not in table or isinstance(table[last], dict):
            raise unknown("config field", path, all_fields())
        table[last] = value
    return from_dict(nested)


def all_fields(cls: type[Any] = RunConfig, prefix: str = "") -> list[str]:
    """Every settable field by its dotted name."""
    names: list[str] = []
    for f in dataclasses.fields(cls):
        hint = _hints(cls)[f.name]
        nested = isinstance(hint, type) and is_dataclass(hint)
        names += all_fields(hint, f"{prefix}{f.name}.") if nested else [f"{prefix}{f.name}"]
    return names


def flat(config: RunConfig) -> dict[str, Any]:
    """Every field of a config by its dotted name.

    >>> flat(RunConfig())["train.lr"]
    0.05
    """
    values: dict[str, Any] = {}
    for name in all_fields():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        values[name] = value
    return values


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> str:
    """The fields in which two configs differ, for an error.

    >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
    'a.b was 1, is 3'
    """
    found = []
    for key in sorted(stored.keys() | wanted.keys()):
        old, new = stored.get(key), wanted.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found.append(differences(old, new, f"{prefix}{key}."))
        elif old != new:
            found.append(f"{prefix}{key} was {old}, is {new}")
    return "; ".join(filter(None, found))
