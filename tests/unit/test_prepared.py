"""A method meets a model: surgery on a copy, and refusal where nothing would happen."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import tiny
from fednorm.core.method import Rule
from fednorm.core.state import Kind, Policy, digest
from fednorm.core.surgery import SurgeryReport
from fednorm.errors import ConfigError
from fednorm.halves.messages import LocalWork
from fednorm.halves.prepared import facts_of, lr_factors, prepare, surgery_done
from fednorm.halves.terms import agree, terms_of
from fednorm.layers.keyed import KeyedDropout
from fednorm.methods import parse
from fednorm.pieces.changes import operate


def refusal_of(model: nn.Module, method: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        prepare(model, parse(method), name="the given Net")
    return str(refusal.value)


PLAIN = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))


@pytest.mark.parametrize(("method", "equal"), [("fedbn", "fedavg"), ("silobn", "fedavg"), ("fedprox+fixbn", "fedprox")])
def test_a_method_with_nothing_to_act_on_is_refused(method: str, equal: str) -> None:
    part = method.split("+")[-1]
    assert refusal_of(PLAIN, method) == (
        f"'{part}' finds no BatchNorm layer to act on in the given Net and would equal '{equal}'; "
        f"use '{equal}', another model, or --allow-noop to run it all the same"
    )
    assert prepare(PLAIN, parse(method), allow_noop=True).notes == ()


def test_both_halves_refuse_it_too_unless_told_otherwise() -> None:
    with pytest.raises(ConfigError, match=r"^'fedbn' finds no BatchNorm layer to act on in the model"):
        agree(PLAIN, "fedbn", LocalWork())
    assert agree(PLAIN, "fedbn", LocalWork(), allow_noop=True).method.name == "fedbn"


@pytest.mark.parametrize(
    ("method", "need"),
    [("fedtan", "all clients of a round in lock-step"), ("centralized", "the data of all clients in one place")],
)
def test_terms_of_what_only_the_simulator_has_are_refused(method: str, need: str) -> None:
    agreed = agree(tiny.conv_net(), method, LocalWork(dtype="float64"))
    with pytest.raises(ConfigError) as refusal:
        terms_of(agreed, run="r")
    assert str(refusal.value) == (
        f"'{method}' needs {need}, which only the simulator has; use fednorm.run, or another method here"
    )
    assert terms_of(agree(tiny.conv_net(), "fedbn", LocalWork()), run="r").model == "Sequential"


def test_a_swap_with_nothing_to_swap_is_refused() -> None:
    assert refusal_of(PLAIN, "gn").startswith("'gn' finds no BatchNorm layer to ")
    assert refusal_of(tiny.conv_net(), "gn+fedbn").startswith("'fedbn' finds no BatchNorm layer to act on")


def test_a_model_that_cannot_learn_is_refused() -> None:
    assert refusal_of(nn.ReLU(), "fedavg") == "the given Net has no trainable parameters; nothing can be learned"


def test_the_users_model_is_left_alone() -> None:
    model = tiny.conv_net()
    before, modes = digest(model.state_dict()), [module.training for module in model.modules()]
    prepared = prepare(model, parse("gn"))
    assert isinstance(model[1], nn.BatchNorm2d)
    assert isinstance(prepared.model[1], nn.GroupNorm)  # type: ignore[index]
    assert digest(model.state_dict()) == before
    assert [module.training for module in model.modules()] == modes
    assert (surgery_done(model), surgery_done(prepared.model)) == (None, ("gn",))


def test_the_initial_state_is_the_models_after_surgery() -> None:
    prepared = prepare(tiny.conv_net(), parse("gn"))
    assert set(prepared.initial) == set(prepared.model.state_dict())
    assert digest(prepared.initial) == digest(prepared.model.state_dict())
    assert prepared.notes == ("1 BatchNorm layer became GroupNorm(2): affine kept, running statistics dropped",)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.lock = threading.Lock()
    assert refusal_of(model, "fedavg") == (
        "the given Net cannot be copied, and runs work on a copy (cannot pickle '_thread.lock' object); "
        "let it hold layers, parameters and plain values only"
    )


def test_dropout_is_keyed_for_every_method() -> None:
    prepared = prepare(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), parse("fedavg"))
    assert isinstance(prepared.model[1], KeyedDropout)  # type: ignore[index]
    assert prepared.keyed == ("1.key",)
    assert "1.key" not in prepared.initial


def test_the_head_is_the_last_linear_layer_or_else_the_last_convolution() -> None:
    assert facts_of(tiny.conv_net()).head == {"5.weight", "5.bias"}
    dense = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 3, 1, bias=False), nn.ReLU())
    assert facts_of(dense).head == {"2.weight"}
    assert facts_of(nn.LayerNorm(2)).head == frozenset()


def test_an_affine_without_batch_statistics_goes_with_the_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))
    prepared = prepare(model, parse("fedbn"))
    policies = {key: policy for key, (_, policy) in prepared.schema(prepared.method.phases[0]).items()}
    assert policies["1.weight"] is Policy.LOCAL
    assert policies["2.weight"] is policies["0.weight"] is Policy.SHARED


def test_only_the_batch_norms_affine_can_be_held() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))
    method = parse("fedavg").map_rules(lambda rule: Rule(hold=frozenset({Kind.AFFINE})))
    prepared = prepare(model, method)
    assert [e.key for e in prepared.trained(method.phases[0].rule)] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_factors_on_one_key_multiply() -> None:
    rule = Rule(lr_factors=(lambda model: {"a": 0.5, "b": 2.0}, lambda model: {"a": 0.1}))
    method = parse("fedavg").map_rules(lambda _: rule)
    assert lr_factors(prepare(PLAIN, method), method.phases[0].rule) == {"a": 0.05, "b": 2.0}


def test_surgery_is_done_in_the_order_of_the_parts() -> None:
    seen: list[str] = []

    def mark(name: str):
        def surgery(model: nn.Module):
            seen.append(name)
            return model, SurgeryReport(1, (f"{name} was done",))

        return surgery

    method = operate(mark("b"))(operate(mark("a"))(parse("fedavg")))
    assert prepare(PLAIN, method).notes == ("a was done", "b was done")
    assert seen == ["a", "b"]


def test_a_double_model_stays_double() -> None:
    prepared = prepare(tiny.residual_net(), parse("gn"))
    assert {entry.dtype for entry in prepared.entries} == {torch.float64}
