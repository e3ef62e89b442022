"""Parts from different papers combine, in any order; what cannot combine says why."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

import tiny
from checks import keys_of
from fednorm.core.method import Method
from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.state import Kind, Policy, digest
from fednorm.errors import ConfigError
from fednorm.methods import known_methods, parse
from fednorm.pieces.grads import AdaptiveClip
from fednorm.pieces.losses import Proximal
from fednorm.running.run import Run


def refusal_of(expression: str) -> str | None:
    try:
        parse(expression)
    except ConfigError as refusal:
        return str(refusal)
    return None


@pytest.mark.parametrize("first", list(known_methods()))
def test_two_parts_combine_in_both_orders_or_in_none(first: str) -> None:
    for second in known_methods().keys() - {first}:
        one, other = refusal_of(f"{first}+{second}"), refusal_of(f"{second}+{first}")
        assert (one is None) == (other is None), second
        if one:
            assert f"'{first}' and '{second}' cannot be combined: both decide " in one or "cannot work: " in one
            assert "\n" not in one


BOTH = [
    "fedwon+fedprox",
    "fixbn+fedprox",
    "fixbn+global-momentum",
    "fixbn+local-momentum",
    "fixbn+fedadam",
    "fixbn+fedtan",
    "fixbn+pooled",
    "fixbn+brn",
    "fedbs+gn",
    "fedbs+fedbn",
    "fedbs+fedadam",
    "fedbn+fedadam",
    "silobn+fedprox",
    "gn+ws",
    "gn+fn",
    "gn+local-momentum",
    "nonorm+agc",
    "sbn+clip",
    "decoupled+global-momentum",
    "decoupled+pooled",
    "hbn+global-momentum",
    "hbn+fedprox",
    "fbn+fedavgm",
    "brn+feddna",
    "fednn+posthoc",
    "fedtan+local-momentum",
    "centralized+decoupled",
]
SMALL: dict[str, Any] = {"rounds": 2, "data": tiny.federation((8, 8)), "train__local_steps": 2, "train__lr": 0.05}


@cache
def state(expression: str) -> dict[str, Any]:
    """All of a run but the method's name, which tells the order of the parts."""
    return tiny.fingerprint(tiny.play(tiny.plan(expression, **SMALL)))


@pytest.mark.parametrize("expression", BOTH)
def test_both_parts_act_and_their_order_does_not_matter(expression: str) -> None:
    first, second = expression.split("+")
    together = state(expression)
    assert together == state(f"{second}+{first}")
    for alone in (first, second):
        single = state(alone)
        assert (single["server"], single["clients"]) != (together["server"], together["clients"])


def test_three_parts_in_any_order() -> None:
    orders = ["+".join(parts) for parts in itertools.permutations(["fixbn", "fedprox", "fedadam"])]
    assert len({digest(tiny.play(tiny.plan(order, **SMALL)).server.tree) for order in orders}) == 1


def policies(method: Method, stage: int = 0) -> dict[Kind, Policy]:
    return dict(method.stages[stage][-1].policy)


def test_fedwon_with_fedprox_clips_the_gradient_that_holds_the_penalty() -> None:
    (rule,) = [phase.rule for phase in parse("fedwon(clip=0.2)+fedprox(mu=0.5)").phases]
    assert (rule.losses, rule.grads) == ((Proximal(),), (AdaptiveClip(),))
    assert rule.numbers == {"agc.clip": 0.2, "prox.mu": 0.5}


def test_fixbn_with_global_momentum_shares_buffers_in_both_stages() -> None:
    method = parse("fixbn+global-momentum")
    assert [policies(method, stage)[Kind.OPTIMIZER] for stage in (0, 1)] == [Policy.SHARED] * 2
    assert [policies(method, stage)[Kind.STATISTIC] for stage in (0, 1)] == [Policy.SHARED, Policy.FROZEN]


def test_frozen_affine_has_no_momentum_to_send() -> None:
    made = tiny.plan("fixbn(affine=true)+global-momentum", rounds=4)
    first, second = (made.phase(PhaseId(Purpose.TRAIN, stage)).schema for stage in (0, 1))
    affine = {f"momentum:{key}" for key in keys_of(made.prepared.entries, Kind.AFFINE)}
    assert affine <= first.keys()
    assert not affine & second.keys()
    rows = list(tiny.play(made).store.rows())
    assert rows[3]["bytes_up"] < rows[0]["bytes_up"]


def test_fedbn_with_fedadam_remembers_nothing_about_what_stays_local() -> None:
    made = tiny.plan("fedbn+fedadam", rounds=2)
    run = tiny.play(made)
    layers = {key.split("|")[1] for key in run.server.held.memory}
    batch_norms = {entry.layer for entry in made.prepared.entries if entry.batch_norm}
    assert layers
    assert not layers & batch_norms


def test_an_exchange_that_only_looks_does_not_pay_for_momentum() -> None:
    def bytes_up(method: str) -> int:
        return next(iter(Run(tiny.plan(method, **SMALL), tiny.Store()).rounds()))["bytes_up"]

    trained = [e for e in tiny.plan("decoupled", **SMALL).prepared.entries if e.trainable]
    extra = bytes_up("decoupled+global-momentum") - bytes_up("decoupled")
    assert extra == 2 * sum(entry.bytes for entry in trained)


def test_fedbs_with_gn_weighs_by_loss_without_batch_statistics() -> None:
    made = tiny.plan("fedbs+gn", rounds=1)
    assert not any(entry.batch_norm for entry in made.prepared.entries)
    assert made.method.stages[0][0].weigh[Kind.WEIGHT] is not made.method.stages[1][0].weigh[Kind.WEIGHT]


def test_gn_with_ws_is_both_surgeries_in_either_order() -> None:
    x = tiny.examples(4, 0.5, seed=3)[0]
    with torch.no_grad():
        both, reverse, gn, ws = (tiny.plan(m).prepared.model(x) for m in ("gn+ws", "ws+gn", "gn", "ws"))
    assert torch.equal(both, reverse)
    assert not torch.allclose(both, gn)
    assert not torch.allclose(both, ws)


COUNTER = "both decide the policy of counter; keep one"
NORMS = "both decide the choice of the norm layers; keep one"
NO_SERVER = "cannot work: centralized training has no server that merges or sends a model; leave out centralized or"
NOT_SENT = "which another part does not send; leave one of the two parts out"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("fixbn+fedbn", f"'fixbn' and 'fedbn' cannot be combined: {COUNTER}"),
        ("fixbn+silobn", f"'fixbn' and 'silobn' cannot be combined: {COUNTER}"),
        ("gn+ln", f"'gn' and 'ln' cannot be combined: {NORMS}"),
        ("fedtan+gn", f"'fedtan' and 'gn' cannot be combined: {NORMS}"),
        ("fedwon+gn", f"'fedwon' and 'gn' cannot be combined: {NORMS}"),
        (
            "fedbs+fedprox",
            "'fedbs' and 'fedprox' cannot be combined: both decide the loss of the proximal term; keep one",
        ),
        ("fedbs+fixbn", "'fedbs' and 'fixbn' cannot be combined: both decide the switch; keep one"),
        ("fedbs+feddna", "'fedbs' and 'feddna' cannot be combined: both decide the weights; keep one"),
        ("fedbs+fedtan", "'fedbs' and 'fedtan' cannot be combined: both decide the weights; keep one"),
        (
            "local-momentum+global-momentum",
            "'local-momentum' and 'global-momentum' cannot be combined: both decide the policy of optimizer; keep one",
        ),
        (
            "agc+agc(clip=0.5)",
            "'agc' and 'agc(clip=0.5)' cannot be combined: both decide the choice of gradient clipping; keep one",
        ),
        (
            "fedwon+agc",
            "'fedwon' and 'agc' cannot be combined: both decide the choice of gradient clipping; keep one",
        ),
        (
            "fixup+fn",
            "'fixup' and 'fn' cannot be combined: both decide the choice of the last layer's input; keep one",
        ),
        ("fn+fedfn", "'fn' and 'fedfn' cannot be combined: both decide the choice of the last layer's input; keep one"),
        ("pooled+feddna", "'pooled' and 'feddna' cannot be combined: both decide the merge of statistics; keep one"),
        (
            "fedavgm+fedadam",
            "'fedavgm' and 'fedadam' cannot be combined: both decide the merge of weights and affine; keep one",
        ),
        ("adabn+tsmobn", "'adabn' and 'tsmobn' cannot be combined: both decide the statistics of newcomers; keep one"),
        (
            "centralized+fedbn",
            "'centralized+fedbn' cannot work: centralized training has no clients that could keep state or step "
            "together; leave out centralized or the other part",
        ),
        (
            "centralized+fedtan",
            "'centralized+fedtan' cannot work: centralized training has no clients that could keep state or step "
            "together; leave out centralized or the other part",
        ),
        ("centralized+fedprox", f"'centralized+fedprox' {NO_SERVER} 'fedprox'"),
        ("centralized+fedadam", f"'centralized+fedadam' {NO_SERVER} 'fedadam'"),
        ("pooled+centralized", f"'pooled+centralized' {NO_SERVER} 'pooled'"),
        (
            "fedbn+posthoc",
            "'fedbn+posthoc' cannot work: its last exchange would average the counter that clients keep local; "
            "leave one of the two parts out",
        ),
        (
            "fedbn+pooled",
            "'fedbn+pooled' cannot work: 'pooled' decides how the statistic of clients is merged, " + NOT_SENT,
        ),
        (
            "sbn+pooled",
            "'sbn+pooled' cannot work: 'pooled' decides how the statistic of clients is merged, " + NOT_SENT,
        ),
        (
            "standalone+fedavgm",
            "'standalone+fedavgm' cannot work: 'fedavgm' decides how the weight of clients is merged, " + NOT_SENT,
        ),
        (
            "standalone+fedbs",
            "'standalone+fedbs' cannot work: 'fedbs' decides how the weight of clients is merged, " + NOT_SENT,
        ),
        (
            "fedtan+silobn",
            "'fedtan+silobn' cannot work: clients in lock-step exchange the statistics of their batches, which they "
            "are to keep local; leave one of the two parts out",
        ),
        (
            "decoupled+fedtan",
            "'decoupled+fedtan' cannot work: clients in lock-step exchange gradients of statistics, and in an exchange "
            "of statistics alone there are none; leave one of the two parts out",
        ),
    ],
)
def test_what_cannot_combine_says_why(expression: str, message: str) -> None:
    assert refusal_of(expression) == message


@pytest.mark.parametrize(
    ("expression", "part", "rest"),
    [
        ("gn+fedbn", "fedbn", "gn"),
        ("fedwon+posthoc", "posthoc", "fedwon"),
        ("ln+fixbn", "fixbn", "ln"),
        ("fixup+silobn+fedprox", "silobn", "fixup+fedprox"),
        ("in+adabn", "adabn", "in"),
    ],
)
def test_a_part_that_another_leaves_nothing_to_act_on_is_refused(expression: str, part: str, rest: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        tiny.plan(expression)
    assert str(refusal.value) == (
        f"'{part}' finds no BatchNorm layer to act on in the given ResNet and would equal '{rest}'; "
        f"use '{rest}', another model, or --allow-noop to run it all the same"
    )


def test_a_cohort_in_lock_step_goes_apart_once_its_statistics_are_frozen() -> None:
    """Batch statistics that all agree on are of no use then; with the affine frozen alone they still are."""

    def lockstep(expression: str) -> list[list[int]]:
        return [[phase.lockstep for phase in stage] for stage in parse(expression).stages]

    assert lockstep("fedtan+fixbn") == lockstep("fedtan+fixbn(affine=true)") == [[1], [0]]
    assert lockstep("fedtan+fixbn(statistics=false,affine=true)") == [[1], [1]]
