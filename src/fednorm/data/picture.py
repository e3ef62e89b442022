"""Pictures of a federation: which client holds how much of which class, and of which domain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fednorm.data.federation import Federation
from fednorm.errors import ConfigError, require
from fednorm.files import disk_errors, written_whole

INK, QUIET, GRID = "#1f4e79", "#9db8d2", "#e3e3e3"
MAX_MARKS = 25
"""More rows or columns than this are not named one by one."""


def label_counts(federation: Federation) -> np.ndarray:
    """Training examples by client and class."""
    if federation.task != "classification":
        raise ConfigError("a picture by label needs one label per example; segmentation has domain_picture")
    federation.in_memory("a picture by label")
    y = federation.y.cpu().numpy()
    rows = [np.bincount(y[rows.cpu().numpy()], minlength=federation.num_classes) for rows in federation.clients]
    return np.stack(rows)


def label_picture(federation: Federation, path: str | Path) -> Path:
    """A bubble for every client and class, its area the number of training examples."""
    names = federation.classes or tuple(str(k) for k in range(federation.num_classes))
    title = f"{federation.name}: training examples by client and class"
    return _bubbles(label_counts(federation), names, "class", federation, title, path)


def domain_picture(counts: np.ndarray, names: Sequence[str], federation: Federation, path: str | Path) -> Path:
    """The same by domain; `counts` is clients x domains, as `domain_counts` gives it."""
    return _bubbles(
        counts, names, "domain", federation, f"{federation.name}: training examples by client and domain", path
    )


def domain_counts(federation: Federation, train_domain: np.ndarray, num_domains: int) -> np.ndarray:
    """Training examples by client and domain, from the domain of every row of the training pool."""
    rows = [np.bincount(train_domain[rows.cpu().numpy()], minlength=num_domains) for rows in federation.clients]
    return np.stack(rows)


def _bubbles(
    counts: np.ndarray, names: Sequence[str], what: str, federation: Federation, title: str, path: str | Path
) -> Path:
    require("matplotlib", "report", "drawing a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_clients, num_columns = counts.shape
    lying = num_clients > MAX_MARKS  # many clients lie along the page instead of standing on it
    marks = (num_clients, num_columns) if lying else (num_columns, num_clients)
    width, height = min(3 + 0.35 * marks[0], 14), min(1.6 + 0.3 * marks[1], 14)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    clients, columns = np.nonzero(counts)
    largest = counts.max()
    # The largest bubble fills its cell; where cells are narrow it may reach over its neighbours, half seen through.
    cells = (72 * (width - 2.2) / marks[0], 72 * (height - 1.2) / marks[1])
    areas = (0.95 * min(max(cells[0], 10), max(cells[1], 10))) ** 2 * counts[clients, columns] / largest
    inks = [QUIET if client in federation.unseen else INK for client in clients]
    x, y = (clients, columns) if lying else (columns, clients)
    axes.scatter(x, y, s=areas, c=inks, linewidths=0, zorder=2, alpha=0.8 if lying else 1)
    axes.set_xlim(-0.6, marks[0] - 0.4)
    axes.set_ylim(marks[1] - 0.4, -0.6)
    sizes = counts.sum(1)
    if lying:
        axes.set_xlabel(f"client ({sizes.min():,} to {sizes.max():,} examples each)")
        axes.set_ylabel(what)
        if num_columns <= MAX_MARKS:
            axes.set_yticks(range(num_columns), names)
    else:
        axes.set_xlabel(what)
        axes.set_ylabel("client (examples)")
        axes.set_yticks(range(num_clients), [f"{client}  ({size:,})" for client, size in enumerate(sizes)])
        slanted = max(map(len, names)) > 3
        if num_columns <= MAX_MARKS:
            side = "right" if slanted else "center"
            axes.set_xticks(range(num_columns), names, rotation=40 if slanted else 0, ha=side)
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(color=GRID, linewidth=0.6, zorder=0)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    note = f"largest bubble: {largest:,} examples" + ("; pale: never trains" if federation.unseen else "")
    figure.supxlabel(note, fontsize=8, x=0.99, ha="right", color="#555555")
    target = Path(path)
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(target) as draft:
        figure.savefig(draft, dpi=120, format=target.suffix[1:] or None)
    return target
