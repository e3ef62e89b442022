"""What is told about a method agrees with published counts and with what a run really sends."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
from fednorm.core.method import Method
from fednorm.core.state import Kind
from fednorm.data.federation import Federation
from fednorm.data.given import from_clients
from fednorm.methods import known_methods, parse
from fednorm.pieces.changes import merge_by
from fednorm.running.plan import make_plan
from fednorm.views.describe_method import ABSENT, describe_method

COUNTER_BYTES = 8


def floats(expression: str, model: str, layers: int) -> int:
    """Floating numbers a client sends in a round; the published counts leave the integer counters out."""
    first = describe_method(expression, model)["stages"][0]
    counters = layers if first["phases"][0]["policy"]["counter"] == "shared" else 0
    return (first["bytes_up"] - counters * COUNTER_BYTES) // 4


# Payloads relative to averaging everything, counted by hand from the architectures: floats, then percentages.
COSTS = {
    "resnet20": (271_098, {"silobn": 99.49, "gn": 99.49, "fedbn": 98.98, "nonorm(bias=false)": 98.98}, 199.5, 1.02, 58),
    "resnet18(stem=imagenet)": (11_191_242, {"silobn": 99.91, "fedbn": 99.83}, 199.9, 0.17, 61),
    "mobilenet_v2": (2_270_794, {"silobn": 98.50, "fedbn": 97.00}, 198.5, 3.00, 157),
}


@pytest.mark.parametrize("model", COSTS)
def test_payloads_are_those_of_the_architectures(model: str) -> None:
    everything, percent, momentum, lockstep, exchanges = COSTS[model]
    layers = (exchanges - 1) // 3

    def share(expression: str) -> float:
        return 100 * floats(expression, model, layers) / everything

    assert floats("fedavg", model, layers) == everything
    assert {expression: round(share(expression), 2) for expression in percent} == percent
    assert share("global-momentum") == pytest.approx(momentum, abs=0.05)
    assert share("fedtan") == pytest.approx(100 + lockstep, abs=0.005)
    assert describe_method("fedtan", model)["stages"][0]["exchanges"] == exchanges
    assert describe_method("fedavg", model)["stages"][0]["exchanges"] == 1


def ten_classes() -> Federation:
    """Two clients whose images have the sizes a model has by default."""
    generator = torch.Generator().manual_seed(0)
    parts = [(torch.randn(4, 3, 28, 28, generator=generator), torch.arange(4)) for _ in range(3)]
    return from_clients(parts[:2], parts[2], num_classes=10)


@pytest.mark.parametrize(
    "expression",
    [
        "fedavg",
        "fedbn",
        "fixbn",
        "fedtan",
        "decoupled",
        "hbn",
        "sbn",
        "posthoc",
        "fedbn+global-momentum",
        "centralized",
    ],
)
def test_costs_are_those_of_a_run(expression: str) -> None:
    made = make_plan(
        tiny.config(expression, model="small_resnet", rounds=2, train__dtype="float32", train__local_steps=1),
        federation=ten_classes(),
    )
    rows = list(tiny.play(made).store.rows())
    told = describe_method(expression, "small_resnet")
    for row in rows:
        costs = [told["stages"][row["stage"]]]
        if row is rows[-1]:
            costs += [told[later] for later in ("finish", "query") if told[later]]
        for name, counted in (("exchanges", 1), ("bytes_up", row["clients"]), ("bytes_down", row["clients"])):
            assert row[name] == counted * sum(cost[name] for cost in costs), (name, row["round"])


def test_policies_are_those_of_the_state_that_surgery_leaves() -> None:
    assert describe_method("gn")["policies"] == {
        "weight": "shared",
        "affine": "shared",
        "statistic": ABSENT,
        "counter": ABSENT,
        "optimizer": "fresh",
        "extra": ABSENT,
    }
    assert describe_method("fixbn")["policies"]["statistic"] == "shared -> frozen"
    assert describe_method("sbn")["policies"]["statistic"] == "dropped"
    assert describe_method("hbn")["local"] == ["extra"]


def test_what_stays_local_is_listed_by_kind() -> None:
    assert describe_method("fedbn+fedprox")["local"] == ["affine", "statistic", "counter"]
    assert describe_method("standalone")["local"] == ["weight", "affine", "statistic", "counter", "optimizer"]


def test_rules_of_the_server_are_told_by_kind() -> None:
    first, second = (stage["phases"][0] for stage in describe_method("fedbs")["stages"])
    assert set(first["weights"].values()) == {"by loss (which=last_epoch)"}
    assert set(second["weights"].values()) == {"uniform"}
    merges = describe_method("fedadam+pooled")["stages"][0]["phases"][0]["merge"]
    adam = "server adam (lr=0.01, beta1=0.9, beta2=0.99, tau=0.001)"
    assert merges == {"weight": adam, "affine": adam, "statistic": "pooled", "counter": "maximum"}
    assert describe_method("fixbn(at=window)")["stages"][0]["phases"][0]["measures"] == {"shift": "statistics shift"}


def test_an_expression_of_several_parts_is_told_as_one() -> None:
    told = describe_method("fedwon(clip=0.2)+fedprox")
    assert (told["name"], [part["name"] for part in told["parts"]]) == (
        "fedwon(clip=0.2)+fedprox",
        ["fedwon", "fedprox"],
    )
    assert told["options"]["fedprox"]["norm"] == {"default": "squared", "takes": "squared or l2"}
    assert told["reconstruction"] is False
    assert describe_method("fbn+fedprox")["reconstruction"] is True


def test_a_method_made_in_python_is_told_too() -> None:
    told = describe_method(Method(name="mine"))
    assert (told["name"], told["parts"], told["stages"][0]["percent_up"]) == ("mine", [], 100.0)


def test_every_registered_method_is_told_in_plain_values() -> None:
    for name, info in known_methods().items():
        told = json.loads(json.dumps(describe_method(name, "small_resnet")))
        assert (told["name"], told["summary"], told["needs"]) == (name, info.summary, sorted(parse(name).needs))
        assert told["options"].keys() == info.options.keys()


def test_everything_a_method_is_made_of_is_told() -> None:
    told = describe_method("fixbn(at=0.25)+ws+clip(norm=2.0)+fedprox(mu=0.5)+tsmobn+pooled")
    first, second = (stage["phases"][0] for stage in told["stages"])
    assert told["surgery"] == ["standardise weights (style=qiao, gain=None, learnable_gain=False, linear_gain=None)"]
    assert told["switch"] == "after (at=0.25)"
    assert (first["losses"], first["grads"]) == (["proximal"], ["clip norm"])
    assert first["numbers"] == second["numbers"] == {"clip.norm": 2.0, "prox.mu": 0.5}
    assert (first["held"], second["held"]) == ([], ["statistic"])
    assert first["merge"]["statistic"] == "pooled"
    assert told["newcomers"] == "track (variance=mean, momentum=0.1)"
    assert set(told["claims"]) == {claim for part in told["parts"] for claim in part["claims"]}
    assert told["pieces"]["after (at=0.25)"].startswith("Stage 0 up to and including round T*")
    assert describe_method("fixup")["stages"][0]["phases"][0]["lr_factors"] == ["fixup rates (scalar_lr=0.1)"]


@pytest.mark.parametrize(("expression", "later"), [("hbn", "query"), ("sbn", "query"), ("posthoc", "finish")])
def test_exchanges_outside_of_rounds_are_told_with_their_cost(expression: str, later: str) -> None:
    told = describe_method(expression)[later]
    assert told["exchanges"] == 1
    assert 0 < told["bytes_up"] < told["bytes_down"]


def test_own_functions_are_told_by_their_name() -> None:
    def halfway(*args: Any) -> Any:
        """Go half of the way."""

    own = replace(merge_by(halfway, Kind.WEIGHT)(Method()), name="mine", switch=lambda *args: ({}, 0))
    told = describe_method(own)
    assert told["stages"][0]["phases"][0]["merge"]["weight"] == "halfway"
    assert told["pieces"]["halfway"] == "Go half of the way."
    assert told["switch"] == "lambda"
