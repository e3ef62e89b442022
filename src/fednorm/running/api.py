"""Runs from Python: `run` plays one method; `compare` and `resume` have files of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fednorm.core.method import Method
from fednorm.core.state import digest
from fednorm.core.task import AnyTask
from fednorm.data.federation import Federation
from fednorm.data.given import Examples
from fednorm.engines.ranks import Alone, join
from fednorm.errors import ConfigError, FednormError, unknown
from fednorm.running.clock_run import ClockRun, run_of
from fednorm.running.config import RunConfig, all_fields, updated
from fednorm.running.extensions import warn_of_changes, with_extensions
from fednorm.running.folder import RunFolder
from fednorm.running.given import Objects, check_given, check_stored, gathered, read_config, read_stored, stored_config
from fednorm.running.in_step import play_in_step
from fednorm.running.on_clock import settled
from fednorm.running.own_files import settled_by_files
from fednorm.running.plan import Plan
from fednorm.running.records import OnRow, RoundRow, RunId, RunResult
from fednorm.running.result_file import write_result
from fednorm.running.results import Result, summarise
from fednorm.running.run import Run
from fednorm.running.same_program import engine_maker
from fednorm.running.stopping import Interrupted, Stop, orderly_stop
from fednorm.running.store import Store
from fednorm.running.tensor_files import save_tree
from fednorm.running.threads import threads_of
from fednorm.running.trained import Trained, Which, model_of
from fednorm.running.trial import try_out

AnyRun = Run | ClockRun


@dataclass(frozen=True)
class Playable:
    """A plan to be played, and where its state and its results go."""

    plan: Plan
    store: Store
    folder: RunFolder | None = None
    on_row: OnRow | None = None


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


def described(
    config: RunConfig | None, named: Mapping[str, Any], use: Sequence[str], settings: Mapping[str, Any]
) -> RunConfig:
    """The config that keywords of `run` and `compare` describe, those that are names; what it uses is imported."""
    config = updated(config or RunConfig(), settings_to_fields(settings))
    config = updated(config, {field: name for field, name in named.items() if isinstance(name, str)})
    given = {*settings_to_fields(settings), *(field for field, value in named.items() if value is not None)}
    config = settled_by_files(with_extensions(replace(config, use=(*config.use, *use))), given)
    return settled(config) if "method" in named and isinstance(named["method"], str | None) else config


def run(
    config: RunConfig | None = None,
    *,
    method: str | Method | None = None,
    model: nn.Module | str | None = None,
    clients: Sequence[Examples] | None = None,
    test: Sequence[Examples] | Examples | None = None,
    federation: Federation | None = None,
    task: str | AnyTask | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_row: OnRow | None = None,
    use: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Play one method and return its result.

    Everything has a default: `run(method="fixbn")` trains a small ResNet on the embedded images. `model` takes any
    `nn.Module` or a name, `task` a `fednorm.Task` or an expression, `clients` one (x, y) pair or `Dataset` per client
    with `test` for all or for each, `settings` any field of the config (`rounds=100, lr=0.1`), `use` files or modules
    that register names. `on_row` is told after every round which run and its row; raising `fednorm.Stop` in it ends
    the run there. With `out` the run leaves a folder; `resume=True` goes on in it.
    """
    config = described(config, {"method": method, "model": model, "task": task}, use, settings)
    objects = gathered(model, clients, test, federation, method, task or config.task)
    config = objects.named(config)
    objects = objects.trusting(config)
    if config.keep_every and out is None:
        raise ConfigError(f"keep_every={config.keep_every} writes into the run's folder; give out=DIR")
    ranks = join(config.engine.device)
    folder = RunFolder(Path(out)) if out is not None and ranks.first else None
    if folder and not (resume and folder.config.exists()):
        folder.refuse_place()
    plan = objects.plan(config)
    try_out(plan, objects.model)
    if folder is None:
        return in_memory(plan, on_row)
    expected = stored_config(plan.config, objects)
    if not (resume and folder.config.exists()):
        folder.create(expected)
    check_stored(folder, expected)
    warn_of_changes(read_stored(folder).get("use_sha256", {}))
    return resume_folder(folder, objects=objects, plan=plan, on_row=on_row)


def in_memory(plan: Plan, on_row: OnRow | None = None) -> Result:
    """Play a plan that leaves no folder; its models stay in reach of the result."""
    store = Store()
    summary = play(Playable(plan, store, None, on_row))
    return Result((summary,), None, (Trained(plan, store),))


def resume_folder(
    folder: RunFolder,
    *,
    objects: Objects | None = None,
    plan: Plan | None = None,
    on_row: OnRow | None = None,
    allow_code: bool = False,
    use: Sequence[str] = (),
) -> Result:
    """Start or continue the run of a folder; a finished one returns its result."""
    objects = objects or Objects()
    check_given(folder, read_stored(folder), objects)
    if plan is None:
        config, _ = read_config(folder, allow_code=allow_code, use=use)
        plan = objects.trusting(config).plan(config)
    if not join(plan.config.engine.device).first:
        return in_memory(plan)
    with opened(folder, plan, on_row=on_row) as playable:
        summary = play(playable)
    return Result((summary,), str(folder.path), (Trained(plan, folder.state),))


@contextmanager
def opened(folder: RunFolder, plan: Plan, *, on_row: OnRow | None = None) -> Iterator[Playable]:
    """Hold the run of a folder, with its store open."""
    with folder.locked(), closing(Store(folder.state, begun=folder.has_begun)) as store:
        yield Playable(plan, store, folder, on_row)


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
        runs = {run_of(each.plan, each.store, ranks, make): each for each in playables}
        told, errors, signalled = _tell_rows(runs, ranks)
    ended = [run for run in runs if (run.stopped or told[run] == run.plan.config.rounds) and run not in errors]
    summaries = [_finish(run, runs[run].folder, ranks) for run in ended]
    if signalled:
        raise Interrupted(signalled)
    for run in runs:
        if run in errors:
            errors[run].run = RunId(run.plan.name, run.plan.config.seed)
            raise errors[run]
    return summaries


def _tell_rows(
    runs: Mapping[AnyRun, Playable], ranks: Alone
) -> tuple[dict[AnyRun, int], dict[AnyRun, FednormError], int]:
    """Play and write rows: the last round told of each run, how some failed, and the signal that stopped the rest.

    Runs are settled together, so one may have ended whose last row was not told when a signal came: it is resumed.
    """
    told = {run: run.round for run in runs}
    errors: dict[AnyRun, FednormError] = {}
    with ExitStack() as held:
        writers = {
            run: held.enter_context(playable.folder.metrics_open(playable.store.rows()))
            for run, playable in runs.items()
            if playable.folder
        }
        stopped = held.enter_context(orderly_stop())
        for run, news in _all_news(list(runs)):
            if isinstance(news, FednormError):
                errors[run] = news
                continue
            if run in writers:
                writers[run](news)
            wants_stop = _tell(run, news, runs[run].on_row if ranks.first and not run.stopped else None)
            told[run] = news["round"]
            signals, wishes = zip(*ranks.tell_all(lambda wish=wants_stop: (stopped(), wish)), strict=True)
            if any(wishes):
                run.stop_early()
            signalled = max(signals)
            if signalled and (going := [each for each in runs if not each.over and each not in errors]):
                for each in going:
                    each.stop()
                return told, errors, signalled
    return told, errors, 0


def _all_news(runs: Sequence[AnyRun]) -> Iterator[tuple[AnyRun, RoundRow | FednormError]]:
    """Rows of all runs, and how some failed: rounds in step, then one clock after the other."""
    in_rounds = [run for run in runs if isinstance(run, Run)]
    if in_rounds:
        yield from play_in_step(in_rounds)
    for run in runs:
        if isinstance(run, ClockRun):
            try:
                for row in run.rounds():
                    yield run, row
            except FednormError as error:
                yield run, error


def _tell(run: AnyRun, row: RoundRow, on_row: OnRow | None) -> bool:
    """Tell who watches of a round; whether they want it to be the last."""
    try:
        if on_row:
            on_row(RunId(run.plan.name, run.plan.config.seed), row)
    except Stop:
        return True
    return False


def _finish(run: AnyRun, folder: RunFolder | None, ranks: Alone) -> RunResult:
    """The summary of a run that was played to its end or stopped early, and in its folder all that it leaves."""
    plan = run.plan
    summary = ranks.tell_first(lambda: _summary(plan, run))
    if folder:
        if run.stopped:  # rounds that were on their way when it was stopped
            with folder.metrics_open(run.store.rows()):
                pass
        save_model(plan, run.store, folder.model)
        if plan.config.keep == "best":
            save_model(plan, run.store, folder.best, "best")
        write_result(folder, Result((summary,)).to_json(), run.store)
    return summary


def _summary(plan: Plan, run: AnyRun) -> RunResult:
    summary = summarise(
        list(run.store.rows()),
        method=plan.name,
        seed=plan.config.seed,
        rounds=plan.config.rounds,
        metric=plan.task.metric,
        higher_is_better=plan.task.higher_is_better,
        percent=plan.task.percent,
        digest=digest(run.server.tree),
        notes=[*plan.prepared.notes, *plan.federation.notes, *run.notes()],
        ran=run.store.facts().get("ran") or run.ran(),
    )
    names = plan.federation.client_names
    return {**summary, "client_names": list(names)} if names else summary


def save_model(plan: Plan, store: Store, path: Path, which: Which = "last") -> None:
    """Write the global model as plain safetensors; entries that stayed local are their clients' mean."""
    save_tree(path, model_of(plan, store, which=which), {"method": plan.name, "model": plan.config.model})
