"""A site's own model, out of its own state file and the global model: what the site uses, and nobody else has.

Both files are enough, with the run's setup to build the network by. Nothing is asked of a server, and nothing goes to
one: entries that a method keeps local are in the site's file alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from fednorm import __version__
from fednorm.core.state import Tree
from fednorm.errors import CheckpointError, ConfigError
from fednorm.files import disk_errors, read_bounded, refuse_depth
from fednorm.halves.agreed import Agreed
from fednorm.halves.terms import agree, terms_of
from fednorm.halves.wire_files import load_mine
from fednorm.nvflare.keeping import lineage
from fednorm.nvflare.setup import Setup
from fednorm.running.plan import work_of
from fednorm.running.tensor_files import load_tree, save_tree

Which = Literal["accepted", "last"]
_MARKS = {"config", "outputs", "state_dir"}
_GIVE = "give the setup that a device has, or config_fed_client.json of the job at a site"


@dataclass(frozen=True)
class Personal:
    """A site's model, and what it is."""

    tree: Tree
    local: tuple[str, ...]
    """entries that are the site's own"""
    exchange: int
    """after which its state is this"""
    open: bool
    """whether it has done work that it does not know to be accepted"""


def read_setup(path: Path) -> Setup:
    """The run's setup from a JSON file: a device's own, or a site's config_fed_client.json, which has it inside."""
    try:
        said = refuse_depth(json.loads(read_bounded(path, foreign=False)))
    except FileNotFoundError:
        raise ConfigError(f"'{path}' does not exist; {_GIVE}") from None
    except (OSError, ValueError, RecursionError):
        raise ConfigError(f"'{path}' is no JSON file; {_GIVE}") from None
    found = _setup_in(said)
    if found is None:
        raise ConfigError(f"'{path}' has no setup of a run in it; {_GIVE}")
    return Setup.from_json(found)


def _setup_in(said: Any) -> dict[str, Any] | None:
    """The first table that is a setup, however deep it lies."""
    if isinstance(said, dict) and said.keys() >= _MARKS:
        return cast(dict[str, Any], said)
    inner = said.values() if isinstance(said, dict) else said if isinstance(said, list) else ()
    return next((found for each in inner if (found := _setup_in(each)) is not None), None)


def personal_model(setup: Setup, state: Path, model: Path, *, run: str = "", which: Which = "accepted") -> Personal:
    """The model of the site that keeps `state`, with the shared part from the file `model`.

    `run` is the name of the run, that of the state file's folder unless it is given. Where the site has worked since
    the server last told it what was accepted, `which` may be `last`: with that work.
    """
    if not state.is_file():
        raise CheckpointError(f"'{state}' does not exist; give the state file of a site")
    agreed = _agreed(setup)
    network = type(setup.network()).__name__
    task = setup.plain_task().name
    terms = terms_of(agreed, run=run or state.parent.name, weights=setup.config.train.weights, model=network, task=task)
    mine = load_mine(state, terms=lineage(terms))
    kept = mine.pending if which == "last" and mine.pending is not None else mine.accepted
    exchange = mine.pending_exchange if kept is mine.pending else mine.exchange
    phase = agreed.evaluated(-1)
    shared = load_tree(model)
    for key in phase.sent:
        entry = phase.schema[key][0]
        if key not in shared or tuple(shared[key].shape) != entry.shape:
            raise CheckpointError(f"'{model}' has no '{key}' of shape {entry.shape}; give the model of the same run")
    whole = phase.start(shared, kept.tree, agreed.device)
    tree = {key: whole[key].cpu().contiguous() for key in agreed.prepared.facts.entries}
    own = tuple(key for key in tree if key in phase.kept)
    return Personal(tree, own, exchange, mine.pending is not None and kept is not mine.pending)


def export_personal(
    setup: Setup, state: Path, model: Path, out: Path, *, run: str = "", which: Which = "accepted"
) -> Personal:
    """Write a site's model as safetensors: all entries of the model's state dict, nothing else."""
    found = personal_model(setup, state, model, run=run, which=which)
    about = {
        "format": "pt",
        "model": setup.config.model,
        "num_classes": str(setup.outputs),
        "in_channels": str(setup.in_channels),
        "method": setup.name,
        "client": state.name,
        "exchange": str(found.exchange),
        "local_entries": str(len(found.local)),
        "seed": str(setup.config.seed),
        "fednorm": __version__,
    }
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    save_tree(out, found.tree, about)
    return found


def _agreed(setup: Setup) -> Agreed:
    config = setup.config
    return agree(setup.network(), setup.method, work_of(config), weights=config.train.weights)
