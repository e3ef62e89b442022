"""Data sets and partitions that users register, by name beside the built-in ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fednorm.core.expression import parse_term
from fednorm.core.extending import check_name, load_installed, summary_of
from fednorm.core.user_code import failed
from fednorm.data.federation import Federation
from fednorm.data.image_set import ImageSet
from fednorm.data.partition import PARTITIONS, PartitionInfo, Rows, checked, generator
from fednorm.data.registry import DATASETS
from fednorm.errors import ConfigError, FednormError, unknown

Make = TypeVar("Make", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class OwnData:
    """A data set that a user registered."""

    name: str
    summary: str
    make: Callable[..., Any]


OWN: dict[str, OwnData] = {}


def register_data(name: str, *, summary: str = "") -> Callable[[Make], Make]:
    """Make a function available as a data set under a name.

    It returns a `Federation` (such as `from_clients` makes), or an `ImageSet`, or a pair of training and test data,
    each (x, y), which the partition then deals to clients. It is given those of dir, clients and seed that it has use
    for; its other keywords are options: `--data "my_set(size=32)"`.
    """

    def enter(make: Make) -> Make:
        if name.replace("-", "_") in DATASETS:
            raise ConfigError(f"data set '{name}' is registered already; choose another name")
        known = OWN.get(name)
        check_name("data set", name, make, known.make if known else None)
        OWN[name] = OwnData(name=name, summary=summary_of(make, summary), make=make)
        return make

    return enter


def own_datasets() -> Mapping[str, OwnData]:
    """The data sets that users and installed packages registered."""
    load_installed()
    return dict(OWN)


def load_own(expression: str, **given: Any) -> Federation | ImageSet | None:
    """What a registered function makes, or None for a set that is not a user's; `given` is what it may ask for."""
    if expression.replace("-", "_") in DATASETS or ":" in expression:
        return None
    term = parse_term(expression, "data set", "my_set(size=32)")
    if term.name not in OWN and term.name not in own_datasets():
        raise unknown("data set", expression, [*DATASETS, *OWN], "fednorm datasets")
    make = OWN[term.name].make
    parameters = inspect.signature(make).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    keywords = {key: value for key, value in given.items() if key in parameters} | term.options
    for key in keywords.keys() - parameters.keys():
        if not takes_any:
            own = ", ".join(name for name in parameters if name not in given) or "none"
            raise ConfigError(f"data set '{term.name}' has no option '{key}'; its options: {own}")
    with _users(f"data set '{term.name}'"):
        made = make(**keywords)
    return _as_data(term.name, made)


@contextmanager
def _users(what: str) -> Iterator[None]:
    """Around a user's function: whatever it raises is told as theirs."""
    try:
        yield
    except FednormError:
        raise
    except Exception as error:
        raise failed(f"{what} failed", error) from error


def refuse_dealing(name: str, **settings: tuple[object, object]) -> None:
    """Refuse settings, each with its default, that say how to deal data that come with their clients."""
    for setting, (value, default) in settings.items():
        if value != default:
            raise ConfigError(f"data set '{name}' comes with its clients; leave out data.{setting}={value}")


def _as_data(name: str, made: Any) -> Federation | ImageSet:
    if isinstance(made, Federation | ImageSet):
        return replace(made, name=name)
    try:
        (train_x, train_y), (test_x, test_y) = made
    except (TypeError, ValueError):
        raise ConfigError(
            f"data set '{name}' returned {type(made).__name__}; return a Federation, an ImageSet, or "
            "((train_x, train_y), (test_x, test_y))"
        ) from None
    tensors = [torch.as_tensor(each) for each in (train_x, train_y, test_x, test_y)]
    labels: list[Tensor] = [tensors[1], tensors[3]]
    if any(each.is_floating_point() for each in labels) or not all(map(len, labels)):
        raise ConfigError(
            f"data set '{name}' has labels of type {labels[0].dtype}; a set that is to be dealt needs whole numbers "
            "from 0, one for each example"
        )
    most = max(int(each.max()) for each in labels)
    train, test = (tensors[0], labels[0].long()), (tensors[2], labels[1].long())
    return ImageSet.of(name, train, test, (), (), (), num_classes=most + 1)


def register_partition(name: str, *, summary: str = "", uses_labels: bool = True) -> Callable[[Make], Make]:
    """Make a function available as a partition under a name.

    It is called with the labels (an array), the number of clients and a numpy generator that follows the seed, and
    with `domains` where it has a parameter of that name; its other keywords are options. It returns an array of row
    indices for each client; no row may be in two of them.
    """

    def enter(deal: Make) -> Make:
        key = name.replace("-", "_")
        known = PARTITIONS.get(key)
        check_name("partition", name, deal, known.function if known else None)
        parameters = list(inspect.signature(deal).parameters.values())[3:]
        options = {each.name: each.default for each in parameters if each.name != "domains"}
        asks_domains = any(each.name == "domains" for each in parameters)

        def own(
            labels: np.ndarray,
            num_clients: int,
            *,
            seed: int,
            min_size: int = 1,
            domains: np.ndarray | None = None,
            **chosen: object,
        ) -> Rows:
            more = {"domains": domains} if asks_domains else {}
            with _users(f"partition '{name}'"):
                rows = list(deal(labels, num_clients, generator(seed, "own", key), **chosen, **more))
            return checked(name, _as_rows(name, rows, len(labels), num_clients), min_size, "change what it deals")

        own.__wrapped__ = deal  # pyright: ignore[reportFunctionMemberAccess]
        PARTITIONS[key] = PartitionInfo(own, options, summary_of(deal, summary), uses_labels, asks_domains)
        return deal

    return enter


def _as_rows(name: str, given: Any, count: int, num_clients: int) -> Rows:
    """The rows that a user's partition dealt, once they are known to be rows."""
    rows = [np.asarray(each) for each in given]
    if len(rows) != num_clients:
        raise ConfigError(f"partition '{name}' dealt to {len(rows)} clients; expected {num_clients}, one array each")
    for client, each in enumerate(rows):
        if each.ndim != 1 or not (np.issubdtype(each.dtype, np.integer) or not each.size):
            raise ConfigError(f"partition '{name}' gave client {client} no row numbers; expected an array of them")
        if each.size and not (each.min() >= 0 and each.max() < count):
            raise ConfigError(
                f"partition '{name}' gave client {client} row {int(each.max())} of {count} examples; "
                f"expected 0 to {count - 1}"
            )
    seen = np.bincount(np.concatenate([each.astype(np.int64) for each in rows]), minlength=count)
    if seen.max(initial=0) > 1:
        raise ConfigError(f"partition '{name}' dealt row {int(seen.argmax())} twice; give each row to one client")
    return rows
