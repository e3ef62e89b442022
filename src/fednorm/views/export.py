"""A plain model file out of a run: the global model, or one client's with what it kept for itself."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from fednorm import __version__
from fednorm.core.state import Tree, is_norm, model_state
from fednorm.data.client_names import client_number
from fednorm.data.federation import Federation
from fednorm.errors import CheckpointError, ConfigError
from fednorm.files import disk_errors
from fednorm.pieces.fold import fold_with_report
from fednorm.running.api import Objects, read_config
from fednorm.running.evaluate import averaged, client_model, global_model
from fednorm.running.folder import RunFolder
from fednorm.running.plan import Plan, make_plan
from fednorm.running.store import Store, save_tree


def export(
    folder: str | Path,
    path: str | Path | None = None,
    *,
    client: int | str | None = None,
    fold: bool = False,
    objects: Objects | None = None,
) -> Path:
    """Write a run's model as safetensors and return where: all entries of the model's state dict, nothing else.

    A client is given by number or name. Without one it is the global model; entries that stayed local are then their
    clients' mean. `fold` writes the same function with fewer layers, for inference (see `folded`). `objects` holds the
    model and data of a run that was started from Python with its own.
    """
    run = RunFolder(Path(folder))
    config, comparison = read_config(run)
    if comparison:
        raise ConfigError(f"'{folder}' is a comparison; export one of the runs in it")
    if not run.state.exists():
        raise CheckpointError(f"'{folder}' has no state yet; start it with `fednorm resume {folder}`")
    objects = objects or Objects()
    plan = make_plan(config, model=objects.model, federation=objects.federation, method=objects.method)
    if client is not None:
        client = client_number(plan.federation, client)
    store = Store(run.state)
    try:
        state = model_of(plan, store, client)
        rounds = store.facts().get("round", 0)
    finally:
        store.close()
    state, about_fold = folded(plan, state) if fold else (state, {"folded": "false"})
    name = ("global" if client is None else f"client-{client}") + "-folded" * fold
    target = Path(path) if path else run.path / f"{name}.safetensors"
    metadata = {
        "format": "pt",
        "model": config.model,
        "num_classes": str(plan.federation.num_classes),
        "in_channels": str(plan.federation.in_channels),
        "method": plan.method.name,
        "client": "global" if client is None else str(client),
        **_about_data(plan.federation, client),
        "seed": str(config.seed),
        "rounds": str(rounds),
        "fednorm": __version__,
        **about_fold,
    }
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    save_tree(target, state, metadata)
    return target


def _about_data(federation: Federation, client: int | None) -> dict[str, str]:
    """What whoever uses the model must know of the data it was trained on."""
    about = {"classes": list(federation.classes), "preprocessing": dict(federation.preprocessing)}
    names = {} if client is None or not federation.client_names else {"client_name": federation.client_names[client]}
    return {**names, **{key: json.dumps(value) for key, value in about.items() if value}}


def folded(plan: Plan, state: Tree) -> tuple[Tree, dict[str, str]]:
    """The state of the model with BatchNorm and standardised weights folded into plain layers, and what became of it.

    It fits the network that `fednorm.pieces.fold.fold` makes of the run's model: layers that took in a norm have a
    bias, and the norm is gone.
    """
    model = copy.deepcopy(plan.prepared.model).cpu()
    model.load_state_dict(state, strict=False)  # a tensor that two layers share is in the state once
    network, report = fold_with_report(model)
    if not report.changed:
        why = report.notes[0] if report.notes else "it has no BatchNorm and no standardised convolution"
        raise ConfigError(f"'{plan.config.model}' with '{plan.method.name}' cannot be folded: {why}; leave out --fold")
    left = [name for name, module in network.named_modules() if is_norm(module)]
    tree = {key: value.contiguous() for key, value in model_state(network).items()}
    return tree, {"folded": "true", "fold": "; ".join(report.notes), "norms_left": ", ".join(left) or "none"}


def model_of(plan: Plan, store: Store, client: int | None) -> Tree:
    """The state of the global model, or of one client's, as the last round left it."""
    if not store.facts():
        raise CheckpointError(f"'{store.path}' holds no round; the run never started")
    phase = plan.evaluated(-1)
    server = store.tree("model")
    if client is None or plan.method.data == "union":
        state = global_model(plan, phase, server, store)
    else:
        state = client_model(plan, phase, server, store, client, averaged(plan, phase, store))
    return {key: state[key].cpu().contiguous() for key in plan.prepared.facts.entries}
