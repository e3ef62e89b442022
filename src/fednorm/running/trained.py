"""The models a run trained: the global one or a client's own, the last or the best, as state and as a module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from fednorm.core.state import Tree
from fednorm.data.client_names import client_number
from fednorm.errors import CheckpointError, ConfigError, unknown
from fednorm.running.cohorts import averaged_clients
from fednorm.running.evaluate import averaged, client_model, global_model, newcomer_model
from fednorm.running.given import refuse_other_config
from fednorm.running.plan import Plan
from fednorm.running.store import Store

Which = Literal["last", "best"]


@dataclass(frozen=True)
class Trained:
    """A run whose models can be had: its plan, or how to make it, and its state, open or in a file."""

    plan: Plan | Callable[[], Plan]
    state: Store | Path

    def model(self, client: int | str | None = None, which: Which = "last") -> nn.Module:
        """The network after surgery with the state it was trained to, in eval mode on the CPU."""
        plan = self.plan if isinstance(self.plan, Plan) else self.plan()
        with opened_state(self.state) as store:
            return network_with(plan, model_of(plan, store, client, which))


def opened_state(state: Store | Path) -> AbstractContextManager[Store]:
    """A run's store for a while: one that is open stays so, one in a file must be there."""
    if isinstance(state, Store):
        return nullcontext(state)
    if not state.exists():
        raise CheckpointError(f"'{state.parent}' has no state yet; start it with `fednorm resume {state.parent}`")
    return closing(Store(state))


def model_of(plan: Plan, store: Store, client: int | str | None = None, which: Which = "last") -> Tree:
    """The state of the global model, or of one client's, as the last round or the best one left it."""
    number = None if client is None else client_number(plan.federation, client)
    facts = store.facts()
    if not facts:
        raise CheckpointError(f"'{store.path}' holds no round; the run never started")
    refuse_other_config(facts["config"], plan.config)
    store, server, stage = _chosen(store, facts.get("best"), which)
    phase = plan.evaluated(stage)
    clients = averaged_clients(plan, facts["round"] if which == "last" else facts["best"]["round"])
    if number is None or plan.method.data == "union":
        state = global_model(plan, phase, server, store, clients)
    elif number in plan.federation.unseen:
        state = newcomer_model(plan, phase, global_model(plan, phase, server, store, clients), number)
    else:
        state = client_model(plan, phase, server, store, number, averaged(plan, phase, store, clients))
    return {key: state[key].cpu().contiguous() for key in plan.prepared.facts.entries}


def _chosen(store: Store, best: dict[str, int] | None, which: str) -> tuple[Store, Tree, int]:
    """Clients, server and stage of the last round or of the best."""
    if which not in ("last", "best"):
        raise unknown("model", which, ["last", "best"])
    if which == "last":
        return store, store.tree("model"), -1
    if best is None:
        raise ConfigError(
            "no best model was kept; run with --keep best and --val-fraction, and wait for a round that is scored"
        )
    return store.of_best(), store.tree("best"), best["stage"]


def network_with(plan: Plan, state: Tree) -> nn.Module:
    """A copy of the run's network with this state."""
    model = copy.deepcopy(plan.prepared.model).cpu()
    model.load_state_dict(state, strict=False)  # a tensor that two layers share is in the state once
    return model.eval()
