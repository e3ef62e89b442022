"""Rounds that stay on the device, here played on the CPU: the same numbers as the reference, for every method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import tiny
from fednorm.core.method import Numbers
from fednorm.core.optim import Optimizer
from fednorm.core.state import Tree
from fednorm.engines.stack.device_stack import DeviceStack
from fednorm.engines.stack.kernels.layers import use_kernels
from fednorm.engines.stack.program import Program, Rows
from fednorm.engines.stack.ragged import RaggedProgram
from fednorm.engines.stack.slot import StackSlot
from fednorm.errors import ConfigError, DivergedError
from fednorm.methods import known_methods
from fednorm.running.run import Run
from fednorm.running.store import Store
from test_fusion import operators
from test_stacked import PAIRS, assert_same_clients, gap


@pytest.fixture(autouse=True)
def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})


def stack_of(run: Run) -> DeviceStack:
    """The stack in which a run's rounds stay on the device."""
    assert isinstance(run.server.held, StackSlot)
    return run.server.held.stack


def on_device(method: str, **changes: object) -> Run:
    run = Run(tiny.plan(method, engine__name="stacked", **changes), Store())
    assert stack_of(run)
    assert list(run.rounds())
    return run


@pytest.mark.parametrize("method", [*known_methods(), *PAIRS])
def test_rounds_on_the_device_equal_the_reference_after_fifty_steps(method: str) -> None:
    changes = {"data": tiny.federation((8, 8, 8)), "rounds": 10, "train__local_steps": 5, "train__lr": 0.02}
    reference = tiny.play(tiny.plan(method, engine__name="sequential", eval__every=10, **changes))
    stayed = on_device(method, eval__every=10, **changes)
    assert gap(reference, stayed) < 1e-10
    assert_same_clients(reference, stayed)


EPOCHS = {"train__local_steps": None, "train__local_epochs": 2}


def ragged_programs(run: Run) -> list[RaggedProgram]:
    return [each for each in stack_of(run)._programs.values() if isinstance(each, RaggedProgram)]


@pytest.mark.parametrize("method", [*known_methods(), *PAIRS])
def test_clients_with_unequal_work_equal_the_reference_too(method: str) -> None:
    """Unequal numbers of steps, and batches that end an epoch with 2 or 3 examples."""
    data = tiny.federation((7, 14, 11, 3))
    changes = {"data": data, "rounds": 5, "train__lr": 0.02, "eval__every": 5, **EPOCHS}
    plan = tiny.plan(method, engine__name="sequential", **changes)
    if any(phase.phase.lockstep for phase in plan.phases):
        with pytest.raises(ConfigError, match="in lock-step and needs equal batches"):
            tiny.play(plan)
        return
    reference = tiny.play(plan)
    stayed = on_device(method, **changes)
    assert gap(reference, stayed) < 1e-10
    assert_same_clients(reference, stayed)
    assert [row["train_loss"] for row in stayed.store.rows()] == pytest.approx(
        [row["train_loss"] for row in reference.store.rows()], rel=1e-9
    )


@pytest.mark.parametrize(
    ("changes", "smaller"),
    [(EPOCHS, {(1, 2), (3, 3)}), ({"train__local_steps": 3}, {(1, 2), (1, 3), (2, 3), (3, 3)})],
    ids=["epochs", "steps"],
)
def test_unequal_work_stays_on_the_device_as_few_programs(changes: dict, smaller: set[tuple[int, int]]) -> None:
    """One step on full batches, and one for each group of smaller ones that comes often; with augmentation."""
    wanted = {"data": tiny.federation((7, 14, 11, 3)), "rounds": 12, "train__augment": "crop(1)+flip", **changes}
    reference = tiny.play(tiny.plan("fedprox", engine__name="sequential", **wanted))
    plan = tiny.plan("fedprox", engine__name="stacked", **wanted)
    assert use_kernels(plan.prepared.model)
    stayed = Run(plan, Store())
    list(stayed.rounds())
    assert gap(reference, stayed) < 1e-10
    assert not stack_of(stayed).refused
    (exchange,) = ragged_programs(stayed)
    (full,) = (name for name in exchange._programs if name.endswith("batches of 4"))
    others = {f"step of {width} on batches of {size}" for width, size in smaller}
    assert exchange._programs.keys() == {"start", full, *others, "merge"}


@pytest.mark.parametrize("steps", [1, 3], ids=["one program a round", "three programs a round"])
@pytest.mark.parametrize(
    "method",
    ["fedavg", "fixbn", "fedbn", "fedprox", "local-momentum", "fedadam", "gn", "ln", "in", "ws", "fedwon", "fixup"],
)
def test_stack_operators_and_their_fusion_change_nothing(method: str, steps: int) -> None:
    """Convolutions and batch norms as stack operators, filters laid out with the channel last, neighbours fused."""
    changes = {"data": tiny.federation((8, 8, 8)), "rounds": 6, "train__local_steps": steps, "train__lr": 0.02}
    reference = tiny.play(tiny.plan(method, engine__name="sequential", **changes))
    plan = tiny.plan(method, engine__name="stacked", **changes)
    assert use_kernels(plan.prepared.model)
    stayed = Run(plan, Store())
    list(stayed.rounds())
    assert not stack_of(stayed).refused
    assert gap(reference, stayed) < 1e-10


def test_vectors_are_spared_from_decay_on_the_device_too() -> None:
    changes = {"train__weight_decay": 0.5, "rounds": 2, "model": tiny.conv_net(), "data": tiny.federation((8, 8, 8))}
    spared, everything = (tiny.play(tiny.plan(train__decay_vectors=decays, **changes)) for decays in (False, True))
    assert gap(spared, on_device("fedavg", train__decay_vectors=False, **changes)) < 1e-10
    assert gap(spared, everything) > 1e-3


def test_a_rate_that_changes_every_round_reaches_messages_made_ready_before() -> None:
    """What the device is told of several rounds is made at once, with the numbers of the first."""
    changes = {"model": tiny.conv_net(), "data": tiny.federation((8, 8, 8)), "rounds": 6, "eval__every": 6}
    cosine = {**changes, "train__schedule": "cosine"}
    reference = tiny.play(tiny.plan(**cosine))
    assert gap(reference, on_device("fedavg", **cosine)) < 1e-10
    assert gap(reference, tiny.play(tiny.plan(**changes))) > 1e-3


def test_fewer_steps_than_an_epoch_are_the_last_epoch() -> None:
    """FedBS weighs by the loss of the last epoch: of three steps of four, of the last two, and of the last one."""
    data = tiny.federation((14, 7, 3))
    changes = {"data": data, "rounds": 2, "train__local_steps": 3, "model": tiny.conv_net()}
    reference, stayed = tiny.play(tiny.plan("fedbs", **changes)), on_device("fedbs", **changes)
    assert ragged_programs(stayed)
    assert gap(reference, stayed) < 1e-10
    told = [report.losses for report in stayed.server.reports]
    for losses, expected in zip(told, reference.server.reports, strict=True):
        assert losses == pytest.approx(expected.losses, rel=1e-10)
    assert told[0]["last_epoch"] == pytest.approx(told[0]["all"]) != told[0]["last_batch"]
    assert told[2]["last_epoch"] == pytest.approx(told[2]["last_batch"]) != told[2]["all"]


def test_checkpoints_come_at_the_rounds_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rounds are settled in bursts."""
    committed: list[int] = []
    whole = Run._commit

    def noted(self: Run) -> None:
        committed.append(self.round)
        whole(self)

    monkeypatch.setattr(Run, "_commit", noted)
    data = tiny.federation((8, 8, 8))
    on_device("fedavg", data=data, rounds=20, eval__every=20, engine__checkpoint_every=7)
    assert committed == [0, 7, 14, 20]


def test_rounds_in_flight_are_committed_whole_when_a_run_stops() -> None:
    """Whoever stops after a row finds later rounds played already; their rows are like all others."""
    changes = {"rounds": 20, "eval__every": 20, "engine__checkpoint_every": 20, "engine__name": "stacked"}
    made = tiny.plan(model=tiny.conv_net(), data=tiny.federation((8, 8, 8)), **changes)
    run = Run(made, Store())
    assert next(run.rounds())["round"] == 1
    assert (run.round, len(run.unsettled)) == (2, 1)
    run.stop()
    first, second = run.store.rows()
    assert first.keys() == second.keys()
    assert all(row["seconds"] > 0 and row["train_loss"] > 0 for row in (first, second))
    resumed = Run(made, run.store)
    assert resumed.round == 2


SGD_MOVES = {"params", "optimizer:momentum"}
ADAM_MOVES = {"params", "optimizer:exp_avg", "optimizer:exp_avg_sq", "optimizer:step"}


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedbn+local-momentum", "fedavg+local-momentum", "silobn"])
@pytest.mark.parametrize(
    ("optimizer", "momentum", "update", "moved"),
    [
        ("sgd", 0.0, "sgd", {"params"}),
        ("sgd", 0.9, "sgd", SGD_MOVES),
        ("adam", 0.9, "adam", ADAM_MOVES),
        ("adamw", 0.9, "adam", ADAM_MOVES),
    ],
)
def test_a_step_moves_all_clients_in_place_by_one_operator(
    method: str, optimizer: str, momentum: float, update: str, moved: set[str]
) -> None:
    """Whoever has the parameters and their buffers: nothing is laid out anew before it, or copied back behind it."""
    if "momentum" in method and not momentum:
        pytest.skip("without momentum there is none to keep")
    changes = {"data": tiny.federation((8, 8, 8)), "rounds": 2, "train__local_steps": 3, "train__momentum": momentum}
    changes |= {"train__optimizer": optimizer, "train__lr": 0.02, "eval__every": 2}
    run = on_device(method, **changes)
    (exchange,) = stack_of(run)._programs.values()
    step = exchange._programs["step"]
    assert {key.removesuffix(".torch.float64").removesuffix(":torch.float64") for key in step._in_place} == moved
    found = operators(step._function)
    assert {name: found[name] for name in found if "adam" in name or "sgd" in name} == {
        f"fednorm.{update}_in_place.default": 1
    }
    (node,) = (node for node in step._function.graph.nodes if str(node.target) == f"fednorm.{update}_in_place.default")
    for read in (node.args[0], *node.args[2 : 1 + len(moved)]):
        assert read.op == "placeholder" or (str(read.target), read.args[0].op) == ("aten.slice.Tensor", "placeholder")
    reference = tiny.play(tiny.plan(method, engine__name="sequential", **changes))
    assert gap(reference, run) < 1e-10
    assert_same_clients(reference, run)


def test_an_optimizer_of_a_users_own_is_not_taken_for_ours_by_its_name() -> None:
    """It is called sgd, but goes by signs."""

    def signs(value: Tensor, grad: Tensor, buffers: Tree, numbers: Numbers) -> tuple[Tensor, Tree]:
        return value - numbers["lr"] * grad.sign(), buffers

    own = Optimizer(signs, name="sgd")
    changes = {"data": tiny.federation((8, 8, 8)), "rounds": 2, "train__local_steps": 3, "train__momentum": 0.0}
    plans = [tiny.plan(engine__name=engine, **changes) for engine in ("sequential", "stacked")]
    reference, stayed = (tiny.play(replace(each, optimizer=own)) for each in plans)
    assert gap(reference, stayed) < 1e-10
    (exchange,) = stack_of(stayed)._programs.values()
    assert not any("sgd" in name for name in operators(exchange._programs["step"]._function))
    assert gap(tiny.play(plans[0]), reference) > 1e-2


VIEWS = {
    "itself": lambda w: w,
    "chunk": lambda w: w.chunk(3, 1)[1],
    "diagonal": lambda w: w.diagonal(),
    "unfold": lambda w: w.unfold(1, 2, 1),
    "as_strided": lambda w: w.as_strided((3,), (1,)),
}


@pytest.mark.parametrize("late", [False, True], ids=["handed on", "read behind the update"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_old_values_that_are_read_later_are_not_written_over(view: Callable[[Tensor], Tensor], late: bool) -> None:
    """A step that hands on what it read, or a part of it, as a layer does that keeps a view of its weight."""
    state = {"w": torch.ones(2, 3), "lr": torch.full((2,), 0.5)}
    state["seen"] = torch.zeros_like(view(state["w"]))

    def step(state: Tree) -> tuple[Tree, Rows]:
        grad, zero = torch.full_like(state["w"], 2.0), torch.zeros_like(state["lr"])
        part = view(state["w"])
        new, _ = torch.ops.fednorm.sgd(state["w"], [grad], None, state["lr"], zero, zero, [], [])
        return {"w": new, "seen": part + 0 if late else part}, {}

    program = Program(step, state)
    program()
    assert not program._in_place
    assert state["w"].eq(0).all()
    assert state["seen"].eq(1).all()


def test_weights_that_are_others_gradients_are_not_written_over() -> None:
    """As those of a product of two are, once the ones that a gradient begins with are dropped."""
    state = {"w": torch.tensor([[1.0, 2.0, 10.0, 20.0]]), "lr": torch.full((1,), 0.5)}

    def step(state: Tree) -> tuple[Tree, Rows]:
        grad = torch.func.grad(lambda w: torch.mul(*w.split(2, 1)).sum())(state["w"])
        zero = torch.zeros_like(state["lr"])
        new, _ = torch.ops.fednorm.sgd(state["w"], [grad], None, state["lr"], zero, zero, [], [])
        return {"w": new}, {}

    program = Program(step, state)
    program()
    assert not program._in_place
    assert state["w"].tolist() == [[-4.0, -8.0, 9.5, 19.0]]


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedadam"])
def test_a_stop_leaves_what_was_under_way_behind(method: str) -> None:
    """Rows come while later rounds are played; a stop finishes those, and the rest is played to the same bits."""
    changes = {"data": tiny.federation((8, 8, 8)), "rounds": 40, "eval__every": 10, "train__local_steps": 1}
    changes |= {"engine__checkpoint_every": 40}  # one that the clock asks for would leave nothing under way
    whole = on_device(method, **changes)
    store = Store()
    first = Run(tiny.plan(method, engine__name="stacked", **changes), store)
    for told in first.rounds():
        if told["round"] == 3:
            break
    first.stop()
    assert first.round > 3
    assert [row["round"] for row in store.rows()] == list(range(1, first.round + 1))
    assert all("train_loss" in row for row in store.rows())
    second = Run(first.plan, store)
    assert second.round == first.round < 40
    list(second.rounds())
    assert second.round == 40
    assert all(torch.equal(value, second.server.tree[key]) for key, value in whole.server.tree.items())


def test_rounds_of_ever_new_shapes_make_no_programs_for_ever() -> None:
    """One client a round, all of different sizes: the first shape gets a program, rare ones do not."""
    data = tiny.federation((4, 8, 12, 16, 20))
    changes = {"data": data, "rounds": 8, "clients_per_round": 1, "train__local_steps": None, "train__local_epochs": 1}
    reference = tiny.play(tiny.plan("fedavg", engine__name="sequential", **changes))
    stayed = on_device("fedavg", **changes)
    assert 1 <= len(stack_of(stayed)._programs) <= 2
    assert gap(reference, stayed) < 1e-10


def test_a_run_of_varying_shapes_goes_on_to_the_same_bits() -> None:
    """Which rounds are played by a program, and so how they round, hangs on the shapes that came before."""
    changes = {"data": tiny.federation((4, 8, 12)), "rounds": 9, "clients_per_round": 1, "train__lr": 0.02}
    changes |= {"engine__name": "stacked", "train__local_steps": None, "train__local_epochs": 1}
    whole = tiny.play(tiny.plan("fedavg", **changes))
    first = tiny.play(tiny.plan("fedavg", **changes), rounds=5)
    assert len(stack_of(first).shapes()) > 1
    second = tiny.play(first.plan, first.store)
    assert stack_of(second).shapes() == stack_of(whole).shapes()
    assert tiny.fingerprint(second) == tiny.fingerprint(whole)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_negative_variance_is_refused_on_the_device_too(engine: str) -> None:
    """A momentum above 1 lets the running variance of quiet features overshoot below zero."""
    model = tiny.conv_net(nn.BatchNorm2d(4, momentum=5.0))
    run = Run(
        tiny.plan(model=model, engine__name=engine, data=tiny.federation((8, 8, 8)), rounds=3, train__lr=0.001), Store()
    )
    assert isinstance(run.server.held, StackSlot) == (engine == "stacked")
    with pytest.raises(DivergedError, match="negative"):
        list(run.rounds())


def test_scoring_often_leaves_no_program_and_changes_no_bit() -> None:
    changes = {"data": tiny.federation((8, 8, 8)), "rounds": 12, "train__local_steps": 1}
    often, seldom = (on_device("fedbn", eval__every=every, **changes) for every in (1, 12))
    assert sum("eval" in row for row in often.store.rows()) == 12
    assert [len(stack_of(run)._programs) for run in (often, seldom)] == [1, 1]
    assert not stack_of(often).refused
    assert tiny.fingerprint(often)["server"] == tiny.fingerprint(seldom)["server"]
    assert tiny.fingerprint(often)["clients"] == tiny.fingerprint(seldom)["clients"]
