"""Running statistics of single clients, channel by channel: what a figure may show beside scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fednorm.core.state import Kind
from fednorm.running.plan import Plan
from fednorm.running.store import Store
from fednorm.running.trained import model_of
from fednorm.studies.library import key_of
from fednorm.studies.recipes import StudyRecipe
from fednorm.studies.study import Study


@dataclass(frozen=True)
class Look:
    """Which statistics of a run are kept: of these norms, counted from 1 in the model's order, of these clients."""

    layers: tuple[int, ...]
    clients: tuple[int, ...]


def look_of(recipe: StudyRecipe) -> Look | None:
    """What the figure of a recipe shows, if it shows statistics."""
    figure = recipe.figure
    return Look(tuple(figure["layers"]), tuple(figure["clients"])) if figure.get("kind") == "statistics" else None


def looks_of(studies: Iterable[Study]) -> dict[str, Look]:
    """By the key of a run, what a figure shows of it.

    Studies share runs: whichever of them plays one keeps what the others draw.
    """
    found: dict[str, Look] = {}
    for study in studies:
        look = look_of(study.recipe)
        if look is not None:
            cells = (*study.cells(variants=True), *study.cells(quick=True, variants=True))
            found |= {key_of(cell.config): look for cell in cells}
    return found


def client_statistics(plan: Plan, store: Store, look: Look) -> dict[str, Any]:
    """By number of the layer its running moments, a list for each client; empty where clients have no own ones."""
    models = [model_of(plan, store, client=client) for client in look.clients]
    layers: dict[str, dict[str, str]] = {}
    for key, entry in plan.prepared.facts.entries.items():
        if entry.kind is Kind.STATISTIC:
            layers.setdefault(entry.layer, {})[entry.part] = key
    found: dict[str, Any] = {}
    for number, parts in enumerate(layers.values(), 1):
        of_clients = {part: [model[key] for model in models] for part, key in parts.items()}
        if number in look.layers and any(_differ(each) for each in of_clients.values()):
            found[str(number)] = {part: [_rounded(each) for each in values] for part, values in of_clients.items()}
    return found


def _differ(values: Sequence[Tensor]) -> bool:
    return any(not torch.equal(value, values[0]) for value in values)


def _rounded(value: Tensor) -> list[float]:
    """Numbers for a picture: five digits that count."""
    return [float(f"{number:.5g}") for number in value.double().tolist()]
