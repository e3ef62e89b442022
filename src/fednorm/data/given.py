"""Users' own data from Python: one data set per client, or one that is dealt to clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fednorm.core.expression import parse_term
from fednorm.data.build import make_federation
from fednorm.data.checks import check
from fednorm.data.client_rows import consecutive_rows
from fednorm.data.federation import Federation, called
from fednorm.data.image_set import ImageSet
from fednorm.data.intake import Read, Split, Wishes, take_in
from fednorm.data.items import Columns, pair
from fednorm.data.source import Source, as_source, is_pair
from fednorm.errors import ConfigError

Examples = Any
"""(x, y) of tensors or arrays; named columns; a map-style Dataset or a list of (x, y) items or dicts."""


def from_clients(
    train: Sequence[Examples] | Mapping[str, Examples],
    test: Sequence[Examples] | Mapping[str, Examples] | Examples,
    *,
    task: str | None = None,
    num_classes: int | None = None,
    names: Sequence[str] | None = None,
    columns: Columns | None = None,
    read: Read = "auto",
    memory_limit: int | None = None,
    unseen: int = 0,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    ignore_index: int | None = None,
    name: str = "own data",
) -> Federation:
    """A federation from users' own data: one data set per client, and one test set per client or for all.

    A data set is a pair (x, y) of tensors, arrays or lists, a dict with named columns, or a map-style `Dataset` (or
    list) of (x, y) items or dicts; `columns` names the columns of inputs and targets where that is not clear. Clients
    may come as a dict, whose keys name them. `task` is classification (labels are class numbers) unless another is
    named. A `Dataset` is read once into memory; one whose items change from read to read, or which needs more than
    `memory_limit` bytes (half of the memory at hand), is read anew in every epoch; `read` decides it by hand. The last
    `unseen` clients never train. `mean` and `std` scale images of bytes.

    >>> x, y = torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])
    >>> from_clients([(x, y), (x, y)], (x, y)).clients[1].tolist()
    [4, 5, 6, 7]
    """
    if isinstance(train, Mapping):
        named = cast("Mapping[str, Examples]", train)
        names = list(named) if names is None else names
        train = list(named.values())
    if not isinstance(train, Sequence) or (isinstance(train, tuple) and _is_pair(cast("tuple[Any, ...]", train))):
        raise ConfigError("clients are a list with one data set each; to deal one data set to clients use from_pool")
    if not train:
        raise ConfigError("no client data was given; pass a list with one data set per client")
    known = tuple(str(each) for each in names or ())
    if known and len(known) != len(train):
        raise ConfigError(f"{len(train)} clients but {len(known)} names; give one for each")
    if not 0 <= unseen < len(train):
        raise ConfigError(f"unseen must leave a client to train: 0 to {len(train) - 1}, not {unseen}")
    sources = [as_source(part, called(c, known), columns) for c, part in enumerate(train)]
    tests, per_client = _test_sources(test, len(train), known, columns)
    wishes = Wishes(task or "classification", num_classes, ignore_index, read, memory_limit, name)
    taken = take_in(sources, tests, wishes)
    own = consecutive_rows(taken.test.sizes)
    federation = taken.federation(
        clients=consecutive_rows(taken.train.sizes),
        own_test=own if per_client else (own[0],) * len(train),
        unseen=frozenset(range(len(train) - unseen, len(train))),
        client_names=known,
        mean=mean,
        std=std,
    )
    check(federation)
    return federation


def from_pool(
    train: Examples,
    test: Examples,
    *,
    partition: str = "iid",
    num_clients: int = 5,
    seed: int = 0,
    task: str | None = None,
    num_classes: int | None = None,
    columns: Columns | None = None,
    read: Read = "auto",
    memory_limit: int | None = None,
    unseen: int = 0,
    min_size: int = 2,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    ignore_index: int | None = None,
    name: str = "own data",
) -> Federation:
    """A federation from one data set, dealt to clients as the partition says; all else as in `from_clients`.

    >>> x, y = torch.zeros(8, 3), torch.arange(8) % 2
    >>> from_pool((x, y), (x, y), partition="dir_client(alpha=0.1)", num_clients=2).sizes.tolist()
    [4, 4]
    """
    term = parse_term(partition, "partition", "dir_client(alpha=0.1)")
    sources = [as_source(train, "the training set", columns)]
    tests = [as_source(test, "the test set", columns)]
    wishes = Wishes(task or "classification", num_classes, ignore_index, read, memory_limit, name, labels=True)
    taken = take_in(sources, tests, wishes)
    check(taken.federation(clients=consecutive_rows(taken.train.sizes), own_test=consecutive_rows(taken.test.sizes)))
    labels = ImageSet(
        name=name,
        train_x=torch.empty(taken.train.sizes[0], 0),
        train_y=_dealt_by(taken.train),
        test_x=torch.empty(taken.test.sizes[0], 0),
        test_y=_dealt_by(taken.test),
        num_classes=taken.num_classes,
    )
    dealt = make_federation(labels, term.name, num_clients, seed=seed, unseen=unseen, min_size=min_size, **term.options)
    return taken.federation(clients=dealt.clients, own_test=dealt.own_test, unseen=dealt.unseen, mean=mean, std=std)


def _dealt_by(split: Split) -> Tensor:
    """The labels that examples are dealt by; what is no class number cannot be dealt by, only counted."""
    is_classes = split.y.dim() == 1 and not split.y.is_floating_point()
    return split.y if is_classes else torch.zeros(split.sizes[0], 1, dtype=torch.int64)


def _is_pair(given: tuple[Any, ...]) -> bool:
    return len(given) == 2 and all(hasattr(part, "dtype") for part in given)


def _test_sources(
    test: Any, clients: int, names: tuple[str, ...], columns: Columns | None
) -> tuple[list[Source], bool]:
    """The test sets, and whether each client has its own."""
    if isinstance(test, Mapping) and names and set(cast("Mapping[str, Any]", test)) == set(names):
        named = cast("Mapping[str, Any]", test)
        test = [named[each] for each in names]
    if not isinstance(test, list) or is_pair(test) or _holds_items(cast("list[Any]", test), columns):
        return [as_source(test, "the test set", columns)], False
    parts = cast("list[Any]", test)
    if len(parts) != clients:
        raise ConfigError(f"{clients} clients but {len(parts)} test sets; give one per client, or one for all")
    return [as_source(part, f"the test set of {called(c, names)}", columns) for c, part in enumerate(parts)], True


def _holds_items(given: list[Any], columns: Columns | None) -> bool:
    """Whether a list holds examples, each with one label, and not a test set for each client."""
    try:
        label = pair(given[0], columns)[1]
    except (ConfigError, IndexError):
        return False
    return isinstance(label, int | float) or getattr(label, "ndim", None) == 0
