"""Several runs in one stack, here on the CPU: each run's numbers are those it has alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fednorm
import tiny
from fednorm.engines.base import MOST_AWAITED
from fednorm.engines.stack.device_stack import DeviceStack
from fednorm.engines.stack.phase_program import PhaseProgram
from fednorm.errors import DivergedError, FednormError
from fednorm.methods import known_methods
from fednorm.running.config import RunConfig, updated
from fednorm.running.folder import RunFolder
from fednorm.running.in_step import play_in_step
from fednorm.running.plan import Plan
from fednorm.running.records import RoundRow as Row
from fednorm.running.records import RunId
from fednorm.running.run import Run
from fednorm.running.same_program import engine_maker, same_bits, same_program, same_settings
from fednorm.running.stopping import Interrupted
from fednorm.running.store import Store
from test_device_stack import stack_of
from test_stacked import gap

EQUAL = tiny.federation((8, 8, 8))
EASY = {"engine__name": "stacked", "rounds": 4, "train__lr": 0.02, "train__local_steps": 1}
SEEDS = (0, 1, 2)


@pytest.fixture(autouse=True)
def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})


def made(method: str = "fedavg", seed: int = 0, **changes: Any) -> Plan:
    """A plan whose model and batches follow its seed."""
    return tiny.plan(method, seed=seed, model=tiny.conv_net(seed=seed), **{"data": EQUAL, **EASY, **changes})


def sharing(plans: Sequence[Plan], stores: Sequence[Store] | None = None) -> list[Run]:
    """Runs of which those that are the same program share a stack."""
    make = engine_maker(plans)
    return [
        Run(plan, store, make=make)
        for plan, store in zip(plans, stores or map(Store, [None] * len(plans)), strict=True)
    ]


def rows_of(runs: Sequence[Run]) -> dict[Run, list[Row]]:
    rows: dict[Run, list[Row]] = {run: [] for run in runs}
    for run, news in play_in_step(runs):
        assert not isinstance(news, FednormError)
        rows[run].append(news)
    return rows


def assert_close(left: Any, right: Any) -> None:
    """Equal values, floats up to rounding, wherever they are; seconds are what they are."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left.keys() - {"seconds"}:
            assert_close(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for pair in zip(left, right, strict=True):
            assert_close(*pair)
    else:
        assert left == (pytest.approx(right, rel=1e-8, abs=1e-10) if isinstance(left, float) else right)


def assert_as_alone(runs: Sequence[Run], rows: dict[Run, list[Row]], settings: Sequence[dict[str, Any]]) -> None:
    """Server, memory, what clients keep, rows and scores are those of the run on its own, client by client."""
    for run, each in zip(runs, settings, strict=True):
        alone = Run(made(**{**each, "engine__name": "sequential"}), Store())
        assert_close(list(alone.rounds())[-len(rows[run]) :], rows[run])
        assert gap(alone, run) < 1e-10
        assert alone.server.held.memory.keys() == run.server.held.memory.keys()
        for key, value in alone.server.held.memory.items():
            torch.testing.assert_close(run.server.held.memory[key], value, rtol=1e-8, atol=1e-10)
        assert alone.store.seen() == run.store.seen()
        for client in alone.store.seen():
            mine, theirs = alone.store.get(client), run.store.get(client)
            assert mine.steps == theirs.steps
            # What was brought home from a device is on the host.
            torch.testing.assert_close(theirs.tree, mine.tree, rtol=1e-8, atol=1e-10, check_device=False)


def check(settings: Sequence[dict[str, Any]], together: int | None = None) -> DeviceStack:
    """Play runs that share a stack, so many of them at once at the most, and compare with each alone."""
    plans = [made(**each) for each in settings]
    runs = sharing(plans)
    stacks = {stack_of(run) for run in runs}
    assert len(stacks) == 1
    stack = stacks.pop()
    rows = rows_of(runs)
    assert not stack.refused
    assert max(each.runs for each in stack._programs.values()) == (together or len(runs))
    assert_as_alone(runs, rows, settings)
    return stack


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "local-momentum", "fedadam", "fedbs"])
def test_seeds_share_a_stack(method: str) -> None:
    check([{"method": method, "seed": seed} for seed in SEEDS])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_seeds_share_a_stack_on_a_gpu(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cuda"})
    monkeypatch.setattr("fednorm.running.same_program.same_bits", lambda *_: True)  # float64, up to rounding
    check([{"method": method, "seed": seed, "engine__device": "cuda"} for seed in SEEDS])


NUMBERS = {
    "mu": [{"method": f"fedprox(mu={mu})", "train__local_steps": 2} for mu in (0.01, 0.1, 1.0)],
    "clipping": [{"method": f"fedwon(clip={clip})"} for clip in (0.01, 0.1)],
    "rate, decay and momentum": [
        {"train__lr": 0.02},
        {"train__lr": 0.05, "train__weight_decay": 0.0, "train__momentum": 0.5},
        {"train__lr": 0.05, "train__schedule": "cosine"},
    ],
    "freezing round": [{"method": f"fixbn(at={at})", "seed": int(4 * at)} for at in (0.25, 0.75, 0.75)],
    "rounds and scores": [{"rounds": 3, "eval__every": 1}, {"rounds": 5, "eval__probes": ("drift",), "seed": 1}],
    "probes": [
        {"eval__probes": probes, "eval__probe_every": 2, "seed": seed}
        for seed, probes in enumerate([("drift",), ("grad-norm", "drift"), ("running-var", "client-spread")])
    ],
    "cohort": [{"clients_per_round": 2, "seed": seed, "method": "fedbn"} for seed in SEEDS],
    "augmentation": [{"train__augment": "crop(1)+flip", "seed": seed} for seed in SEEDS],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_data_to_a_stack(name: str) -> None:
    check(NUMBERS[name], together=1 if name == "rounds and scores" else None)


@pytest.mark.parametrize("work", [{"train__local_steps": 3}, {"train__local_steps": None, "train__local_epochs": 1}])
def test_runs_with_other_examples_and_clients_of_other_sizes(work: dict[str, Any]) -> None:
    """Equal pools lie on the device once; runs whose clients take more steps have exchanges of their own."""
    pools = [EQUAL, tiny.relabelled(EQUAL, (2, 0, 1)), tiny.federation((12, 12, 12)), EQUAL]
    settings = [{"method": "fedbn", "data": data, "seed": seed, **work} for seed, data in enumerate(pools)]
    stack = check(settings, together=4 if "train__local_epochs" not in work else 3)
    assert stack._offsets == [0, 24, 48, 0]
    assert len(stack._batches.pool.x) == 24 + 24 + 36


def test_ragged_clients_go_their_own_way() -> None:
    pools = (EQUAL, tiny.federation((7, 9, 8)), EQUAL)
    settings = [{"data": data, "seed": seed} for seed, data in enumerate(pools)]
    runs = sharing([made(**each) for each in settings])
    assert_as_alone(runs, rows_of(runs), settings)


def test_other_programs_have_their_own_stack() -> None:
    settings = [{"method": method, "seed": seed} for method in ("fedavg", "fedbn") for seed in (0, 1)]
    plans = [made(**each) for each in settings]
    runs = sharing(plans)
    stacks = [stack_of(run) for run in runs]
    assert [stacks.index(stack) for stack in stacks] == [0, 0, 2, 2]
    for stack, own in ((stacks[0], plans[:2]), (stacks[2], plans[2:])):
        assert [(sites.method, sites.work) for sites in stack.runs] == [(plan.method, plan.work) for plan in own]
    assert_as_alone(runs, rows_of(runs), settings)


def test_methods_share_a_stack_until_they_part() -> None:
    """Freezing is averaging up to its round; another has a phase behind the last round that it does not have."""
    settings = [{"method": "fedavg"}, {"method": "fixbn(at=0.5)"}, {"seed": 1}, {"method": "posthoc"}]
    runs = sharing([made(**each) for each in settings])
    stack = stack_of(runs[0])
    assert [stack_of(run) is stack for run in runs] == [True, True, True, False]
    assert_as_alone(runs, rows_of(runs), settings)
    assert {(str(each.phase.id), each.runs) for each in stack._programs.values()} == {
        ("train.0.0", 3),
        ("train.0.0", 2),
        ("train.1.0", 1),
    }


@pytest.mark.parametrize("method", known_methods())
def test_two_seeds_of_every_method_are_the_same_program(method: str) -> None:
    first, second = (tiny.plan(method, seed=seed, model=tiny.residual_net(seed), data=EQUAL) for seed in (0, 1))
    assert same_program(first, second)


OTHERS: dict[str, dict[str, Any]] = {
    "method": {"method": "fedbn"},
    "option in a merge": {"method": "fedadam(lr=0.02)"},
    "surgery": {"method": "fedadam+gn"},
    "batch size": {"train__batch_size": 2},
    "local steps": {"train__local_steps": 2},
    "optimizer": {"train__optimizer": "adam"},
    "no momentum": {"train__momentum": 0.0},
    "decay of vectors": {"train__decay_vectors": False},
    "weights of clients": {"train__weights": "uniform"},
    "augmentation": {"train__augment": "flip"},
    "cohort": {"clients_per_round": 2},
    "clients": {"data": tiny.federation((8, 8))},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_makes_another_program(name: str) -> None:
    assert not same_program(made("fedadam"), made(**{"method": "fedadam", **OTHERS[name]}))


def test_runs_in_company_give_the_bits_they_give_alone_or_stay_alone() -> None:
    configs = {name: tiny.config(engine__precision=name) for name in ("fp32", "tf32", "bf16")}
    assert {name: same_bits(config, "cuda") for name, config in configs.items()} == {
        "fp32": False,
        "tf32": True,
        "bf16": True,
    }
    assert same_bits(configs["fp32"], "cpu")


def test_another_precision_is_another_program() -> None:
    assert not same_settings(tiny.config(), tiny.config(engine__precision="bf16"))


def test_another_model_is_another_program_even_with_equal_state() -> None:
    def plan(norm: torch.nn.Module, **changes: Any) -> Plan:
        return tiny.plan("fedavg", model=tiny.conv_net(norm), data=EQUAL, **changes)

    assert same_program(plan(torch.nn.BatchNorm2d(4)), plan(torch.nn.BatchNorm2d(4)))
    assert not same_program(plan(torch.nn.BatchNorm2d(4)), plan(torch.nn.BatchNorm2d(4, eps=1e-3)))
    assert not same_program(plan(torch.nn.BatchNorm2d(4)), plan(torch.nn.GroupNorm(2, 4)))


def test_a_schedule_inside_the_model_ties_the_number_of_rounds() -> None:
    assert same_program(made("fedavg", rounds=4), made("fedavg", rounds=8))
    assert not same_program(made("brn", rounds=4), made("brn", rounds=8))


def test_settings_that_cannot_be_compared_make_another_program() -> None:
    def plan(scale: torch.Tensor | list[torch.Tensor]) -> Plan:
        norm = torch.nn.BatchNorm2d(4)
        norm.__dict__["scale"] = scale
        return tiny.plan("fedavg", model=tiny.conv_net(norm), data=EQUAL)

    assert same_program(plan(torch.ones(2)), plan(torch.ones(2)))
    assert not same_program(plan(torch.ones(2)), plan(torch.zeros(2)))
    assert not same_program(plan([torch.ones(2)]), plan([torch.ones(2)]))


def test_checkpoints_are_not_missed_by_rounds_settled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    committed: list[int] = []
    whole = Store.commit

    def commit(self: Store, round: int, *rest: Any) -> None:
        committed.append(round)
        whole(self, round, *rest)

    monkeypatch.setattr(Store, "commit", commit)
    monkeypatch.setattr("fednorm.running.in_step.SETTLE_SECONDS", 1e9)
    rows_of(sharing([made(rounds=20, eval__every=7, engine__checkpoint_every=3)]))
    assert committed == [0, 3, 6, 9, 12, 15, 18, 20]


def test_a_run_that_diverges_leaves_the_others_alone() -> None:
    settings = [{"seed": 0}, {"seed": 1, "train__lr": 1e200}, {"seed": 2}]
    runs = sharing([made(**each) for each in settings])
    news = list(play_in_step(runs))
    *fine, error = (each for run, each in news if run is runs[1])
    assert isinstance(error, DivergedError)
    assert len(fine) < 4
    good = [runs[0], runs[2]]
    rows = {run: [row for who, row in news if who is run and isinstance(row, dict)] for run in good}
    assert_as_alone(good, rows, [settings[0], settings[2]])


def test_runs_go_on_from_different_rounds(tmp_path: Path) -> None:
    # With a checkpoint after every round no round is under way when a row is told.
    settings = [{"method": "fedbn", "seed": seed, "rounds": 6, "engine__checkpoint_every": 1} for seed in SEEDS]
    stores = [Store(tmp_path / f"{seed}.sqlite") for seed in SEEDS]
    for each, store, rounds in zip(settings[:2], stores, (2, 4), strict=False):
        tiny.play(made(**each), store, rounds)
    runs = sharing([made(**each) for each in settings], stores)
    assert [run.round for run in runs] == [2, 4, 0]
    assert_as_alone(runs, rows_of(runs), settings)


def test_runs_that_do_not_fit_together_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one exchange is played so often in a round that its log goes round before anybody looks."""
    tried: list[int] = []
    whole = PhaseProgram.play

    def scarce(self: PhaseProgram) -> int:
        tried.append(self.runs)
        if self.runs > 1:
            raise torch.OutOfMemoryError("scarce")
        return whole(self)

    monkeypatch.setattr(PhaseProgram, "play", scarce)
    common = {"method": "fedadam", "rounds": 30, "eval__every": 30, "train__lr": 0.001}
    settings = [{**common, "seed": seed} for seed in SEEDS]
    runs = sharing([made(**each) for each in settings])
    rows = rows_of(runs)
    assert tried[:5] == [3, 2, 1, 1, 1]
    assert len(tried) == 2 + 3 * 30 > MOST_AWAITED
    assert_as_alone(runs, rows, settings)


COMPARED = updated(
    RunConfig(),
    {
        "model": "mlp_bn(width=8)",
        "rounds": 6,
        "train.local_steps": 1,
        "train.dtype": "float64",
        "data.train_limit": 200,
        "data.partition": "iid",
        "eval.every": 2,
        "engine.name": "stacked",
        "engine.device": "cpu",
        "engine.threads": 1,
    },
)
METHODS = ["fedprox(mu=0.1)", "fedprox(mu=1.0)", "fedbn"]
SHARED = "stacked engine: {} runs are the same program and share one stack"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> fednorm.Result:
    return fednorm.compare(METHODS, config=COMPARED, seeds=(0, 1), out=tmp_path_factory.mktemp("plain") / "c")


def compared(result: fednorm.Result) -> list[dict[str, Any]]:
    return [{key: value for key, value in run.items() if key != "digest"} for run in result.runs]


def test_a_comparison_is_packed_and_its_result_the_same(
    unpacked: fednorm.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, int, int]] = []
    out = tmp_path / "c"
    packed = fednorm.compare(
        METHODS, config=COMPARED, seeds=(0, 1), out=out, on_row=lambda run, row: seen.append((*run, row["round"]))
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if "share" in line]
    assert lines == [SHARED.format(4), SHARED.format(2)]
    assert_close(compared(packed), compared(unpacked))
    assert sorted(seen) == sorted((m, s, r) for m in METHODS for s in (0, 1) for r in range(1, 7))
    folders = sorted(path for path in out.iterdir() if path.is_dir())
    assert len(folders) == 6
    for folder in map(RunFolder, folders):
        assert folder.metrics.read_text().count("\n") == 6
        assert folder.result.exists()
        assert folder.model.exists()


def test_an_interrupted_comparison_goes_on(
    unpacked: fednorm.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(run: RunId, row: Row) -> None:
        if row["round"] == 3 and run.seed == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        fednorm.compare(METHODS, config=COMPARED, seeds=(0, 1), out=tmp_path / "c", on_row=stop)
    folders = [RunFolder(path) for path in (tmp_path / "c").iterdir() if path.is_dir()]
    assert not any(folder.result.exists() for folder in folders)
    rows: list[int] = []
    result = fednorm.resume(tmp_path / "c", on_row=lambda run, row: rows.append(row["round"]))
    assert_close(compared(result), compared(unpacked))
    assert all(folder.metrics.read_text().count("\n") == 6 for folder in folders)
    assert rows.count(1) == 2, "only the two runs of the other method had not begun"


def test_a_comparison_reports_the_run_that_diverged_when_the_others_are_done(tmp_path: Path) -> None:
    methods = ["fedprox(mu=0.1)", "fedprox(mu=1e300)", "fedprox(mu=1.0)"]
    with pytest.raises(DivergedError, match="diverged in round"):
        fednorm.compare(methods, config=updated(COMPARED, {"train.local_steps": 3}), out=tmp_path / "c")
    done = {path.name: RunFolder(path).result.exists() for path in (tmp_path / "c").iterdir() if path.is_dir()}
    assert sorted(done.values()) == [False, True, True]
