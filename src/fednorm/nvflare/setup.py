"""What a job says of its run, the same at the server and at every site: JSON values in the job's own config."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fednorm import models
from fednorm.core.expression import parse_term
from fednorm.core.method import Method
from fednorm.core.state import entries
from fednorm.core.strategy import Strategy
from fednorm.core.task import AnyTask
from fednorm.core.user_code import failed
from fednorm.data.federation import Federation
from fednorm.data.from_files.source import find_source
from fednorm.engines.machine import find_device
from fednorm.errors import CheckpointError, ConfigError, FednormError
from fednorm.halves.terms import refuse_needs
from fednorm.models.calling import refuse_given
from fednorm.running.config import RunConfig, from_dict, to_dict, updated
from fednorm.running.extensions import with_extensions
from fednorm.running.initial import read_start
from fednorm.running.on_clock import resolved
from fednorm.running.plan import build_federation
from fednorm.running.tasks import settle_task
from fednorm.scoring.scores import Examples
from fednorm.scoring.tasks import make_task

Permit = Callable[[str], None]
"""Refuses code that a job names, as a dotted path, unless the site lets it run."""


_LISTS = ("sites", "mean", "std")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run on NVFlare: its config, and what a config does not say."""

    config: RunConfig
    sites: tuple[str, ...] = ()
    """names of all sites, where each takes its own rows of a federation that all can read"""
    task: str = "classification"
    outputs: int = 10
    """of the model: classes, labels or targets"""
    in_channels: int = 3
    image_size: int = 32
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """by which inputs are scaled, for strategies whose server makes inputs of its own"""
    run_id: str | None = None
    state_dir: str | None = None
    wait: float = 0.0
    """seconds that the server waits for the answers of an exchange; 0: until all have come"""
    server_reads_data: bool = False
    """whether the server scores the global model on the test set, as in a simulation"""

    def to_json(self) -> dict[str, Any]:
        """As the arguments of a component."""
        lists = {name: list(getattr(self, name)) for name in _LISTS}
        return {**asdict(self), "config": to_dict(_with_digest(self.config, in_groups)), **lists}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Setup:
        """What `to_json` gave; a `ConfigError` where a job says something else."""
        known = [field.name for field in fields(cls)]
        for name in said:
            if name not in known:
                raise ConfigError(f"the job's setup has '{name}', which this fednorm does not know; install the same")
        if not isinstance(said.get("config"), Mapping):
            raise ConfigError("the job's setup has no config of a run; write it anew")
        lists = {name: tuple(said.get(name, ())) for name in _LISTS}
        config = _with_digest(from_dict(said["config"]), lambda groups: groups.replace(" ", ""))
        return cls(**{**said, "config": config, **lists})

    @property
    def method(self) -> Method:
        """The method with what its strategy adds, refused where it needs more than a federation has."""
        method = resolved(self.config)[1]
        refuse_needs(method)
        return method

    @property
    def name(self) -> str:
        """The method as results have it, with its strategy."""
        return self.config.method if self.strategy else self.method.name

    @property
    def strategy(self) -> Strategy | None:
        """What becomes of updates that come one by one; None for rounds."""
        return resolved(self.config)[0]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one example."""
        return (self.in_channels,) if self.image_size == 1 else (self.in_channels, self.image_size, self.image_size)

    @property
    def device(self) -> torch.device:
        return find_device(self.config.engine.device)

    def set_threads(self) -> None:
        """CPU threads of this process: one unless the config says more, as sites that share a machine need it."""
        if self.device.type == "cpu":
            torch.set_num_threads(self.config.engine.threads or 1)

    def load_extensions(self, permit: Permit | None = None) -> None:
        """Import what the config uses, which registers methods, models and the like."""
        if permit is not None:
            for name in self.config.use:
                permit(dotted(name))
        with_extensions(self.config)

    @property
    def data_code(self) -> str | None:
        """`module:function` where the data come from code."""
        name = self.config.data.name
        return name if is_code(name) else None

    def network(self, permit: Permit | None = None) -> nn.Module:
        """The model as it is before surgery, with the values that all start from."""
        config = self.config
        term = parse_term(config.model, "model", "resnet20(shortcut=B)")
        if is_code(term.name) and permit is not None:
            permit(dotted(term.name))
        refuse_given(term)
        sizes = {"num_classes": self.outputs, "in_channels": self.in_channels, "image_size": self.image_size}
        start = read_start(config.init, partial=config.init_partial)
        model = start.before_surgery(models.build(term.name, seed=config.seed, **sizes, **term.options))
        for entry in entries(model) if start.source else ():
            if entry.key not in start.tree or tuple(start.tree[entry.key].shape) != entry.shape:
                raise CheckpointError(
                    f"'{start.source}' has no '{entry.key}' of the model as it is built; on NVFlare give a file that "
                    "has all of it"
                )
        return model

    def own_data(self, site: str, permit: Permit | None = None) -> OwnData:
        """What a site trains on and is tested with."""
        if self.data_code is not None:
            if permit is not None:
                permit(dotted(self.data_code))
            train, test = _called(self.data_code, site)
            return OwnData(train, test, task=self.plain_task())
        task, federation = self.everybodys_data()
        return OwnData.of(federation, _number_of(site, self.sites, federation), task)

    def everybodys_data(self) -> tuple[AnyTask, Federation]:
        """Task and data of a run whose data all can read."""
        task, federation = settle_task(self.task, build_federation(self.config), self.device)
        federation.in_memory("NVFlare")
        return task, federation

    def plain_task(self) -> AnyTask:
        """The task by its name alone, for who has no data: weights by class are in the sums that clients send."""
        return make_task(self.task, self.outputs, counts=lambda: [1] * self.outputs, device=self.device)


@dataclass(frozen=True)
class OwnData:
    """A site's own examples, and what they are for."""

    train: Examples
    test: Examples | None
    task: AnyTask
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @classmethod
    def of(cls, federation: Federation, client: int, task: AnyTask) -> OwnData:
        """A client's part of a federation."""
        rows, tests = federation.clients[client], federation.own_test[client]
        test = (federation.test_x[tests], federation.test_y[tests]) if len(tests) else None
        return cls((federation.x[rows], federation.y[rows]), test, task=task, mean=federation.mean, std=federation.std)


def in_groups(digest: str) -> str:
    """A digest in groups of eight: NVFlare takes a longer row of hex digits in a job for a password, and warns.

    >>> in_groups("0123456789abcdef")
    '01234567 89abcdef'
    """
    return " ".join(digest[start : start + 8] for start in range(0, len(digest), 8))


def _with_digest(config: RunConfig, change: Callable[[str], str]) -> RunConfig:
    digest = config.data.digest
    return config if digest is None else updated(config, {"data.digest": change(digest)})


def is_code(name: str) -> bool:
    """Whether a name of data or of a model is `module:function`, and not `table:FILE` or `timm:NAME`.

    >>> is_code("hospital.data:load"), is_code("resnet20"), is_code("timm:resnet18"), is_code("table:heart.csv")
    (True, False, False, False)
    """
    source, colon, _ = name.partition(":")
    return bool(colon) and source not in ("timm", "torchvision") and find_source(name) is None


def dotted(name: str) -> str:
    """Code as a site's list of what it permits names it: by its dotted path, a file by the path to it.

    >>> dotted("hospital.data:load"), dotted("/home/me/my-methods.py"), dotted("mine")
    ('hospital.data.load', 'use.home.me.my_methods', 'use.mine')
    """
    plain = name.replace(":", ".")
    if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", plain, re.ASCII):
        return plain
    pieces = Path(plain).with_suffix("").parts if plain.endswith(".py") else (plain,)
    return ".".join(["use", *(re.sub(r"^(?=\d)|\W", "_", piece, flags=re.ASCII) for piece in pieces if piece != "/")])


def usual_sites(count: int) -> tuple[str, ...]:
    """The names that NVFlare's simulator and POC give to their clients.

    >>> usual_sites(2)
    ('site-1', 'site-2')
    """
    return tuple(f"site-{number}" for number in range(1, count + 1))


def _number_of(site: str, sites: Sequence[str], federation: Federation) -> int:
    """Which client of a federation a site is: by name, by its place among all sites, or the only one there is."""
    if site in federation.client_names:
        return federation.client_names.index(site)
    trained = federation.training_clients
    if site in sites and len(sites) == len(trained):
        return trained[sorted(sites).index(site)]
    if len(trained) == 1:
        return trained[0]
    raise ConfigError(
        f"site '{site}' does not know which of the {len(trained)} clients of '{federation.name}' it is; "
        f"give sites= with {len(trained)} names, or data of its own with data.clients=1"
    )


def _called(path: str, site: str) -> tuple[Examples, Examples | None]:
    """What the user's function returns for a site: (train, test), each (x, y); test may be None."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)(site)
        train, test = found
        for x, y in (train, test) if test is not None else (train,):
            if len(x) != len(y):
                raise ValueError(f"{len(x)} inputs and {len(y)} labels")
    except FednormError:
        raise
    except Exception as error:
        raise failed(f"data '{path}' of site '{site}' cannot be had", error) from error
    return train, test
