"""What a partition gave each client, as data and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def summary(
    clients: Sequence[np.ndarray], labels: np.ndarray, num_classes: int, names: Sequence[str] = ()
) -> list[dict[str, object]]:
    """One entry per client: its number, its name if it has one, size, label histogram and the classes it holds.

    >>> summary([np.array([0, 1])], np.array([2, 2]), 3)
    [{'client': 0, 'size': 2, 'labels': [0, 0, 2], 'classes': [2]}]
    """
    entries: list[dict[str, object]] = []
    for number, rows in enumerate(clients):
        counts = np.bincount(np.asarray(labels)[np.asarray(rows)].reshape(-1), minlength=num_classes)[:num_classes]
        entries.append(
            {
                "client": number,
                **({"name": names[number]} if names else {}),
                "size": len(rows),
                "labels": counts.tolist(),
                "classes": np.flatnonzero(counts).tolist(),
            }
        )
    return entries


def table(entries: Sequence[dict[str, object]], max_rows: int = 20, max_classes: int = 12) -> str:
    """The summary as aligned text; long federations are cut and say so.

    >>> print(table(summary([np.array([0, 1]), np.array([2])], np.array([0, 1, 1]), 2)))
    client  size  0  1
         0     2  1  1
         1     1  -  1
    """
    histograms = [_integers(entry["labels"]) for entry in entries]
    wide = bool(histograms) and len(histograms[0]) > max_classes
    header = ["client", "size"] + (["classes held"] if wide else [str(k) for k in range(len(histograms[0]))])
    lines = [header]
    for entry, histogram in list(zip(entries, histograms, strict=True))[:max_rows]:
        held = sum(count > 0 for count in histogram)
        cells = [f"{held} of {len(histogram)}"] if wide else [str(count) if count else "-" for count in histogram]
        lines.append([str(entry.get("name", entry["client"])), str(entry["size"]), *cells])
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    if len(entries) > max_rows:
        sizes = [sum(histogram) for histogram in histograms]
        text.append(f"... {len(entries)} clients in all, {min(sizes)} to {max(sizes)} examples each")
    return "\n".join(text)


def _integers(value: object) -> list[int]:
    return [int(count) for count in np.asarray(value)]
