"""A plain model file out of a run: the global model, or one client's with what it kept for itself."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch

from fednorm import __version__
from fednorm.errors import CheckpointError, ConfigError
from fednorm.evaluate import averaged_local, client_model
from fednorm.folder import RunFolder, disk_errors
from fednorm.plan import Plan, make_plan
from fednorm.run import Given, read_config
from fednorm.state import Tree
from fednorm.store import Store


def export(
    folder: str | Path, path: str | Path | None = None, *, client: int | None = None, given: Given | None = None
) -> Path:
    """Write a run's model as safetensors and return where: all entries of the model's state dict, nothing else.

    Without a client it is the global model; entries that stayed local are then their clients' mean. `given` holds the
    model and data of a run that was started from Python with its own.
    """
    place = RunFolder(Path(folder))
    config, comparison = read_config(place)
    if comparison:
        raise ConfigError(f"'{folder}' is a comparison; export one of the runs in it")
    if not place.state.exists():
        raise CheckpointError(f"'{folder}' has no state yet; start it with `fednorm resume {folder}`")
    given = given or Given()
    plan = make_plan(config, model=given.model, federation=given.federation, method=given.method)
    store = Store(place.state)
    try:
        state = model_of(plan, store, client)
        rounds = store.facts().get("round", 0)
    finally:
        store.close()
    target = Path(path) if path else place.path / ("global.safetensors" if client is None else f"client-{client}.safetensors")
    metadata = {
        "format": "pt",
        "model": config.model,
        "num_classes": str(plan.federation.num_classes),
        "in_channels": str(plan.federation.in_channels),
        "method": plan.method.name,
        "client": "global" if client is None else str(client),
        "seed": str(config.seed),
        "rounds": str(rounds),
        "fednorm": __version__,
    }
    draft = target.with_name(target.name + ".part")
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(state, draft, metadata=metadata)
        draft.replace(target)
    return target


def model_of(plan: Plan, store: Store, client: int | None) -> Tree:
    """The state of the global model, or of one client's, as the last round left it."""
    if client is not None and not 0 <= client < len(plan.federation.clients):
        raise ConfigError(f"client {client} does not exist; the run has clients 0 to {len(plan.federation.clients) - 1}")
    facts = store.facts()
    if not facts:
        raise CheckpointError(f"'{store.path}' holds no round; the run never started")
    phase = plan.method.stages[-1][-1]
    average = averaged_local(plan, phase, store)
    # A client that never took part has what a newcomer has: -1 is nobody's id, so nothing is found under it.
    who = client if client is not None and plan.method.data == "each" else NOBODY
    state = client_model(plan, phase, store.tree("model"), store, who, average)
    return {key: state[key].cpu().contiguous() for key in plan.prepared.facts.entries}


NOBODY = -1000
