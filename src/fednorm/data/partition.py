"""Ways to divide a data set over clients: pure functions of (labels, number of clients, seed).

Each returns one ascending array of row indices per client; rows are disjoint, except where `dir_client` is told a
`size`. Every function uses all rows, except `shards_unequal` (drops the rows that fill no shard), `dir_client` with
`size` and `domain` with `per_client` (take exactly that many).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fednorm.core import rng
from fednorm.core.extending import load_installed
from fednorm.data.sized_clients import dirichlet_of_size
from fednorm.errors import ConfigError, unknown

Rows = list[np.ndarray]
MAX_DRAWS = 10_000


def generator(seed: int, *words: int | str) -> np.random.Generator:
    """A numpy generator for this purpose alone."""
    return np.random.default_rng(rng.as_seed(rng.key(seed, "partition", *words)))


def largest_remainder(shares: np.ndarray, total: int) -> np.ndarray:
    """Integers that sum to `total` and are as near to `shares` as can be; ties go to the first.

    >>> largest_remainder(np.array([1.0, 1.0, 1.0]), 5).tolist()
    [2, 2, 1]
    """
    exact = shares * (total / shares.sum())
    counts = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def checked(name: str, rows: Sequence[np.ndarray], min_size: int, fix: str) -> Rows:
    """The rows of every client, ascending, once each has enough of them; `fix` is what an error advises."""
    sizes = [len(part) for part in rows]
    smallest = int(np.argmin(sizes))
    if sizes[smallest] < max(min_size, 1):
        raise ConfigError(
            f"partition '{name}' leaves client {smallest} with {sizes[smallest]} examples, fewer than min_size "
            f"{max(min_size, 1)}; {fix}"
        )
    return [np.sort(part).astype(np.int64) for part in rows]


def _positive(name: str, option: str, value: float) -> None:
    if not (value > 0 and np.isfinite(value)):
        raise ConfigError(f"partition '{name}': {option} must be positive and finite, not {value}")


def iid(labels: np.ndarray, num_clients: int, *, seed: int, min_size: int = 1) -> Rows:
    """A random order cut into equal parts."""
    order = generator(seed, "iid").permutation(len(labels))
    return checked("iid", np.array_split(order, num_clients), min_size, "use fewer clients")


def dir_client(
    labels: np.ndarray,
    num_clients: int,
    *,
    seed: int,
    min_size: int = 1,
    alpha: float = 0.5,
    size: int | None = None,
) -> Rows:
    """Each client draws a class mix from Dir(alpha) and fills an equal quota without replacement (Hsu et al. 2019).

    The concentration of class k is alpha * K * (share of class k), which is alpha itself for balanced classes. A class
    that is used up leaves the mix, so the last clients take what is left. With `size` every client has exactly that
    many examples, drawn from the whole set, so that clients may share some.
    """
    _positive("dir_client", "alpha", alpha)
    if size is not None:
        _positive("dir_client", "size", size)
        sized = dirichlet_of_size(labels, num_clients, alpha, size, generator(seed, "dir_client", "size"))
        return checked("dir_client", sized, min_size, "use a larger size")
    draw = generator(seed, "dir_client")
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    queues = [draw.permutation(np.flatnonzero(codes == k)) for k in range(len(counts))]
    used = np.zeros_like(counts)
    quotas = [len(part) for part in np.array_split(np.arange(len(labels)), num_clients)]
    clients: Rows = []
    for quota in quotas:
        mix = draw.dirichlet(alpha * len(counts) * counts / counts.sum())
        taken = np.zeros_like(counts)
        while taken.sum() < quota:
            left = counts - used - taken
            open_mix = np.where(left > 0, mix, 0.0)
            # A small alpha underflows to a mix of zeros on the classes that are left; then what is left is the mix.
            open_mix = open_mix if open_mix.sum() > 1e-12 else left.astype(np.float64)
            wanted = draw.multinomial(quota - taken.sum(), open_mix / open_mix.sum())
            taken += np.minimum(wanted, left)
        clients.append(np.concatenate([queues[k][used[k] : used[k] + taken[k]] for k in range(len(counts))]))
        used += taken
    return checked("dir_client", clients, min_size, "use fewer clients")


def dir_class(labels: np.ndarray, num_clients: int, *, seed: int, min_size: int = 1, alpha: float = 0.5) -> Rows:
    """Each class is divided over the clients by a draw from Dir(alpha); clients differ in size.

    A draw that leaves a client below `min_size` is thrown away, and the next one is drawn under its own key.
    """
    _positive("dir_class", "alpha", alpha)
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    fix = "use a larger alpha, fewer clients or a smaller min_size"
    best = np.zeros(num_clients)
    if len(labels) < num_clients * min_size:
        checked("dir_class", np.array_split(np.arange(len(labels)), num_clients), min_size, "use fewer clients")
    for attempt in range(MAX_DRAWS):
        draw = generator(seed, "dir_class", attempt)
        shares = draw.dirichlet(np.full(num_clients, alpha), size=len(counts))
        cuts = np.rint(np.cumsum(shares, axis=1) * counts[:, None]).astype(np.int64)
        cuts[:, -1] = counts
        sizes = np.diff(cuts, axis=1, prepend=0).sum(axis=0)
        if sizes.min() >= max(min_size, 1):
            parts = [np.split(draw.permutation(np.flatnonzero(codes == k)), cut[:-1]) for k, cut in enumerate(cuts)]
            clients = [np.concatenate([part[c] for part in parts]) for c in range(num_clients)]
            return checked("dir_class", clients, min_size, fix)
        best = max(best, sizes, key=lambda size: size.min())
    client = int(best.argmin())
    raise ConfigError(
        f"partition 'dir_class' with alpha {alpha} leaves client {client} with {int(best[client])} examples in the "
        f"best of {MAX_DRAWS} draws, fewer than min_size {max(min_size, 1)}; {fix}"
    )


def _deal_classes(num_classes: int, num_clients: int, each: int, draw: np.random.Generator) -> list[np.ndarray]:
    """Give each client `each` distinct classes so that no class is on two clients more than another.

    Always taking the classes that are most in stock, ties at random, never runs into a dead end.
    """
    stock = largest_remainder(np.ones(num_classes), num_clients * each)
    hands = []
    for _ in range(num_clients):
        hand = np.lexsort((draw.random(num_classes), -stock))[:each]
        stock[hand] -= 1
        hands.append(hand)
    return hands


def shards(
    labels: np.ndarray, num_clients: int, *, seed: int, min_size: int = 1, classes_per_client: int | None = None
) -> Rows:
    """Each client holds a few whole classes or equal parts of them (FixBN: 20 % of the classes, the default).

    Five clients and ten classes give disjoint pairs drawn by the seed. When the default does not put every class on
    the same number of clients, 2M label-sorted shards are dealt, two to a client.

    >>> [np.unique(rows // 4).tolist() for rows in shards(np.repeat(np.arange(10), 4), 5, seed=0)][:2]
    [[3, 4], [1, 9]]
    """
    classes, codes = np.unique(labels, return_inverse=True)
    each = max(1, round(0.2 * len(classes))) if classes_per_client is None else classes_per_client
    if classes_per_client is None and (num_clients * each) % len(classes):
        return label_shards(labels, num_clients, seed=seed, min_size=min_size)
    if not 1 <= each <= len(classes):
        raise ConfigError(
            f"partition 'shards': classes_per_client must be 1 to {len(classes)} (the number of classes), not {each}"
        )
    if num_clients * each < len(classes):
        raise ConfigError(
            f"partition 'shards': {num_clients} clients with {each} classes each cover only {num_clients * each} of "
            f"{len(classes)} classes; use classes_per_client={-(-len(classes) // num_clients)} or more clients"
        )
    draw = generator(seed, "shards")
    hands = _deal_classes(len(classes), num_clients, each, draw)
    parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for k in range(len(classes)):
        holders = [c for c, hand in enumerate(hands) if k in hand]
        rows = draw.permutation(np.flatnonzero(codes == k))
        for holder, part in zip(holders, np.array_split(rows, len(holders)), strict=True):
            parts[holder].append(part)
    return checked("shards", [np.concatenate(part) for part in parts], min_size, "use fewer clients")


def label_shards(
    labels: np.ndarray, num_clients: int, *, seed: int, min_size: int = 1, shards_per_client: int = 2
) -> Rows:
    """Rows sorted by label, cut into equal shards, dealt at random (FedBS balanced: 200 shards, 2 for each of 100)."""
    _positive("label_shards", "shards_per_client", shards_per_client)
    total = num_clients * shards_per_client
    if total > len(labels):
        raise ConfigError(
            f"partition 'label_shards': {total} shards need at least {total} examples, not {len(labels)}; "
            f"use fewer clients than {num_clients}"
        )
    pieces = np.array_split(np.argsort(labels, kind="stable"), total)
    hands = generator(seed, "label_shards").permutation(total).reshape(num_clients, shards_per_client)
    clients = [np.concatenate([pieces[s] for s in hand]) for hand in hands]
    return checked("label_shards", clients, min_size, "use fewer clients")


def sorted_blocks(labels: np.ndarray, num_clients: int, *, seed: int, min_size: int = 1) -> Rows:
    """A stable sort by label cut into equal contiguous blocks (FedTAN); the seed plays no part."""
    blocks = np.array_split(np.argsort(labels, kind="stable"), num_clients)
    return checked("sorted_blocks", blocks, min_size, "use fewer clients")


def shards_unequal(
    labels: np.ndarray,
    num_clients: int,
    *,
    seed: int,
    min_size: int = 1,
    shard_size: int = 50,
    low: int = 1,
    high: int = 30,
) -> Rows:
    """Label-sorted shards of `shard_size`, an unequal number of them for each client (FedBS unbalanced).

    The number is drawn from [low, high] and rescaled so that all shards are dealt.
    """
    _positive("shards_unequal", "shard_size", shard_size)
    if not 1 <= low <= high:
        raise ConfigError(f"partition 'shards_unequal': low and high must be 1 <= low <= high, not {low} and {high}")
    total = len(labels) // shard_size
    if total < num_clients:
        raise ConfigError(
            f"partition 'shards_unequal': {len(labels)} examples make {total} shards of {shard_size}, fewer than "
            f"{num_clients} clients; use shard_size={max(1, len(labels) // num_clients)} or fewer clients"
        )
    draw = generator(seed, "shards_unequal")
    wanted = draw.integers(low, high + 1, size=num_clients)
    # One shard is every client's by right, so rescaling never empties a client; the rest is shared as drawn.
    counts = 1 + largest_remainder(wanted.astype(np.float64), total - num_clients)
    order = np.argsort(labels, kind="stable")[: total * shard_size].reshape(total, shard_size)
    hands = np.split(draw.permutation(total), np.cumsum(counts)[:-1])
    return checked("shards_unequal", [order[hand].reshape(-1) for hand in hands], min_size, "use larger shards")


def domain(
    labels: np.ndarray,
    num_clients: int,
    *,
    seed: int,
    min_size: int = 1,
    domains: np.ndarray | None = None,
    per_client: int | None = None,
) -> Rows:
    """One domain per client, the same number of clients for every domain, in the order of the domains.

    `per_client` takes exactly that many examples for each client (FedBN's Digits: 743).
    """
    if domains is None:
        raise ConfigError(
            "partition 'domain' needs a data set with domains, such as digits_five, office_caltech10 or pacs"
        )
    present = np.unique(domains)
    if num_clients % len(present):
        raise ConfigError(
            f"partition 'domain': {num_clients} clients cannot share {len(present)} domains evenly; "
            f"use a multiple of {len(present)}"
        )
    parts: Rows = []
    for value in present:
        rows = generator(seed, "domain", int(value)).permutation(np.flatnonzero(domains == value))
        parts.extend(np.array_split(rows, num_clients // len(present)))
    if per_client is not None:
        checked("domain", parts, per_client, f"use per_client={min(map(len, parts))} or fewer clients per domain")
        parts = [part[:per_client] for part in parts]
    return checked("domain", parts, min_size, "use fewer clients per domain")


def feature_shift(
    labels: np.ndarray,
    num_clients: int,
    *,
    seed: int,
    min_size: int = 1,
    inner: str = "iid",
    severity: float = 1.0,
    domains: np.ndarray | None = None,
    **options: object,
) -> Rows:
    """The rows that the inner partition gives; `make_federation` then changes the look of each client's images."""
    return partition(inner, labels, num_clients, seed, min_size=min_size, domains=domains, **options)


@dataclass(frozen=True)
class PartitionInfo:
    """A partition as listed: what it does and what can be set."""

    function: Callable[..., Rows]
    options: Mapping[str, object]
    summary: str
    uses_labels: bool = True
    uses_domains: bool = False


PARTITIONS: dict[str, PartitionInfo] = {
    "iid": PartitionInfo(iid, {}, "a random order cut into equal parts", uses_labels=False),
    "dir_client": PartitionInfo(
        dir_client, {"alpha": 0.5, "size": None}, "a class mix per client from Dir(alpha), equal sizes"
    ),
    "dir_class": PartitionInfo(dir_class, {"alpha": 0.5}, "each class over the clients by Dir(alpha), unequal sizes"),
    "shards": PartitionInfo(shards, {"classes_per_client": None}, "a few classes per client (default 20 %)"),
    "label_shards": PartitionInfo(label_shards, {"shards_per_client": 2}, "equal label-sorted shards dealt at random"),
    "sorted_blocks": PartitionInfo(sorted_blocks, {}, "sorted by label, cut into equal blocks"),
    "shards_unequal": PartitionInfo(
        shards_unequal, {"shard_size": 50, "low": 1, "high": 30}, "label-sorted shards, 1 to 30 per client, rescaled"
    ),
    "domain": PartitionInfo(
        domain, {"per_client": None}, "one domain per client", uses_labels=False, uses_domains=True
    ),
    "feature_shift": PartitionInfo(
        feature_shift,
        {"inner": "iid", "severity": 1.0},
        "an inner partition, then colour, contrast, blur, noise, fog or snow on each client's images",
        uses_labels=False,
        uses_domains=True,
    ),
}


def find_partition(name: str, options: Mapping[str, object]) -> PartitionInfo:
    """The partition of that name, once its options are known to be right; `dir-client` means `dir_client`."""
    key = name.replace("-", "_")
    if key not in PARTITIONS:
        load_installed()
    info = PARTITIONS.get(key)
    if info is None:
        raise unknown("partition", name, PARTITIONS)
    own = {option: value for option, value in options.items() if option in info.options}
    others = {option: value for option, value in options.items() if option not in info.options}
    for option, value in own.items():
        _check_type(name, option, value, info.options[option])
    if info.function is feature_shift:  # what is not its own is for the inner partition
        find_partition(str(options.get("inner", "iid")), others)
    elif others and info.options:
        raise unknown(f"option of partition '{name}'", next(iter(others)), info.options)
    elif others:
        raise ConfigError(f"partition '{name}' has no options; leave out '{next(iter(others))}'")
    return info


def _check_type(name: str, option: str, value: object, default: object) -> None:
    """A text for a text, a number for a number, a whole number for any other (None stands for one)."""
    kinds = {str: ((str,), "a name"), float: ((int, float), "a number"), bool: ((bool,), "true or false")}
    types, words = kinds.get(type(default), ((int,), "a whole number"))
    if value is not default and (isinstance(value, bool) != (types == (bool,)) or not isinstance(value, types)):
        raise ConfigError(f"partition '{name}': {option} must be {words}, not {value!r}")


def partition(
    name: str,
    labels: np.ndarray,
    num_clients: int,
    seed: int,
    *,
    min_size: int = 1,
    domains: np.ndarray | None = None,
    **options: object,
) -> Rows:
    """The rows of every client under a partition given by name.

    >>> [rows.tolist() for rows in partition("sorted_blocks", np.array([1, 0, 1, 0]), 2, seed=0)]
    [[1, 3], [0, 2]]
    """
    info = find_partition(name, options)
    labels = np.asarray(labels)
    if num_clients < 1:
        raise ConfigError(f"the number of clients must be at least 1, not {num_clients}")
    if num_clients > len(labels):
        raise ConfigError(
            f"{num_clients} clients cannot share {len(labels)} examples; use at most {len(labels)} clients"
        )
    if info.uses_labels and labels.ndim != 1:
        raise ConfigError(f"partition '{name}' needs one label per example; for masks use 'iid' or 'domain'")
    if info.uses_domains:
        options = {**options, "domains": domains}
    return info.function(labels, num_clients, seed=seed, min_size=min_size, **options)
