"""Runs from Python: `run` plays one method, `compare` several, `resume` goes on where a folder stopped."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from fednorm.config import RunConfig, all_fields, differences, from_dict, to_dict, updated
from fednorm.data.federation import Examples, Federation, from_clients
from fednorm.engines.ranks import join
from fednorm.engines.rounds import Row, Run
from fednorm.errors import CheckpointError, ConfigError, unknown
from fednorm.evaluate import global_model
from fednorm.folder import RunFolder, read_json, write_json
from fednorm.method import Method
from fednorm.plan import Plan, make_plan
from fednorm.results import Result, summarise
from fednorm.state import digest
from fednorm.store import Store
from fednorm.threads import threads_of

OnRound = Callable[[Plan, Row], None]


@dataclass(frozen=True)
class Given:
    """Objects given in Python in place of names in the config."""

    model: nn.Module | None = None
    federation: Federation | None = None
    method: Method | None = None

    @property
    def names(self) -> list[str]:
        return [name for name, value in vars(self).items() if value is not None]


def settings_to_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword settings as config fields: `lr` is `train.lr`; a dotted name may be passed in a dict.

    >>> settings_to_fields({"lr": 0.1, "rounds": 3, "data": "cifar10"})
    {'train.lr': 0.1, 'rounds': 3, 'data.name': 'cifar10'}
    """
    known = all_fields()
    short = {name.rpartition(".")[2]: name for name in known if not name.endswith(".name")}
    short |= {"data": "data.name", "engine": "engine.name"}
    fields = {}
    for name, value in settings.items():
        path = name if name in known else short.get(name)
        if path is None:
            raise unknown("setting", name, [*short, *known])
        fields[path] = value
    return fields


def run(
    config: RunConfig | None = None,
    *,
    model: nn.Module | str | None = None,
    clients: Sequence[Examples] | None = None,
    test: Sequence[Examples] | Examples | None = None,
    federation: Federation | None = None,
    method: str | Method | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    **settings: Any,
) -> Result:
    """Play one method and return its result.

    Everything has a default: `run(method="fixbn")` trains a small ResNet on the embedded images. `model` takes any
    `nn.Module` or a name, `clients` one (x, y) pair or `Dataset` per client with `test` for all or for each,
    `settings` any field of the config (`rounds=100, lr=0.1`). With `out` the run leaves a folder; `resume=True` goes
    on in it.
    """
    if clients is not None:
        if test is None:
            raise ConfigError("clients were given without test data; pass test=(x, y), or a list with one per client")
        federation = from_clients(clients, test)
    config = updated(config or RunConfig(), settings_to_fields(settings))
    names = {"method": method, "model": model}
    config = updated(config, {field: name for field, name in names.items() if isinstance(name, str)})
    given = Given(
        model if isinstance(model, nn.Module) else None, federation, method if isinstance(method, Method) else None
    )
    if given.method:
        config = updated(config, {"method": given.method.name})
    if federation is not None:
        config = updated(config, {"data.name": federation.name, "data.clients": len(federation.clients)})
    ranks = join(config.engine.device)
    plan = make_plan(config, model=given.model, federation=federation, method=given.method)
    if out is None or not ranks.first:
        return Result((play(plan, Store(), None, on_round),))
    folder = RunFolder(Path(out))
    if not (resume and folder.config.exists()):
        folder.create(describe(plan.config, given))
    return resume_folder(folder, given=given, expected=describe(plan.config, given), plan=plan, on_round=on_round)


def describe(config: RunConfig, given: Given) -> dict[str, Any]:
    """What config.json holds: the resolved config, and which of its parts were objects given in Python."""
    return {**to_dict(config), "given": given.names}


def read_config(folder: RunFolder) -> tuple[RunConfig, Mapping[str, Any] | None]:
    """The config in a folder, and for a comparison its methods and seeds."""
    stored = read_json(folder.config)
    if not isinstance(stored, dict) or not stored.keys() & {"given", "compare"}:
        raise CheckpointError(f"'{folder.config}' is not the config of a run; give a folder that fednorm made")
    config = from_dict({key: value for key, value in stored.items() if key not in ("given", "compare")})
    comparison = stored.get("compare")
    if "compare" in stored and (not isinstance(comparison, dict) or comparison.keys() != {"methods", "seeds"}):
        raise CheckpointError(f"'{folder.config}' is not the config of a comparison; give a folder that fednorm made")
    return config, comparison


def resume_folder(
    folder: RunFolder,
    *,
    given: Given | None = None,
    expected: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    on_round: OnRound | None = None,
) -> Result:
    """Start or continue the run of a folder; a finished one returns its result."""
    stored = read_json(folder.config)
    given = given or Given()
    if not isinstance(stored, dict) or "given" not in stored:
        raise CheckpointError(f"'{folder.config}' is not the config of a run; give a folder that fednorm made")
    if expected is not None and expected != stored:
        raise ConfigError(f"'{folder.path}' was started with another config: {differences(stored, expected)}")
    if stored["given"] != given.names:
        raise ConfigError(
            f"'{folder.path}' was started from Python with its own {', '.join(stored['given'])}; "
            f"continue it with fednorm.run(..., out='{folder.path}', resume=True)"
        )
    config = plan.config if plan else read_config(folder)[0]
    if not join(config.engine.device).first:
        return Result((play(plan or make_plan(config), Store(), None, None),))
    with folder.locked():
        plan = plan or make_plan(config)
        store = Store(folder.state)
        try:
            summary = play(plan, store, folder, on_round)
        finally:
            store.close()
    return Result((summary,), str(folder.path))


def play(plan: Plan, store: Store, folder: RunFolder | None, on_round: OnRound | None) -> dict[str, Any]:
    """Play a plan to its end and summarise it; an interruption leaves the last finished round behind.

    Of several ranks the first has the folder and tells `on_round`; all return its summary.
    """
    ranks = join(plan.config.engine.device)
    with threads_of(plan):
        course = Run(plan, store, ranks)
        metrics = folder.rewrite_metrics(store.rows()) if folder else nullcontext()
        with metrics as file, orderly_stop() as stopped:
            for row in course.rounds():
                if file is not None:
                    file.write(json.dumps(row) + "\n")
                if on_round and ranks.first:
                    on_round(plan, row)
                signalled = max(ranks.tell_all(stopped))
                if signalled and course.round < plan.config.rounds:
                    course.stop()
                    raise Interrupted(signalled)
    summary = ranks.tell_first(lambda: _summary(plan, course))
    if folder:
        save_model(plan, course, folder.model)
        write_json(folder.result, Result((summary,)).to_json())
    return summary


def _summary(plan: Plan, course: Run) -> dict[str, Any]:
    return summarise(
        list(course.store.rows()),
        method=plan.method.name,
        seed=plan.config.seed,
        rounds=plan.config.rounds,
        metric=plan.task.metric,
        digest=digest(course.server),
        notes=plan.prepared.notes,
    )


def save_model(plan: Plan, course: Run, path: Path) -> None:
    """Write the global model as plain safetensors; entries that stayed local are their clients' mean."""
    phase = plan.method.tested(-1)
    state = global_model(plan, phase, course.server, course.store)
    draft = path.with_name(path.name + ".part")
    tensors = {key: state[key].cpu().contiguous() for key in plan.prepared.facts.entries}
    safetensors.torch.save_file(tensors, draft, metadata={"method": plan.method.name, "model": plan.config.model})
    draft.replace(path)


class Interrupted(Exception):
    """The run was asked to stop by a signal and did, between two rounds."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@contextmanager
def orderly_stop() -> Iterator[Callable[[], int]]:
    """Let the first SIGINT or SIGTERM finish the round; a second one stops at once. Yields "which signal came?"."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    came = [0]
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: Any) -> None:
        if came[0]:
            raise Interrupted(number)
        came[0] = number

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: came[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
