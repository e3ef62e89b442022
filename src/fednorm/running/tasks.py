"""The task of a run, and the data as that task sees them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fednorm.core.expression import parse_term
from fednorm.core.task import AnyTask
from fednorm.data.federation import Federation
from fednorm.errors import ConfigError
from fednorm.scoring.tasks import EXAMPLE, make_task


def settle_task(
    named: str | None, federation: Federation, device: torch.device, task: AnyTask | None = None
) -> tuple[AnyTask, Federation]:
    """The task that was given, or named, or else the data's own; and the data with targets as it needs them."""
    if task is None:
        expression = named or federation.task
        federation = for_kind(federation, parse_term(expression, "task", EXAMPLE).name)
        task = make_task(
            expression,
            federation.num_classes,
            federation.ignore_index,
            counts=lambda: class_counts(federation),
            device=device,
        )
    return task, for_kind(federation, task.kind)


def targets_of(task: str | AnyTask | None) -> str | None:
    """The name by which data are told what their targets are for; None leaves it to them."""
    if task is None:
        return None
    return parse_term(task, "task", EXAMPLE).name if isinstance(task, str) else task.kind or task.name


def for_kind(federation: Federation, kind: str) -> Federation:
    """The data for another kind of task: how many outputs a model needs follows from their targets.

    Whole numbers become measurements where they are to be predicted as such.
    """
    if kind == federation.task or kind not in ("classification", "multilabel", "regression"):
        return federation
    if federation.live or federation.live_test:
        raise ConfigError(
            f"{federation.name} is read anew in every epoch, with targets for {federation.task}; "
            f"for {kind} give from_clients(..., task='{kind}')"
        )
    y, test_y = federation.y, federation.test_y
    if kind == "regression" and not y.is_floating_point():
        y, test_y = y.float(), test_y.float()
    if kind == "classification":
        known = federation.num_classes if y.is_floating_point() else int(max(y.max(), test_y.max())) + 1
    else:
        known = int(y.shape[1]) if y.dim() > 1 else 1
    return replace(federation, task=kind, y=y, test_y=test_y, num_classes=known)


def class_counts(federation: Federation) -> list[int]:
    """How many training examples, or pixels, of each class the clients that train have together."""
    if not federation.labels_known:
        raise ConfigError(
            f"{federation.name} is read anew in every epoch and does not list its labels, which weights by class need; "
            "leave num_classes to be found, or give the weights themselves"
        )
    rows = torch.cat([federation.clients[client] for client in federation.training_clients])
    labels: Tensor = federation.y[rows.to(federation.y.device)].flatten().long()
    known = labels[(labels >= 0) & (labels < federation.num_classes) & (labels != federation.ignore_index)]
    return torch.bincount(known, minlength=federation.num_classes).tolist()
