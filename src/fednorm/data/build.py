"""From a data set and a partition to a federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fednorm.data.client_rows import client_rows
from fednorm.data.federation import Federation
from fednorm.data.image_set import ImageSet
from fednorm.data.partition import Rows, find_partition, generator, largest_remainder
from fednorm.data.partition import partition as divide
from fednorm.data.shift import shifted
from fednorm.errors import ConfigError


def make_federation(
    image_set: ImageSet,
    partition: str,
    num_clients: int,
    *,
    seed: int,
    unseen: int = 0,
    min_size: int = 2,
    train_limit: int | None = None,
    keep_domains: Sequence[str] | int | None = None,
    **options: object,
) -> Federation:
    """Divide a data set over clients, with the test rows that look like each client's own data.

    The last `unseen` clients never train. `train_limit` keeps that many training rows, stratified by class and domain;
    `keep_domains` only these domains, or how many to draw by the seed.
    """
    if not 0 <= unseen < num_clients:
        raise ConfigError(f"unseen must leave a client to train: 0 to {num_clients - 1}, not {unseen}")
    if keep_domains is not None:
        image_set = image_set.keep_domains(_chosen_domains(image_set, keep_domains, seed))
    if train_limit is not None and train_limit < len(image_set.train_y):
        image_set = image_set.keep(torch.from_numpy(stratified_rows(image_set, train_limit, seed)))
    domains = None if image_set.train_domain is None else image_set.train_domain.numpy()
    clients = divide(
        partition, image_set.train_y.numpy(), num_clients, seed, min_size=min_size, domains=domains, **options
    )
    by_domain = "domain" in (partition.replace("-", "_"), options.get("inner"))
    own = own_domain_rows(image_set, clients) if by_domain else own_test_rows(image_set, clients, seed)
    federation = Federation(
        name=image_set.name,
        x=image_set.train_x,
        y=image_set.train_y,
        clients=client_rows(torch.from_numpy(rows) for rows in clients),
        test_x=image_set.test_x,
        test_y=image_set.test_y,
        own_test=client_rows(torch.from_numpy(rows) for rows in own),
        num_classes=image_set.num_classes,
        domains=domain_rows(image_set),
        unseen=frozenset(range(num_clients - unseen, num_clients)),
        mean=image_set.mean,
        std=image_set.std,
        classes=image_set.classes,
        task=image_set.task,
        ignore_index=image_set.ignore_index,
    )
    if partition.replace("-", "_") == "feature_shift":
        return shifted(federation, seed, float(str(options.get("severity", 1.0))))
    return federation


def check_options(partition: str, options: Mapping[str, object]) -> None:
    """Refuse a partition that is not known, and options that are none of its own: a seed is the run's, not a deal's."""
    find_partition(partition, {name: value for name, value in options.items() if name != "keep_domains"})


def _chosen_domains(image_set: ImageSet, wanted: Sequence[str] | int, seed: int) -> tuple[str, ...]:
    if not isinstance(wanted, int):
        return tuple(wanted)
    names = image_set.domain_names
    if not 1 <= wanted <= len(names):
        raise ConfigError(f"keep_domains must be 1 to {len(names)} for {image_set.name}, not {wanted}")
    chosen = generator(seed, "keep_domains").choice(len(names), wanted, replace=False)
    return tuple(names[number] for number in sorted(chosen))


def strata(labels: Tensor, domain: Tensor | None, num_classes: int) -> np.ndarray:
    """One code per row for its class and domain; a mask, or a number, has no class of its own and counts as class 0."""
    classes = labels.ndim == 1 and not labels.is_floating_point()
    code = labels.numpy().astype(np.int64) if classes else np.zeros(len(labels), dtype=np.int64)
    return code if domain is None else code + num_classes * domain.numpy().astype(np.int64)


def stratified_rows(image_set: ImageSet, limit: int, seed: int) -> np.ndarray:
    """`limit` training rows with the mix of the whole set, ascending."""
    if limit < 1:
        raise ConfigError(f"train_limit must be at least 1, not {limit}")
    codes = strata(image_set.train_y, image_set.train_domain, image_set.num_classes)
    values, counts = np.unique(codes, return_counts=True)
    quotas = largest_remainder(counts.astype(np.float64), limit)
    draw = generator(seed, "train_limit")
    parts = [
        draw.permutation(np.flatnonzero(codes == value))[:quota] for value, quota in zip(values, quotas, strict=True)
    ]
    return np.sort(np.concatenate(parts))


def own_test_rows(image_set: ImageSet, clients: Rows, seed: int) -> Rows:
    """Every test row belongs to one client: rows of a class (and domain) are shared as its training rows are.

    A class that no client has for training is shared evenly.
    """
    train = strata(image_set.train_y, image_set.train_domain, image_set.num_classes)
    test = strata(image_set.test_y, image_set.test_domain, image_set.num_classes)
    width = int(max(train.max(initial=0), test.max(initial=0))) + 1
    counts = np.stack([np.bincount(train[rows], minlength=width) for rows in clients]).astype(np.float64)
    parts: list[Rows] = [[np.empty(0, dtype=np.int64)] for _ in clients]
    for code in np.unique(test):
        shares = counts[:, code] if counts[:, code].any() else np.ones(len(clients))
        rows = generator(seed, "own_test", int(code)).permutation(np.flatnonzero(test == code))
        cuts = np.cumsum(largest_remainder(shares, len(rows)))[:-1]
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)) for part in parts]


def own_domain_rows(image_set: ImageSet, clients: Rows) -> Rows:
    """All test rows of the one domain a client has; clients of the same domain share them.

    A domain without test rows (Cityscapes tests on other cities than it trains on) is tested on all of them.
    """
    train = strata(torch.zeros_like(image_set.train_y), image_set.train_domain, 1)
    test = strata(torch.zeros_like(image_set.test_y), image_set.test_domain, 1)
    own = [np.flatnonzero(test == train[rows[0]]) for rows in clients]
    return [rows if len(rows) else np.arange(len(test)) for rows in own]


def domain_rows(image_set: ImageSet) -> dict[str, Tensor]:
    """The test rows of every domain that has some, by its name."""
    if image_set.test_domain is None:
        return {}
    rows = {name: torch.nonzero(image_set.test_domain == d)[:, 0] for d, name in enumerate(image_set.domain_names)}
    return {name: found for name, found in rows.items() if len(found)}
