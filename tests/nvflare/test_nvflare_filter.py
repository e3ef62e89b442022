"""What the sharing filter lets through: real messages and NVFlare's own filters, without its processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.filter import FilterContextKey, FilterSource
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.client import FLModel

from fednorm.core.phases import PhaseId
from fednorm.core.report import Report
from fednorm.core.state import Tree, model_state
from fednorm.errors import ConfigError, WireError
from fednorm.halves.messages import Address, Hello, LocalWork, Refusal, Request, Scores, Terms, Update, Welcome
from fednorm.halves.prepared import prepare
from fednorm.methods import parse
from fednorm.models.registry import build
from fednorm.nvflare import parts
from fednorm.nvflare.filter import SharingFilter

pytestmark = pytest.mark.nvflare

MODEL = "fedbs_mnist_cnn"
SIZES = {"num_classes": 10, "in_channels": 1, "image_size": 28}
NET = build(MODEL, **SIZES)
STATE = model_state(NET)
ADDRESS = Address(terms="t", number=3)
REPORT = Report(1, 20, {"all": 0.5, "last_epoch": 0.5, "last_batch": 0.25})
TERMS = Terms(run="r", method="fedbn", weights="size", model="m", schema="s", initial="i", work=LocalWork())
BATCH_NORM = {
    f"{name}.{part}"
    for name, module in NET.named_modules()
    if isinstance(module, torch.nn.BatchNorm2d)
    for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
}
STATISTICS = {key for key in BATCH_NORM if key.rpartition(".")[2].startswith(("running", "num"))}


def filtered(each: SharingFilter, shareable: Shareable, way: str, context: FLContext | None = None) -> Shareable:
    fl_ctx = context or FLContext()
    fl_ctx.set_prop(FLContextKey.FILTER_DIRECTION, way, private=True, sticky=False)
    return each.process(shareable, fl_ctx)


def request(tree: Tree, phase: str = "train.0.0") -> Shareable:
    asked = Request(
        client=1, address=ADDRESS, round=2, phase=PhaseId.parse(phase), numbers={"lr": 0.1}, accepted=0, tree=tree
    )
    return parts.to_shareable(asked, Welcome(client=1, terms=TERMS))


def update(shared: Tree, reported: Tree | None = None) -> Shareable:
    return parts.to_shareable(Update(REPORT, shared, reported or {}, address=ADDRESS))


@pytest.mark.parametrize(("method", "local"), [("fedbn", BATCH_NORM), ("silobn", STATISTICS), ("fedavg", set())])
def test_only_what_is_shared_leaves_and_comes_in(method: str, local: set[str]) -> None:
    assert len(BATCH_NORM) == 10
    context, each = FLContext(), SharingFilter(method, MODEL, SIZES)
    came = parts.message_in(filtered(each, request(STATE), FilterKey.IN, context))
    assert isinstance(came, Request)
    assert came.tree.keys() == STATE.keys() - local
    left = parts.message_in(filtered(each, update(STATE), FilterKey.OUT, context))
    assert isinstance(left, Update)
    assert left.shared.keys() == STATE.keys() - local
    assert all(torch.equal(value, STATE[key]) for key, value in left.shared.items())
    assert left == replace(left, report=REPORT, address=ADDRESS)


def test_two_filters_meet_in_the_context_of_their_task() -> None:
    """FixBN sends statistics down in its second stage, but takes none: what may leave is that of the phase at hand."""
    context = FLContext()
    come, leave = (SharingFilter("fixbn", MODEL, SIZES) for _ in range(2))
    came = parts.message_in(filtered(come, request(STATE, "train.1.0"), FilterKey.IN, context))
    left = parts.message_in(filtered(leave, update(STATE), FilterKey.OUT, context))
    assert isinstance(came, Request)
    assert isinstance(left, Update)
    assert came.tree.keys() == STATE.keys()
    assert left.shared.keys() == STATE.keys() - STATISTICS
    other = FLContext()
    filtered(come, request(STATE), FilterKey.IN, other)
    first = parts.message_in(filtered(leave, update(STATE), FilterKey.OUT, other))
    assert isinstance(first, Update)
    assert first.shared.keys() == STATE.keys()


def test_an_unknown_phase_lets_out_what_every_phase_shares() -> None:
    left = parts.message_in(filtered(SharingFilter("fixbn", MODEL, SIZES), update(STATE), FilterKey.OUT))
    assert isinstance(left, Update)
    assert left.shared.keys() == STATE.keys() - STATISTICS


def test_what_is_not_shared_may_be_refused_instead() -> None:
    each = SharingFilter("fedbn", MODEL, SIZES, unshared="refuse")
    first = sorted(BATCH_NORM)[0]
    text = rf"client 1, exchange 3, entry '{first}': is not shared by 'fedbn' in this phase"
    with pytest.raises(WireError, match=text):
        filtered(each, update(STATE), FilterKey.OUT)
    with pytest.raises(WireError, match=text):
        filtered(each, request(STATE), FilterKey.IN)


def test_entries_may_be_listed_in_place_of_a_model() -> None:
    listed = sorted(STATE.keys() - BATCH_NORM)
    left = parts.message_in(filtered(SharingFilter(entries=listed), update(STATE), FilterKey.OUT))
    assert isinstance(left, Update)
    assert sorted(left.shared) == listed


def test_a_shared_entry_cannot_leave_as_a_reported_one() -> None:
    left = parts.message_in(filtered(SharingFilter("fedbn", MODEL, SIZES), update({}, STATE), FilterKey.OUT))
    assert isinstance(left, Update)
    assert left.reported == {}


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # NVFlare's own, of tensors given to NumPy
def test_a_sites_own_filter_for_privacy_is_no_corruption() -> None:
    shared = {key: value for key, value in STATE.items() if key not in BATCH_NORM}
    context = FLContext()
    changed = PercentilePrivacy(percentile=50, gamma=0.01).process(update(shared), context)
    with pytest.raises(WireError):
        parts.message_in(changed)
    left = parts.message_in(filtered(SharingFilter("fedbn", MODEL, SIZES), changed, FilterKey.OUT, context))
    assert isinstance(left, Update)
    values = torch.cat([value.flatten() for value in left.shared.values()])
    assert values.abs().max() == torch.tensor(0.01)
    assert {key: (value.dtype, value.shape) for key, value in left.shared.items()} == {
        key: (value.dtype, value.shape) for key, value in shared.items()
    }
    assert left.report == REPORT


def test_numbers_of_another_type_are_those_of_the_entry_again() -> None:
    counter = next(key for key in BATCH_NORM if STATE[key].dtype is torch.int64)
    shareable = update({**STATE, counter: torch.tensor(7)})
    dxo = from_shareable(shareable)
    dxo.data = {key: value.double().numpy() * (1 - 1e-9) for key, value in dxo.data.items()}
    left = parts.message_in(filtered(SharingFilter("fedavg", MODEL, SIZES), dxo.update_shareable(shareable), "out"))
    assert isinstance(left, Update)
    assert left.shared[counter].dtype is torch.int64
    assert left.shared[counter] == 7
    assert {key: value.dtype for key, value in left.shared.items()} == {key: STATE[key].dtype for key in STATE}


def as_sent(**fields: Any) -> Shareable:
    """What a script of the Client API sends."""
    return FLModelUtils.to_shareable(FLModel(**fields))


def wrong(kind: str) -> Shareable:
    good = from_shareable(update({key: value for key, value in STATE.items() if key not in BATCH_NORM}))
    return {
        "no header": lambda: as_sent(params=STATE),
        "metrics": lambda: as_sent(metrics={"bn": torch.ones(3)}),
        "a new entry": lambda: as_sent(params={**good.data, "shared/more": torch.ones(2)}, meta=good.meta),
        "an altered header": lambda: as_sent(
            params=good.data, meta={**good.meta, parts.HEADER: {**good.meta[parts.HEADER], "kind": "scores"}}
        ),
        "a request": lambda: request(STATE),
        "a collection": lambda: DXO(DataKind.COLLECTION, data={"a": good}).to_shareable(),
        "no DXO": lambda: Shareable({"weights": STATE}),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("no header", "it is no message of fednorm's; let the script send with `job.send()`"),
        ("metrics", "it is no message of fednorm's; let the script send with `job.send()`"),
        ("a new entry", "entry 'shared/more': was not there when the message was sealed"),
        ("an altered header", "its header was altered on the way (its digest differs)"),
        ("a request", "a request does not go this way"),
        ("a collection", "it is no message of fednorm's; let the script send with `job.send()`"),
        ("no DXO", "the shareable is not a valid DXO"),
    ],
)
def test_whatever_else_a_script_sends_stays_here(kind: str, text: str) -> None:
    with pytest.raises((WireError, ValueError)) as caught:
        filtered(SharingFilter("fedbn", MODEL, SIZES), wrong(kind), FilterKey.OUT)
    assert text in str(caught.value)


def test_beside_a_message_nothing_leaves() -> None:
    shared = {key: value for key, value in STATE.items() if key not in BATCH_NORM}
    dxo = from_shareable(update(shared))
    beside = as_sent(params=dxo.data, meta={**dxo.meta, "bn": STATE}, metrics={"loss": 1.0}, current_round=2)
    beside["bn"] = STATE
    beside.set_header("bn", STATE)
    left = filtered(SharingFilter("fedbn", MODEL, SIZES), beside, FilterKey.OUT)
    assert left.keys() == {"__headers__", "DXO"}
    assert left["__headers__"] == {"__content_type__": "DXO", "start_round": 0, "current_round": 2}
    assert from_shareable(left).meta.keys() == {parts.HEADER, MetaKey.FILTER_HISTORY}
    assert from_shareable(left).get_filter_history() == ["SharingFilter"]


def test_a_failure_leaves_with_its_code_alone() -> None:
    failed = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    failed["DXO"] = {"kind": "WEIGHTS", "data": STATE, "meta": {}}
    left = filtered(SharingFilter("fedbn", MODEL, SIZES), failed, FilterKey.OUT)
    assert left == make_reply(ReturnCode.EXECUTION_EXCEPTION)


def test_hellos_refusals_and_questions_pass_and_scores_where_they_may() -> None:
    each = SharingFilter("fedbn", MODEL, SIZES)
    hello = Hello(name="site-1", num_examples=4, schema="s")
    assert parts.message_in(filtered(each, parts.to_shareable(hello), FilterKey.OUT)) == hello
    assert parts.message_in(filtered(each, parts.to_shareable(Refusal("no")), FilterKey.OUT)) == Refusal("no")
    assert from_shareable(filtered(each, parts.question(), FilterKey.IN)).data == {}
    scores = Scores(client=1, address=ADDRESS, sums={"own_client": {"count": torch.ones((), dtype=torch.float64)}})
    assert isinstance(parts.message_in(filtered(each, parts.to_shareable(scores), FilterKey.OUT)), Scores)
    closed = SharingFilter("fedbn", MODEL, SIZES, scores=False)
    with pytest.raises(WireError, match=r"client 1: results of tests stay here \(scores=False\)"):
        filtered(closed, parts.to_shareable(scores), FilterKey.OUT)


def test_what_came_altered_is_refused() -> None:
    shareable = request(STATE)
    dxo = from_shareable(shareable)
    flat = next(iter(dxo.data))
    dxo.data = {**dxo.data, flat: dxo.data[flat] + 1}
    with pytest.raises(WireError, match="was altered on the way"):
        filtered(SharingFilter("fedavg", MODEL, SIZES), dxo.update_shareable(shareable), FilterKey.IN)


def test_a_phase_that_the_method_does_not_have_is_refused() -> None:
    with pytest.raises(WireError, match=r"'fedbn' has no phase train\.4\.0"):
        filtered(SharingFilter("fedbn", MODEL, SIZES), request(STATE, "train.4.0"), FilterKey.IN)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"unshared": "keep", "model": MODEL},
            "unshared='keep' is not known to the sharing filter; give drop or refuse",
        ),
        ({}, "the sharing filter needs a model, or the entries that may cross; give one of the two"),
        (
            {"model": MODEL, "entries": []},
            "the sharing filter needs a model, or the entries that may cross; give one of the two",
        ),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SharingFilter("fedbn", **arguments)
    assert str(caught.value) == text


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "silobn", "fixbn", "fedbs", "fedwon", "gn+fedavg"])
def test_the_filter_passes_just_what_the_halves_exchange(method: str) -> None:
    """Of every phase, shared and reported entries, by the same schema as server and sites have."""
    prepared = prepare(NET, parse(method))
    for id, phase in prepared.method.all_phases.items():
        schema = prepared.schema(phase)
        shared = {
            key: STATE.get(key, torch.zeros(e.shape, dtype=e.dtype)) for key, (e, p) in schema.items() if p == "shared"
        }
        context, each = FLContext(), SharingFilter(method, MODEL, SIZES, unshared="refuse")
        filtered(each, request({}, str(id)), FilterKey.IN, context)
        left = parts.message_in(filtered(each, update(shared), FilterKey.OUT, context))
        assert isinstance(left, Update)
        assert left.shared.keys() == shared.keys()


def test_code_that_a_job_names_must_be_permitted_and_a_sites_own_need_not() -> None:
    arguments = {"method": "fedbn", "model": "simulated:Net", "model_args": {"num_classes": 2}}
    of_job, of_site = SharingFilter(**arguments), SharingFilter(**arguments)
    of_job.set_prop(FilterContextKey.SOURCE, FilterSource.JOB)
    of_site.set_prop(FilterContextKey.SOURCE, FilterSource.SITE)
    weights = {"layers.0.weight": torch.zeros(4, 6)}
    with pytest.raises(
        ConfigError, match=r"the job names code, 'simulated\.Net', which this site does not permit; add"
    ):
        filtered(of_job, update(weights), FilterKey.OUT)
    left = parts.message_in(filtered(of_site, update(weights), FilterKey.OUT))
    assert isinstance(left, Update)
    assert left.shared.keys() == weights.keys()
