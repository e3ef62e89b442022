"""What each client of a federation holds, and how far it is from all others: sizes, labels, ranges, shift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednorm.data.federation import Federation
from fednorm.data.from_files.scaling import training_rows
from fednorm.data.summary import summary

CHUNK = 1024


def federation_facts(federation: Federation) -> dict[str, Any]:
    """Everything there is to say, as JSON values; `clients` has an entry for each."""
    federation.in_memory("a look at what clients hold")
    counts = label_counts(federation.y, federation.clients, federation)
    return {
        "name": federation.name,
        "task": federation.task,
        "examples": {"train": len(federation.y), "test": len(federation.test_y)},
        "inputs": input_facts(federation),
        "classes": [] if counts is None else _class_names(federation),
        "classes_without_training": _never_trained(federation, counts),
        "notes": list(federation.notes),
        "clients": _clients(federation, counts),
    }


def held(federation: Federation) -> list[dict[str, object]]:
    """How much of which class each client has for training; of targets that are no classes, how many."""
    rows = [rows.numpy() for rows in federation.clients]
    classes = federation.task in ("classification", "segmentation") and federation.labels_known
    labels = federation.y.cpu().numpy() if classes else np.zeros(federation.num_examples, dtype=np.int64)
    return summary(rows, labels, federation.num_classes if classes else 0, federation.client_names)


def input_facts(federation: Federation) -> dict[str, Any]:
    """Shape, type and range of the inputs, training and test together."""
    pools = [pool for pool in (federation.x, federation.test_x) if pool.numel()]
    return {
        "shape": list(federation.x.shape[1:]),
        "type": str(federation.x.dtype).removeprefix("torch."),
        "min": min(pool.min().item() for pool in pools),
        "max": max(pool.max().item() for pool in pools),
    }


def _clients(federation: Federation, counts: np.ndarray | None) -> list[dict[str, Any]]:
    features = feature_shift(federation)
    labels = label_shift(federation, counts)
    entries: list[dict[str, Any]] = []
    for client, (rows, own) in enumerate(zip(federation.clients, federation.own_test, strict=True)):
        entry: dict[str, Any] = {
            "client": client,
            "name": federation.client_names[client] if federation.client_names else str(client),
            "train": len(rows),
            "test": len(own),
            "trains": client not in federation.unseen,
        }
        if len(rows):
            low, high = federation.x[rows].aminmax()
            entry |= {"min": low.item(), "max": high.item()}
        if counts is not None:
            held = counts[client] > 0
            entry |= {"labels": counts[client].tolist(), "missing_classes": np.flatnonzero(~held).tolist()}
        else:
            targets = federation.y[rows].double()
            entry |= {"target_min": float(targets.amin()), "target_max": float(targets.amax())} if len(rows) else {}
        entries.append(entry | {"label_shift": float(labels[client]), "feature_shift": float(features[client])})
    return entries


def label_counts(y: Tensor, clients: Sequence[Tensor], federation: Federation) -> np.ndarray | None:
    """How often each client has each class, (clients, classes); None where targets are no classes."""
    labels = y.cpu().numpy()
    if federation.task == "multilabel" and labels.ndim == 2:
        return np.stack([labels[rows.numpy()].sum(0) for rows in clients]).astype(np.int64)
    if y.is_floating_point():
        return None
    return np.stack([_counted(labels[rows.numpy()], federation) for rows in clients])


def _counted(labels: np.ndarray, federation: Federation) -> np.ndarray:
    """Occurrences of each class; labels that are none, such as ignored pixels, do not count."""
    flat = labels.reshape(-1)
    known = flat[(flat >= 0) & (flat < federation.num_classes) & (flat != federation.ignore_index)]
    return np.bincount(known, minlength=federation.num_classes)


def _class_names(federation: Federation) -> list[str]:
    return list(federation.classes) or [str(label) for label in range(federation.num_classes)]


def _never_trained(federation: Federation, counts: np.ndarray | None) -> list[int]:
    if counts is None:
        return []
    return np.flatnonzero(counts[list(federation.training_clients)].sum(0) == 0).tolist()


def label_shift(federation: Federation, counts: np.ndarray | None) -> np.ndarray:
    """How far each client's targets are from those of all clients that train.

    For classes the share of labels that would have to change (total variation), for numbers the distance of the means
    in deviations.
    """
    if counts is not None:
        shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        whole = counts[list(federation.training_clients)].sum(0)
        distance = 0.5 * np.abs(shares - whole / max(whole.sum(), 1)).sum(1)
        return np.where(counts.sum(1) > 0, distance, 0.0)
    y = federation.y.double().reshape(len(federation.y), -1)
    return _distances(y, y.std(0, correction=0), federation)


def feature_shift(federation: Federation) -> np.ndarray:
    """How far each client's inputs are from those of all clients that train.

    The distance of the means of each feature, of an image of each channel, in deviations of that feature: the root of
    the mean of their squares. Of tokens the share that would have to change.
    """
    x = federation.x
    if not x.is_floating_point() and x.dtype != torch.uint8:
        return _token_shift(federation)
    means = torch.cat([_means(part) for part in x.split(CHUNK)]) if len(x) else torch.zeros(0, 1, dtype=torch.float64)
    squares = torch.cat([_means(part.double() ** 2) for part in x.split(CHUNK)]) if len(x) else means
    used = training_rows(federation)
    spread = (squares[used].mean(0) - means[used].mean(0) ** 2).clamp(min=0).sqrt()
    return _distances(means, spread, federation)


def _means(part: Tensor) -> Tensor:
    """The mean of each feature or channel of each example."""
    return part.double().reshape(len(part), part.shape[1], -1).mean(2)


def _distances(values: Tensor, spread: Tensor, federation: Federation) -> np.ndarray:
    """Of each client's mean from that of all, in units of the spread; columns that never change count for nothing."""
    centre = values[training_rows(federation)].mean(0)
    scale = torch.where(spread > 0, spread, torch.inf)
    found = [
        float((((values[rows].mean(0) - centre) / scale) ** 2).mean().sqrt()) if len(rows) else 0.0
        for rows in federation.clients
    ]
    return np.array(found)


def _token_shift(federation: Federation) -> np.ndarray:
    values, codes = np.unique(federation.x.numpy(), return_inverse=True)
    codes = codes.reshape(federation.x.shape)
    counts = np.stack(
        [np.bincount(codes[rows.numpy()].reshape(-1), minlength=len(values)) for rows in federation.clients]
    )
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    whole = counts[list(federation.training_clients)].sum(0)
    return 0.5 * np.abs(shares - whole / whole.sum()).sum(1)
