"""A client that sends what cannot be used is refused by name, and the model is that of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import chaos
import pytest
import torch
from chaos import BAD, ENGINES, LEFT_OUT, reporting, sending

import tiny
from fednorm.core.state import digest
from fednorm.errors import DivergedError
from fednorm.halves.training import Outcome
from fednorm.running.run import Run

LOSSES = {"all": 1.0, "last_epoch": 1.0, "last_batch": 1.0}
Fault = tuple[int, Callable[[Outcome], Outcome], str]


def with_value(key: str, value: float) -> Callable[[Outcome], Outcome]:
    """One number of an entry is this one."""

    def change(outcome: Outcome) -> Outcome:
        tensor = outcome.update.shared[key].clone()
        tensor.view(-1)[-1] = value
        return sending(outcome, **{f"_{key}": tensor})

    return change


def with_entry(key: str, change: Callable[[torch.Tensor], object]) -> Callable[[Outcome], Outcome]:
    return lambda outcome: sending(outcome, **{f"_{key}": change(outcome.update.shared[key])})


def scaled(outcome: Outcome) -> Outcome:
    """Its update a million times as long."""
    start = tiny.conv_net().state_dict()
    far = {
        f"_{key}": start[key] + 1e6 * (value - start[key])
        for key, value in outcome.update.shared.items()
        if value.requires_grad or key.endswith(("weight", "bias"))
    }
    return sending(outcome, **far)


def losing(name: str, value: object) -> Callable[[Outcome], Outcome]:
    return lambda outcome: reporting(outcome, losses={**LOSSES, name: value})


COUNT = "its number of examples is {}, expected a whole number above 0"
TOO_FAR = "times as far as the median client; norm_factor=1000 allows less"
NO_VALUES = "has no plain values (it is sparse or on the meta device); send a dense tensor"
FAULTS: dict[str, Fault] = {
    "nan weight": (6, with_value("0.weight", torch.nan), "'0.weight' is not finite"),
    "inf weight": (6, with_value("5.weight", torch.inf), "'5.weight' is not finite"),
    "nan affine": (6, with_value("1.bias", torch.nan), "'1.bias' is not finite"),
    "inf affine": (6, with_value("1.weight", -torch.inf), "'1.weight' is not finite"),
    "nan mean": (6, with_value("1.running_mean", torch.nan), "'1.running_mean' is not finite"),
    "inf var": (6, with_value("1.running_var", torch.inf), "'1.running_var' is not finite"),
    "nan loss": (6, losing("last_epoch", float("nan")), "its loss 'last_epoch' is nan"),
    "no loss": (6, lambda o: reporting(o, losses={}), "its loss 'all' is missing"),
    "loss in words": (6, losing("all", "low"), "its loss 'all' is 'low', expected a number"),
    "loss is true": (6, losing("all", True), "its loss 'all' is True, expected a number"),
    "endless loss": (6, losing("all", 10**400), f"its loss 'all' is {'1' + '0' * 76}..., expected a number"),
    "wrong shape": (7, with_entry("0.weight", lambda t: t[:1]),
                    "'0.weight' has shape (1, 1, 3, 3), expected (4, 1, 3, 3)"),
    "shape of one": (7, with_entry("1.running_mean", lambda t: t[:1]),
                     "'1.running_mean' has shape (1,), expected (4,)"),
    "wrong type": (7, with_entry("5.bias", lambda t: t.float()),
                   "'5.bias' has type torch.float32, expected torch.float64"),
    "counter in floats": (7, with_entry("1.num_batches_tracked", lambda t: t.double()),
                          "'1.num_batches_tracked' has type torch.float64, expected torch.int64"),
    "missing": (7, with_entry("1.weight", lambda t: LEFT_OUT), "'1.weight' is missing"),
    "extra": (7, lambda o: sending(o, _extra=torch.ones(1)), "'extra' was not expected"),
    "none": (7, with_entry("0.bias", lambda t: None), "'0.bias' is None, expected a tensor"),
    "sparse": (7, with_entry("5.weight", lambda t: t.to_sparse()), f"'5.weight' {NO_VALUES}"),
    "meta": (7, with_entry("5.weight", lambda t: t.to("meta")), f"'5.weight' {NO_VALUES}"),
    "gradient": (7, with_entry("5.weight", lambda t: t.clone().requires_grad_()),
                 "'5.weight' carries a gradient; send it detached"),
    "negative var": (8, with_value("1.running_var", -1e-9), "'1.running_var' is negative"),
    "counter -1": (8, with_value("1.num_batches_tracked", -1), "'1.num_batches_tracked' is negative"),
    "counter 2^62": (8, with_entry("1.num_batches_tracked", lambda t: torch.full_like(t, 1 << 62)),
                     "more than it started with; its steps explain 131072 at most"),
    "0 examples": (9, lambda o: reporting(o, num_examples=0), COUNT.format("0")),
    "-1 examples": (9, lambda o: reporting(o, num_examples=-1), COUNT.format("-1")),
    "nan examples": (9, lambda o: reporting(o, num_examples=float("nan")), COUNT.format("nan")),
    "true examples": (9, lambda o: reporting(o, num_examples=True), COUNT.format("True")),
    "examples in words": (9, lambda o: reporting(o, num_examples="8"), COUNT.format("'8'")),
    "2^62 examples": (9, lambda o: reporting(o, num_examples=1 << 62),
                      "it weighs 4611686018427387904 examples, but said it trains on 8"),
    "10^30 examples": (9, lambda o: reporting(o, num_examples=10**30),
                       f"it weighs 1{'0' * 30} examples, but said it trains on 8"),
    "10^400 examples": (9, lambda o: reporting(o, num_examples=10**400),
                        f"it weighs 1{'0' * 76}... examples, but said it trains on 8"),
    "10^5000 examples": (9, lambda o: reporting(o, num_examples=10**5000),
                         "it weighs a value of type int that cannot be shown examples, but said it trains on 8"),
    "1e38 in a weight": (11, with_value("0.weight", 1e38), TOO_FAR),
    "1e300 in a mean": (11, with_value("1.running_mean", 1e300), TOO_FAR),
    "a million times": (11, scaled, TOO_FAR),
}  # fmt: skip


@pytest.fixture(scope="module", params=ENGINES)
def spoiled(request: pytest.FixtureRequest) -> tuple[Run, Run]:
    """A run in which client 3 has another fault in every round, and one without that client."""
    faults = list(FAULTS.values())

    def spoil(round: int, outcome: Outcome) -> list[Outcome]:
        return [faults[round - 1][1](outcome) if outcome.update.client == BAD else outcome]

    plan = chaos.plan(request.param, rounds=len(faults), engine__quorum=0.9)
    run = chaos.started(plan, spoil)
    list(run.rounds())
    bits = "sequential" if request.param == "workers" else request.param
    return run, chaos.without(chaos.plan(bits, rounds=len(faults)), BAD)


def refusals(run: Run, row: int) -> dict[str, tuple[dict[int, str], str]]:
    """What was said of each fault of a row of the matrix, and what must have been."""
    each = zip(FAULTS.items(), chaos.rows(run), strict=True)
    return {name: (told["refused"], text) for (name, (own, _, text)), told in each if own == row}


def assert_refused(run: Run, row: int) -> None:
    for name, (told, text) in refusals(run, row).items():
        assert list(told) == [BAD], name
        assert told[BAD].endswith(text), name


@pytest.mark.fault(row=6)
def test_what_is_not_finite_is_refused_wherever_it_is(spoiled: tuple[Run, Run]) -> None:
    assert_refused(spoiled[0], 6)
    assert all(bool(value.isfinite().all()) for value in spoiled[0].server.tree.values())


@pytest.mark.fault(row=7)
def test_entries_of_another_form_are_refused(spoiled: tuple[Run, Run]) -> None:
    assert_refused(spoiled[0], 7)


@pytest.mark.fault(row=8)
def test_negative_variances_and_impossible_counters_are_refused(spoiled: tuple[Run, Run]) -> None:
    assert_refused(spoiled[0], 8)


@pytest.mark.fault(row=9)
def test_only_the_number_of_examples_that_a_client_has_is_taken(spoiled: tuple[Run, Run]) -> None:
    assert_refused(spoiled[0], 9)


@pytest.mark.fault(row=11)
def test_an_update_out_of_all_proportion_is_refused(spoiled: tuple[Run, Run]) -> None:
    assert_refused(spoiled[0], 11)
    assert refusals(spoiled[0], 11)["1e38 in a weight"][0][BAD].startswith("'0.weight' moved ")


@pytest.mark.fault(row=6)
@pytest.mark.fault(row=9)
def test_the_model_is_that_of_a_run_without_the_client(spoiled: tuple[Run, Run]) -> None:
    run, reference = spoiled
    assert chaos.same(run, reference)
    assert run.store.get(BAD).steps == 0
    assert run.store.get(0).steps == 2 * len(FAULTS)


@pytest.mark.fault(row=8)
@pytest.mark.parametrize("method", ["fbn", "hbn"])
def test_negative_moments_of_batches_are_refused(method: str) -> None:
    plan = chaos.plan("sequential", method, rounds=1)
    run = chaos.started(plan, chaos.only(BAD, lambda outcome: [with_value("1.batch_var", -1.0)(outcome)]))
    (row,) = run.rounds()
    assert row.get("refused") == {BAD: "'1.batch_var' is negative"}


@pytest.mark.fault(row=8)
@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_what_a_client_would_keep_is_checked_too(engine: str) -> None:
    def change(outcome: Outcome) -> list[Outcome]:
        return [replace(outcome, kept={**outcome.kept, "1.running_var": -torch.ones(4).double()})]

    run = chaos.started(chaos.plan(engine, "silobn"), chaos.only(BAD, change))
    assert [row.get("refused") for row in run.rounds()] == [{BAD: "'1.running_var' (local) is negative"}] * 3
    assert run.store.get(BAD).tree == {}
    assert chaos.same(run, chaos.without(chaos.plan(engine, "silobn"), BAD))


@pytest.mark.fault(row=6)
def test_losses_that_are_no_numbers_do_not_reach_the_weights() -> None:
    """FedBS weighs clients by their losses."""
    for losses in ({}, {**LOSSES, "all": float("nan")}, {**LOSSES, "last_epoch": "low"}):
        spoil = chaos.only(BAD, lambda outcome, own=losses: [reporting(outcome, losses=own)])
        run = chaos.started(chaos.plan("sequential", "fedbs", rounds=2), spoil)
        assert [list(row.get("refused", {})) for row in run.rounds()] == [[BAD], [BAD]]
        assert chaos.same(run, chaos.without(chaos.plan("sequential", "fedbs", rounds=2), BAD))


@pytest.mark.fault(row=11)
def test_the_norm_bound_can_be_switched_off_and_set() -> None:
    spoil = chaos.only(BAD, lambda outcome: [with_value("0.weight", 1e6)(outcome)])
    (row,) = chaos.started(chaos.plan("sequential", rounds=1, engine__norm_factor=0.0), spoil).rounds()
    assert "refused" not in row
    mild = chaos.only(BAD, lambda outcome: [with_value("0.weight", 30.0)(outcome)])
    (row,) = chaos.started(chaos.plan("sequential", rounds=1), mild).rounds()
    assert "refused" not in row
    (row,) = chaos.started(chaos.plan("sequential", rounds=1, engine__norm_factor=10.0), mild).rounds()
    assert list(row.get("refused", {})) == [BAD]


@pytest.mark.fault(row=6)
@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_without_a_quorum_the_first_refusal_ends_the_run(engine: str) -> None:
    plan = chaos.plan(engine, engine__quorum=None)
    run = chaos.started(plan, chaos.only(BAD, lambda outcome: [with_value("0.bias", torch.nan)(outcome)]))
    before = digest(run.server.tree)
    with pytest.raises(DivergedError) as refusal:
        list(run.rounds())
    assert str(refusal.value) == (
        "diverged in round 1, client 3: '0.bias' is not finite; "
        "lower train.lr, or set engine.quorum to go on without the client"
    )
    assert digest(run.server.tree) == before
    assert chaos.rows(run) == []


@pytest.mark.fault(row=10)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_second_answer_and_that_of_a_stranger_change_nothing(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    def spoil(round: int, outcome: Outcome) -> list[Outcome]:
        client = outcome.update.client
        if client == BAD:
            return [outcome, with_value("0.weight", 5.0)(outcome)]
        strangers = [reporting(outcome, client=other) for other in (99, True, "0")] if client == 0 else []
        return [*strangers, outcome]

    changes = {"rounds": 1 if engine == "workers" else 3, "engine__quorum": None}
    run = chaos.started(chaos.plan(engine, **changes), spoil)
    list(run.rounds())
    assert chaos.same(run, tiny.play(chaos.plan("sequential" if engine == "workers" else engine, **changes)))
    assert {each for each in caplog.messages if "client" in each} == {
        "client 3 answered twice; the second answer was ignored",
        "client 99 was not asked; its answer was ignored",
        "client True was not asked; its answer was ignored",
        "client '0' was not asked; its answer was ignored",
    }
    assert all("refused" not in row for row in chaos.rows(run))


@pytest.fixture
def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds stay on the device, here the CPU."""
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})


def outlier(times: float) -> Any:
    """Ten clients, of which one's inputs are this many times as large."""
    data = chaos.federation()
    x = data.x.clone()
    x[data.clients[BAD]] *= times
    return replace(data, x=x)


@pytest.mark.fault(row=14)
@pytest.mark.usefixtures("stay")
@pytest.mark.parametrize("times", [1e4, 1e200])
def test_rounds_on_the_device_have_the_same_bound(times: float) -> None:
    """Without a norm in between, gradients grow with the inputs: too far by the norm bound, or beyond all numbers."""
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, tiny.NUM_CLASSES)).double()
    texts = []
    for engine in ("stacked", "sequential"):
        plan = tiny.plan("fedavg", model=net, data=outlier(times), **tiny.engine(engine), eval__every=100)
        with pytest.raises(DivergedError) as refusal:
            tiny.play(plan)
        texts.append(str(refusal.value))
    end = "; lower train.lr, or set engine.quorum to go on without the client"
    assert all(text.startswith("diverged in round 1, client 3: ") and text.endswith(end) for text in texts)
    if times == 1e4:
        assert [text.removesuffix(end).endswith(TOO_FAR) for text in texts] == [True, True]
        assert ["its weights moved" in texts[0], "'1.weight' moved" in texts[1]] == [True, True]
