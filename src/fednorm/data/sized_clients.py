"""Clients that all have as many examples as they are told, drawn from the whole set, so that they may share some."""

from __future__ import annotations

import numpy as np


def dirichlet_of_size(
    labels: np.ndarray, num_clients: int, alpha: float, size: int, draw: np.random.Generator
) -> list[np.ndarray]:
    """A class mix from Dir(alpha) for each client, and rows of it; one comes again only where its class has no more."""
    _, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    rows = [np.flatnonzero(codes == k) for k in range(len(counts))]

    def some(of_class: np.ndarray, wanted: int) -> np.ndarray:
        whole, rest = divmod(wanted, len(of_class))
        return np.concatenate([np.tile(of_class, whole), draw.choice(of_class, rest, replace=False)])

    clients: list[np.ndarray] = []
    for _ in range(num_clients):
        wanted = draw.multinomial(size, draw.dirichlet(alpha * len(counts) * counts / counts.sum()))
        clients.append(np.concatenate([some(rows[k], count) for k, count in enumerate(wanted) if count]))
    return clients
