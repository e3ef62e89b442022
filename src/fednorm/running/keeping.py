"""What is kept of a run beside its last state: the best round by validation, and the model of every N-th round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fednorm.core.state import Tree
from fednorm.running.cohorts import averaged_clients
from fednorm.running.evaluate import global_model
from fednorm.running.plan import Plan
from fednorm.running.store import Store
from fednorm.running.tensor_files import save_tree


class Keeper:
    """Notices the rounds that are worth keeping; a checkpoint at their end makes them lasting with all else."""

    def __init__(self, plan: Plan, store: Store, facts: Mapping[str, Any]) -> None:
        self.plan = plan
        self.store = store
        self._best: dict[str, Any] | None = facts.get("best")
        """round, stage and score of the best round so far"""
        self._tree: Tree | None = None
        """the server's state in it, until it is committed"""

    def is_best(self, scores: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether a round's validation beats all before; of rounds that are equally good the first is kept."""
        if self._best is None:
            return True
        better = self._score(scores) - self._best["score"]
        return better > 0 if self.plan.task.higher_is_better else better < 0

    def keep_best(self, round: int, stage: int, tree: Tree, scores: Mapping[str, Mapping[str, Any]]) -> None:
        """Remember the best round so far as it was scored; of several ranks only the first has scores."""
        self._best = {"round": round, "stage": stage, "score": self._score(scores) if scores else 0.0}
        self._tree = {key: value.detach().clone() for key, value in tree.items()}

    def _score(self, scores: Mapping[str, Mapping[str, Any]]) -> float:
        return scores["validation"][self.plan.task.metric]

    def is_due(self, round: int) -> bool:
        """Whether this round must end with a checkpoint, so that what is kept of it lasts."""
        every = self.plan.config.keep_every
        return self._tree is not None or (every > 0 and round % every == 0)

    def take_best(self, facts: dict[str, Any], trees: dict[str, Tree]) -> bool:
        """Add what is known of the best round to what is committed; True where clients are to be put aside too."""
        if self._best is None:
            return False
        facts["best"] = self._best
        is_new = self._tree is not None
        if self._tree is not None:
            trees["best"] = self._tree
        self._tree = None
        return is_new

    def write_model(self, round: int, stage: int, server: Tree) -> None:
        """Write the global model of a round that the config asks for.

        Before the commit: a run that is killed between the two plays the round again, to the same bits.
        """
        every, folder = self.plan.config.keep_every, self.store.path
        if not (every and round and round % every == 0 and folder):
            return
        clients = averaged_clients(self.plan, round)
        state = global_model(self.plan, self.plan.evaluated(stage), server, self.store, clients)
        tensors = {key: state[key].cpu().contiguous() for key in self.plan.prepared.facts.entries}
        about = {"method": self.plan.name, "model": self.plan.config.model, "round": str(round)}
        save_tree(folder.with_name(f"round-{round}.safetensors"), tensors, about)
