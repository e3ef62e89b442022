"""A plain model file out of a run: the global model, or one client's with what it kept for itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from fednorm import __version__
from fednorm.core.method import Method
from fednorm.core.state import Tree, is_norm, model_state
from fednorm.core.task import AnyTask
from fednorm.data.client_names import client_number
from fednorm.data.federation import Federation
from fednorm.data.given import Examples
from fednorm.errors import ConfigError
from fednorm.files import disk_errors
from fednorm.pieces.fold import fold_with_report
from fednorm.running.folder import RunFolder
from fednorm.running.given import check_given, config_in, gathered, read_config, read_stored
from fednorm.running.plan import Plan
from fednorm.running.tensor_files import save_tree
from fednorm.running.trained import Which, model_of, network_with, opened_state
from fednorm.views.describe_piece import explain_piece


def export(
    folder: str | Path,
    path: str | Path | None = None,
    *,
    client: int | str | None = None,
    which: Which = "last",
    fold: bool = False,
    method: Method | None = None,
    model: nn.Module | None = None,
    task: AnyTask | None = None,
    clients: Sequence[Examples] | None = None,
    test: Sequence[Examples] | Examples | None = None,
    federation: Federation | None = None,
    use: Sequence[str] = (),
    allow_code: bool = False,
) -> Path:
    """Write a run's model as safetensors and return where: all entries of the model's state dict, nothing else.

    A client is given by number or name. Without one it is the global model; entries that stayed local are then their
    clients' mean. `which` is the last or the best by validation. `fold` writes the same function with fewer layers, for
    inference (see `folded`). A run that was started with objects is given them again; code that its config names is
    allowed, or named in `use`.
    """
    run = RunFolder(Path(folder))
    stored = read_stored(run)
    if "compare" in stored:
        raise ConfigError(f"'{folder}' is a comparison; export one of the runs in it")
    objects = gathered(model, clients, test, federation, method, task or config_in(stored).task)
    check_given(run, stored, objects)
    config, _ = read_config(run, allow_code=allow_code, use=use)
    with opened_state(run.state) as store:
        plan = objects.trusting(config).plan(config)
        if client is not None:
            client = client_number(plan.federation, client)
        state = model_of(plan, store, client, which)
        facts = store.facts()
    rounds = facts["best"]["round"] if which == "best" else facts["round"]
    state, about_fold = folded(plan, state) if fold else (state, {"folded": "false"})
    name = ("global" if client is None else f"client-{client}") + "-best" * (which == "best") + "-folded" * fold
    target = Path(path) if path else run.path / f"{name}.safetensors"
    metadata = {
        "format": "pt",
        "model": config.model,
        "num_classes": str(plan.federation.num_classes),
        "in_channels": str(plan.federation.in_channels),
        "method": plan.name,
        "client": "global" if client is None else str(client),
        **_about_data(plan.federation, client),
        **_about_local(plan, client),
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


def _about_local(plan: Plan, client: int | None) -> dict[str, str]:
    """Where the entries of a model come from that clients keep to themselves, where it is nobody's own."""
    kept = plan.prepared.facts.entries.keys() & set(plan.evaluated(-1).kept)
    if not kept or plan.method.data == "union" or (client is not None and client not in plan.federation.unseen):
        return {}
    rule = plan.method.newcomer
    own = client is not None and rule.uses_data
    return {
        "local_entries": "taken from the client's own data" if own else "mean over the clients",
        "newcomers": f"{rule.name}: {explain_piece(rule)}",
    }


def folded(plan: Plan, state: Tree) -> tuple[Tree, dict[str, str]]:
    """The state of the model with BatchNorm and standardised weights folded into plain layers, and what became of it.

    It fits the network that `fednorm.pieces.fold.fold` makes of the run's model: layers that took in a norm have a
    bias, and the norm is gone.
    """
    network, report = fold_with_report(network_with(plan, state))
    if not report.changed:
        why = report.notes[0] if report.notes else "it has no BatchNorm and no standardised convolution"
        raise ConfigError(f"'{plan.config.model}' with '{plan.method.name}' cannot be folded: {why}; leave out --fold")
    left = [name for name, module in network.named_modules() if is_norm(module)]
    tree = {key: value.contiguous() for key, value in model_state(network).items()}
    return tree, {"folded": "true", "fold": "; ".join(report.notes), "norms_left": ", ".join(left) or "none"}
