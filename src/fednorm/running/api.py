"""Runs from Python: `run` plays one method, `compare` several, `resume` goes on where a folder stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fednorm.core.method import Method
from fednorm.core.state import digest
from fednorm.core.task import AnyTask
from fednorm.data.digest import data_digests
from fednorm.data.federation import Examples, Federation, from_clients
from fednorm.engines.ranks import Alone, join
from fednorm.errors import CheckpointError, ConfigError, FednormError, unknown
from fednorm.files import read_json, write_json
from fednorm.running.config import RunConfig, all_fields, differences, from_dict, to_dict, updated
from fednorm.running.evaluate import global_model
from fednorm.running.folder import RunFolder
from fednorm.running.in_step import play_in_step
from fednorm.running.own_files import settled
from fednorm.running.plan import Plan, make_plan
from fednorm.running.records import OnRow, RunId, RunResult
from fednorm.running.results import Result, summarise
from fednorm.running.run import Run
from fednorm.running.same_program import engine_maker
from fednorm.running.store import Store, save_tree
from fednorm.running.tasks import targets_of
from fednorm.running.threads import threads_of


@dataclass(frozen=True)
class Playable:
    """A plan to be played, and where its state and its results go."""

    plan: Plan
    store: Store
    folder: RunFolder | None = None
    on_row: OnRow | None = None


@dataclass(frozen=True)
class Objects:
    """Objects given in Python in place of names in the config."""

    model: nn.Module | None = None
    federation: Federation | None = None
    method: Method | None = None
    task: AnyTask | None = None

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
    task: str | AnyTask | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_row: OnRow | None = None,
    **settings: Any,
) -> Result:
    """Play one method and return its result.

    Everything has a default: `run(method="fixbn")` trains a small ResNet on the embedded images. `model` takes any
    `nn.Module` or a name, `task` a `fednorm.Task` or an expression, `clients` one (x, y) pair or `Dataset` per client
    with `test` for all or for each, `settings` any field of the config (`rounds=100, lr=0.1`). With `out` the run
    leaves a folder; `resume=True` goes on in it.
    """
    if clients is not None:
        if test is None:
            raise ConfigError("clients were given without test data; pass test=(x, y), or a list with one per client")
        federation = from_clients(clients, test, task=targets_of(task or (config and config.task)))
    config = updated(config or RunConfig(), settings_to_fields(settings))
    names = {"method": method, "model": model, "task": task}
    config = updated(config, {field: name for field, name in names.items() if isinstance(name, str)})
    objects = Objects(
        model if isinstance(model, nn.Module) else None,
        federation,
        method if isinstance(method, Method) else None,
        None if isinstance(task, str) else task,
    )
    if objects.method:
        config = updated(config, {"method": objects.method.name})
    if federation is not None:
        config = updated(config, {"data.name": federation.name, "data.clients": len(federation.clients)})
    else:
        asked = {*settings_to_fields(settings), *(["model"] if model is not None else [])}
        config = settled(config, asked)
    ranks = join(config.engine.device)
    plan = make_plan(config, model=objects.model, federation=federation, method=objects.method, task=objects.task)
    if out is None or not ranks.first:
        return Result((play(Playable(plan, Store(), None, on_row)),))
    folder, expected = RunFolder(Path(out)), stored_config(plan.config, objects)
    if not (resume and folder.config.exists()):
        folder.create(expected)
    return resume_folder(folder, objects=objects, expected=expected, plan=plan, on_row=on_row)


def stored_config(config: RunConfig, objects: Objects) -> dict[str, Any]:
    """What config.json holds: the resolved config, and which of its parts were objects given in Python."""
    stored = {**to_dict(config), "given": objects.names}
    return stored if objects.federation is None else {**stored, "given_data": data_digests(objects.federation)}


def refuse_other_data(folder: RunFolder, stored: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Data given in Python have no name that a config could compare, so their digests are compared."""
    before, now = (each.get("given_data") or {} for each in (stored, expected))
    changed = [part for part in now if before.get(part) != now[part]] if before else []
    if changed:
        raise ConfigError(
            f"'{folder.path}' was started with other data: {', '.join(changed)} differ; "
            "give the data it was started with, or another folder"
        )


def read_config(folder: RunFolder) -> tuple[RunConfig, Mapping[str, Any] | None]:
    """The config in a folder, and for a comparison its methods and seeds."""
    stored = read_json(folder.config)
    if not isinstance(stored, dict) or not stored.keys() & {"given", "compare"}:
        raise CheckpointError(f"'{folder.config}' is not the config of a run; give a folder that fednorm made")
    config = from_dict({key: value for key, value in stored.items() if key not in ("given", "given_data", "compare")})
    comparison = stored.get("compare")
    if "compare" in stored and (not isinstance(comparison, dict) or comparison.keys() != {"methods", "seeds"}):
        raise CheckpointError(f"'{folder.config}' is not the config of a comparison; give a folder that fednorm made")
    return config, comparison


def resume_folder(
    folder: RunFolder,
    *,
    objects: Objects | None = None,
    expected: Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    on_row: OnRow | None = None,
) -> Result:
    """Start or continue the run of a folder; a finished one returns its result."""
    stored = read_json(folder.config)
    objects = objects or Objects()
    if not isinstance(stored, dict) or "given" not in stored:
        raise CheckpointError(f"'{folder.config}' is not the config of a run; give a folder that fednorm made")
    if expected is not None and expected != stored:
        refuse_other_data(folder, stored, expected)
        raise ConfigError(f"'{folder.path}' was started with another config: {differences(stored, expected)}")
    if stored["given"] != objects.names:
        raise ConfigError(
            f"'{folder.path}' was started from Python with its own {', '.join(stored['given'])}; "
            f"continue it with fednorm.run(..., out='{folder.path}', resume=True)"
        )
    config = plan.config if plan else read_config(folder)[0]
    if not join(config.engine.device).first:
        return Result((play(Playable(plan or make_plan(config), Store())),))
    with opened(folder, plan=plan, on_row=on_row) as playable:
        return Result((play(playable),), str(folder.path))


@contextmanager
def opened(folder: RunFolder, *, plan: Plan | None = None, on_row: OnRow | None = None) -> Iterator[Playable]:
    """Hold the run of a folder, with its plan and its store open."""
    with folder.locked():
        plan = plan or make_plan(read_config(folder)[0])
        store = Store(folder.state)
        try:
            yield Playable(plan, store, folder, on_row)
        finally:
            store.close()


def play(playable: Playable) -> RunResult:
    """Play a plan to its end and summarise it; an interruption leaves the last finished round behind.

    Of several ranks the first has the folder and tells `on_row`; all return its summary.
    """
    return play_all([playable])[0]


def play_all(playables: Sequence[Playable]) -> list[RunResult]:
    """Play some plans in step, as `play` does each: those that are the same program share a stack on the device.

    An interruption stops all. A run that fails leaves its folder as it would alone; the others are played to their
    end, and then the error is raised, of several that of the first.
    """
    ranks = join(playables[0].plan.config.engine.device)
    with threads_of(playables[0].plan):
        make = engine_maker([playable.plan for playable in playables])
        runs = {Run(playable.plan, playable.store, ranks, make): playable for playable in playables}
        told, errors, signalled = _tell_rows(runs, ranks)
    ended = [run for run in runs if told[run] == run.plan.config.rounds and run not in errors]
    summaries = [_finish(run, runs[run].folder, ranks) for run in ended]
    if signalled:
        raise Interrupted(signalled)
    for error in (errors[run] for run in runs if run in errors):
        raise error
    return summaries


def _tell_rows(runs: Mapping[Run, Playable], ranks: Alone) -> tuple[dict[Run, int], dict[Run, FednormError], int]:
    """Play and write rows: the last round told of each run, how some failed, and the signal that stopped the rest.

    Runs are settled together, so one may have ended whose last row was not told when a signal came: it is resumed.
    """
    told = {run: run.round for run in runs}
    errors: dict[Run, FednormError] = {}
    with ExitStack() as held:
        writers = {
            run: held.enter_context(playable.folder.metrics_open(playable.store.rows()))
            for run, playable in runs.items()
            if playable.folder
        }
        stopped = held.enter_context(orderly_stop())
        for run, news in play_in_step(list(runs)):
            if isinstance(news, FednormError):
                errors[run] = news
                continue
            if run in writers:
                writers[run](news)
            on_row = runs[run].on_row
            if on_row and ranks.first:
                on_row(RunId(run.plan.method.name, run.plan.config.seed), news)
            told[run] = news["round"]
            signalled = max(ranks.tell_all(stopped))
            going = [each for each in runs if each.round < each.plan.config.rounds and each not in errors]
            if signalled and going:
                for each in going:
                    each.stop()
                return told, errors, signalled
    return told, errors, 0


def _finish(run: Run, folder: RunFolder | None, ranks: Alone) -> RunResult:
    """The summary of a run that was played to its end, and in its folder all that it leaves."""
    plan = run.plan
    summary = ranks.tell_first(lambda: _summary(plan, run))
    if folder:
        save_model(plan, run, folder.model)
        write_json(folder.result, Result((summary,)).to_json())
    return summary


def _summary(plan: Plan, run: Run) -> RunResult:
    summary = summarise(
        list(run.store.rows()),
        method=plan.method.name,
        seed=plan.config.seed,
        rounds=plan.config.rounds,
        metric=plan.task.metric,
        higher_is_better=plan.task.higher_is_better,
        percent=plan.task.percent,
        digest=digest(run.server.tree),
        notes=plan.prepared.notes,
    )
    names = plan.federation.client_names
    return {**summary, "client_names": list(names)} if names else summary


def save_model(plan: Plan, run: Run, path: Path) -> None:
    """Write the global model as plain safetensors; entries that stayed local are their clients' mean."""
    state = global_model(plan, plan.evaluated(-1), run.server.tree, run.store)
    tensors = {key: state[key].cpu().contiguous() for key in plan.prepared.facts.entries}
    save_tree(path, tensors, {"method": plan.method.name, "model": plan.config.model})


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
