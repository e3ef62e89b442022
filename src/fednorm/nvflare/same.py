"""Whether a run on NVFlare has the bits of the same run in our sequential engine: the server's, and every site's."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fednorm.core.state import Tree, digest
from fednorm.engines.machine import threads
from fednorm.errors import ConfigError
from fednorm.running.clock_run import run_of
from fednorm.running.config import RunConfig, updated
from fednorm.running.folder import RunFolder
from fednorm.running.given import Objects
from fednorm.running.on_clock import resolved
from fednorm.running.store import Store


@dataclass(frozen=True)
class Compared:
    """Digests of one holder's tensors in both runs."""

    holder: str
    here: str
    there: str
    entry: str = ""
    """the first that differs"""

    @property
    def is_same(self) -> bool:
        return self.here == self.there


def refuse_incomparable(config: RunConfig) -> None:
    """Refuse to compare what has no bits of its own: where several sites are at work, who comes first is anybody's."""
    if resolved(config)[0] is not None and config.clock.concurrency != 1:
        raise ConfigError(
            f"--check compares bits, and '{config.method}' takes updates in the order they come; "
            "set clock.concurrency=1, or leave --check out"
        )


def compare_with_sequential(config: RunConfig, out: Path, sites: list[str]) -> list[Compared]:
    """Play a config in the sequential engine, and compare all state with what a folder has."""
    plain = updated(config, {"engine.name": "sequential"})
    with threads(config.engine.threads or 1), closing(Store()) as here:
        plan = Objects().trusting(plain).plan(plain)
        run = run_of(plan, here)
        try:
            for _ in run.rounds():
                pass
        finally:
            run.close()
        with closing(Store(RunFolder(out).state)) as there:
            pairs = {"server": (here.tree("model"), there.tree("model"))}
            pairs["server's memory"] = here.tree("memory"), there.tree("memory")
            for client, site in enumerate(sites):
                pairs[site] = here.get(client).tree, there.get(client).tree
    return [Compared(holder, digest(one), digest(other), _first(one, other)) for holder, (one, other) in pairs.items()]


def _first(one: Tree, other: Tree) -> str:
    """The first entry that only one has, or that differs."""
    keys = sorted(one.keys() | other.keys())
    parts = ({key: tree[key]} if key in tree else {} for key in keys for tree in (one, other))
    digests = [digest(part) for part in parts]
    return next((key for number, key in enumerate(keys) if digests[2 * number] != digests[2 * number + 1]), "")
