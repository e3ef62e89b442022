"""Server and sites that share nothing but bytes equal the simulator to the bit, whoever dies in between."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import over_a_wire
import tiny
from fednorm.core.method import Part
from fednorm.core.phases import Purpose
from fednorm.core.registry import register
from fednorm.core.state import Policy, digest
from fednorm.errors import ConfigError, DivergedError, QuorumError, StateError, WireError
from fednorm.halves import wire
from fednorm.halves.messages import Address, Request, Update
from fednorm.halves.mine import Mine
from fednorm.halves.reception import Reception
from fednorm.methods import known_methods, parse
from fednorm.pieces.changes import keep
from fednorm.running.plan import Plan
from over_a_wire import Killed, fingerprint_of, play

DATA = tiny.federation((8, 12, 9, 10))
ROUNDS = 4
VARIANTS = (
    "fixbn(at=window,window=2,tau=100.0)",
    "fedbs(eps=100.0,rounds=2)",
    "fedadam+fixbn",
    "fedavgm+fedbs(eps=100.0,rounds=2)",
    "fixbn+local-momentum",
    "fedavg+global-momentum",
    "fedbn+local-momentum",
    "fedadam+decoupled",
    "fedprox+silobn",
)
ELSEWHERE = [name for name in known_methods() if not parse(name).needs & {"union", "lockstep"}]
ONE_PLACE = [name for name in known_methods() if name not in ELSEWHERE]


def made(method: str, per_round: int = 4, **changes: Any) -> Plan:
    settings = {"data": DATA, "rounds": ROUNDS, "clients_per_round": per_round, **changes}
    return tiny.plan(method, **settings)


@cache
def in_simulator(method: str, per_round: int) -> dict[str, Any]:
    return fingerprint_of(tiny.play(made(method, per_round)))


@pytest.mark.parametrize("per_round", [4, 2])
@pytest.mark.parametrize("method", [*ELSEWHERE, *VARIANTS])
def test_over_a_wire_a_method_equals_the_simulator(method: str, per_round: int, tmp_path: Path) -> None:
    played = play(made(method, per_round), tiny.residual_net(), tmp_path)
    assert played.fingerprint == in_simulator(method, per_round)


@pytest.mark.parametrize("method", [m for m in VARIANTS if "fixbn" in m or "fedbs" in m])
def test_stages_change_over_a_wire(method: str, tmp_path: Path) -> None:
    played = play(made(method), tiny.residual_net(), tmp_path)
    assert set(played.fingerprint["stages"]) == {0, 1}


@pytest.mark.parametrize("name", ONE_PLACE)
def test_what_needs_everything_in_one_place_is_refused_by_name(name: str, tmp_path: Path) -> None:
    plan = tiny.plan("fedavg")
    with pytest.raises(ConfigError, match=rf"'{name}' needs .*, which only the simulator has"):
        Reception(tmp_path / "server", 3, tiny.residual_net(), name, plan.work, run="t")


class DiesAt:
    """Kills whoever comes to the points with these numbers."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = set(numbers)
        self.passed: list[str] = []

    def __call__(self, point: str) -> None:
        self.passed.append(point)
        if len(self.passed) - 1 in self.numbers:
            raise Killed(point)


@pytest.mark.parametrize("method", ["decoupled", "hbn", "fedbn", "fedadam+fixbn", "sbn"])
def test_any_process_may_die_at_any_point(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between two phases of a round, and after a merge whose checkpoint is not written."""
    alive = DiesAt()
    plan = made(method, 2, rounds=3)
    save = wire.save

    def saved(path: Path, *content: Any) -> None:
        point("server merged")
        save(path, *content)
        point("server saved")

    point = alive
    monkeypatch.setattr("fednorm.halves.reception.save", saved)
    (tmp_path / "alive").mkdir()
    expected = play(plan, tiny.residual_net(), tmp_path / "alive", alive).fingerprint
    assert {"server merged", "server saved", "client worked", "client saved", "client sent"} <= set(alive.passed)
    merges = [number for number, name in enumerate(alive.passed) if name == "server merged"]
    chosen = {*merges, *random.Random(0).sample(range(len(alive.passed)), 6)}  # noqa: S311
    for number in sorted(chosen):
        point = DiesAt(number)
        folder = tmp_path / str(number)
        folder.mkdir()
        played = play(plan, tiny.residual_net(), folder, point)
        assert played.fingerprint == expected, f"died at point {number}: {alive.passed[number]}"


def test_many_deaths_in_one_run(tmp_path: Path) -> None:
    plan = made("hbn", 2)
    point = DiesAt(*random.Random(1).sample(range(300), 80))  # noqa: S311
    assert play(plan, tiny.residual_net(), tmp_path, point).fingerprint == in_simulator("hbn", 2)
    assert len([number for number in point.numbers if number < len(point.passed)]) > 20


@pytest.mark.parametrize("method", ["fedbn", "silobn"])
def test_local_entries_never_cross_the_wire(method: str, tmp_path: Path) -> None:
    plan = made(method)
    played = play(plan, tiny.residual_net(), tmp_path)
    sent = b"".join(played.bytes)
    schema = plan.phases[0].schema
    local = [key for key, (_, policy) in schema.items() if policy is Policy.LOCAL]
    assert local
    for key in local:
        assert key.encode() not in sent
    for key in [key for key, (_, policy) in schema.items() if policy is Policy.SHARED]:
        assert key.encode() in sent  # so that the search would have found the others
    for client in played.clients:
        tree = wire.load_mine(tmp_path / client.name).accepted.tree
        values = [tree[key].numpy().tobytes() for key in local if tree[key].is_floating_point()]
        assert values
        assert not any(value in sent for value in values)


# -- one exchange, message by message --


class Federation:
    """A federation that stands at its first exchange, with the requests that are open."""

    def __init__(self, method: str, folder: Path, **options: Any) -> None:
        self.plan = made(method, data=tiny.federation((8, 12, 9)), per_round=3)
        model = tiny.residual_net()
        options = {"score_every": 2, **options}
        self.desk = over_a_wire.Desk(self.plan, model, folder, options, over_a_wire.live_on)
        self.clients = [
            over_a_wire.Client(number, self.plan, model, folder, over_a_wire.live_on) for number in range(3)
        ]
        for client in self.clients:
            self.hello(client)
        server = self.desk.started().server
        assert server is not None
        self.server = server
        answers = [self.hello(client) for client in self.clients]
        own = [(self.plan.federation.x[rows], self.plan.federation.y[rows]) for rows in self.plan.federation.clients]
        self.sites = [
            over_a_wire.Site(welcome.terms, welcome.client, model, own[number], task=self.plan.task)
            for number, (welcome, _) in enumerate(answers)
        ]

    def hello(self, client: over_a_wire.Client) -> list[Any]:
        rows = self.plan.federation.clients[client.number]
        said = over_a_wire.Site.hello(client.name, client.model, len(rows))
        return [wire.decode(data) for data in self.desk.handle(wire.encode(said))]

    @property
    def state(self) -> Any:
        facts, trees = self.server.state()
        return facts, {name: digest(tree) for name, tree in trees.items()}


def request_of(federation: Federation, client: int = 0) -> Request:
    return federation.server.requests()[client]


def test_a_request_that_comes_twice_is_answered_twice_with_the_same_bytes(tmp_path: Path) -> None:
    federation = Federation("fedbn+local-momentum", tmp_path)
    request, mine = request_of(federation), Mine()
    first, mine = federation.sites[0].work(request, mine)
    again, same = federation.sites[0].work(request, mine)
    assert wire.encode(first) == wire.encode(again)
    assert digest(same.pending.tree) == digest(mine.pending.tree)  # type: ignore[union-attr]
    assert (same.exchange, same.pending_exchange) == (0, 1)


def test_an_update_that_comes_twice_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation("fedavg", tmp_path)
    update, _ = federation.sites[0].work(request_of(federation), Mine())
    assert federation.server.take(update)
    with caplog.at_level("INFO"):
        assert not federation.server.take(update)
    assert caplog.messages == ["client 0 answered exchange 1 twice; the second answer is ignored"]


def test_a_late_a_foreign_and_an_altered_update_are_refused_and_change_nothing(tmp_path: Path) -> None:
    federation = Federation("fedavg", tmp_path)
    update, _ = federation.sites[0].work(request_of(federation), Mine())
    before = federation.state
    assert update.address is not None
    key = next(iter(update.shared))

    def refused(changed: Update, text: str) -> None:
        with pytest.raises(WireError) as error:
            federation.server.take(changed)
        assert str(error.value) == text
        assert federation.state == before

    federation.server.retry()
    again = federation.state
    before = again
    refused(
        update,
        "client 0, exchange 1: it answers attempt 1 of exchange 1, open is attempt 2 of exchange 1; it is late",
    )
    address = replace(update.address, attempt=2)
    foreign = replace(address, terms="0" * 64)
    with pytest.raises(WireError, match=r"^client 0, exchange 1: it is of a run with terms '00000000', this one has"):
        federation.server.take(replace(update, address=foreign))
    fewer = {name: value for name, value in update.shared.items() if name != key}
    with pytest.raises(WireError, match=rf"^client 0, exchange 1, entry '{key}': ") as error:
        federation.server.take(replace(update, address=address, shared=fewer))
    assert error.value.entry == key
    wrong = {**update.shared, key: update.shared[key].float()}
    with pytest.raises(WireError, match=rf"^client 0, exchange 1, entry '{key}': "):
        federation.server.take(replace(update, address=address, shared=wrong))
    report = replace(update.report, num_examples=10**6)
    refused(
        replace(update, address=address, report=report),
        "client 0, exchange 1: it weighs 1000000 examples, but said it trains on 8",
    )
    stranger = replace(update.report, client=7)
    refused(
        replace(update, address=address, report=stranger),
        "client 7, exchange 1: exchange 1 (train.0.0) asked it for no update; its answer was ignored",
    )
    assert federation.server.take(replace(update, address=address))


def test_a_request_of_other_terms_phase_or_client_is_refused(tmp_path: Path) -> None:
    federation = Federation("fixbn", tmp_path)
    request, site = request_of(federation), federation.sites[0]
    with pytest.raises(WireError, match=r"^client 0, exchange 1: it is of a run with terms"):
        site.work(replace(request, address=Address(terms="1" * 64, number=1)), Mine())
    with pytest.raises(WireError, match=r"'fixbn' has no phase train\.5\.0$"):
        site.work(replace(request, phase=request.phase._replace(stage=5)), Mine())
    with pytest.raises(WireError, match="a request for client 1 came to client 0; send it there"):
        site.work(request_of(federation, 1), Mine())
    with pytest.raises(WireError, match="asks for a test, not for work"):
        site.work(replace(request, phase=request.phase._replace(purpose=Purpose.SCORE)), Mine())
    with pytest.raises(WireError, match="asks for work, not for a test"):
        site.score(request, Mine())


def test_a_client_that_lost_its_state_is_told_so(tmp_path: Path) -> None:
    federation = Federation("fedbn", tmp_path)
    updates = [site.work(request_of(federation, client), Mine())[0] for client, site in enumerate(federation.sites)]
    for update in updates:
        federation.server.take(update)
    federation.server.close()
    with pytest.raises(StateError, match="goes on from this client's exchange 1, but its state is that of exchange 0"):
        federation.sites[0].work(request_of(federation), Mine())


def test_a_client_that_lost_its_state_may_start_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation("fedbn", tmp_path)
    for client, site in enumerate(federation.sites):
        federation.server.take(site.work(request_of(federation, client), Mine())[0])
    federation.server.close()
    site = federation.sites[0]
    site.lost_state = "anew"
    update, mine = site.work(request_of(federation), Mine())
    assert (mine.exchange, mine.pending_exchange) == (1, 2)
    assert caplog.messages[0].startswith("client 0 starts anew: the server goes on from this client's exchange 1")
    assert federation.server.take(update)


def test_a_refused_client_does_not_advance(tmp_path: Path) -> None:
    federation = Federation("fedbn", tmp_path, quorum=0.5)
    kept = []
    for client, site in enumerate(federation.sites):
        update, mine = site.work(request_of(federation, client), Mine())
        kept.append(mine)
        if client == 1:
            broken = {key: torch.full_like(value, torch.nan) for key, value in update.shared.items()
                      if value.is_floating_point()}  # fmt: skip
            update = replace(update, shared={**update.shared, **broken})
        federation.server.take(wire.decode(wire.encode(update)))  # type: ignore[arg-type]
    federation.server.close()
    assert list(federation.server.row["refused"]) == [1]
    requests = federation.server.requests()
    assert [requests[client].accepted for client in range(3)] == [1, 0, 1]
    assert kept[1].as_of(0) == Mine()
    assert kept[0].as_of(1).accepted.steps == 2


def test_without_a_quorum_a_diverged_client_ends_the_run(tmp_path: Path) -> None:
    federation = Federation("fedavg", tmp_path)
    for client, site in enumerate(federation.sites):
        update, _ = site.work(request_of(federation, client), Mine())
        nan = {key: value * torch.nan if value.is_floating_point() else value for key, value in update.shared.items()}
        federation.server.take(replace(update, shared=nan) if client == 2 else update)
    with pytest.raises(DivergedError, match=r"diverged in round 1, client 2: '.*' is not finite"):
        federation.server.close()


def test_without_a_quorum_every_client_must_answer(tmp_path: Path) -> None:
    federation = Federation("fedavg", tmp_path)
    federation.server.take(federation.sites[0].work(request_of(federation), Mine())[0])
    with pytest.raises(QuorumError) as error:
        federation.server.close()
    assert str(error.value) == (
        "round 1, client 1: it did not answer; ask it again, or give a quorum to go on without it"
    )


def test_a_stranger_stays_out_and_a_failure_ends_the_run(tmp_path: Path) -> None:
    federation = Federation("fedavg", tmp_path)
    desk = federation.desk.started()
    with pytest.raises(WireError, match="'late' is not one of the 3 clients of this run; all have come"):
        desk.handle(over_a_wire.Site.hello("late", tiny.residual_net(), 5))
    for client, site in enumerate(federation.sites):
        update, _ = site.work(request_of(federation, client), Mine())
        nan = {key: value * torch.nan if value.is_floating_point() else value for key, value in update.shared.items()}
        if client < 2:
            desk.handle(update)
        else:
            with pytest.raises(DivergedError):
                desk.handle(replace(update, shared=nan))
    assert desk.over
    assert isinstance(desk.failure, DivergedError)


def test_clients_that_do_not_answer_count_as_refused(tmp_path: Path) -> None:
    federation = Federation("fedavg", tmp_path, quorum=0.9)
    federation.server.take(federation.sites[0].work(request_of(federation), Mine())[0])
    assert federation.server.missing == [1, 2]
    with pytest.raises(QuorumError, match="1 of 3 updates usable in round 1, client 1: it did not answer"):
        federation.server.close()


def test_a_client_with_another_model_is_refused_by_name(tmp_path: Path) -> None:
    federation = Federation("fedavg", tmp_path)
    said = over_a_wire.Site.hello("stranger", tiny.conv_net(), 5)
    desk = Reception(tmp_path / "other", 1, tiny.residual_net(), "fedavg", federation.plan.work, run="t")
    with pytest.raises(WireError, match="stranger"):
        desk.handle(said)


def test_other_initial_values_are_refused(tmp_path: Path) -> None:
    federation = Federation("fedbn", tmp_path)
    terms = federation.sites[0].terms
    data = federation.plan.federation
    with pytest.raises(WireError, match="starts from other values than this site's"):
        over_a_wire.Site(terms, 0, tiny.residual_net(seed=5), (data.x, data.y), task=federation.plan.task)


def test_a_query_leaves_tree_and_memory_as_training_left_them(tmp_path: Path) -> None:
    federation = Federation("sbn", tmp_path, score_every=1)
    server = federation.server
    kept = [Mine() for _ in federation.sites]
    marks = {}
    while server.round == 0:
        exchange = server.open()
        assert exchange is not None
        marks[exchange.purpose] = digest(server.tree)
        for client, site in enumerate(federation.sites):
            answer, kept[client] = site.answer(server.requests()[client], kept[client])
            server.take(answer)
        server.close()
    assert marks[Purpose.QUERY] != marks[Purpose.SCORE]
    assert digest(server.tree) == marks[Purpose.QUERY]


def test_sums_of_sites_add_up_to_the_simulators_scores(tmp_path: Path) -> None:
    plan = made("fedbn", rounds=2)
    played = play(plan, tiny.residual_net(), tmp_path)
    server = played.desk.server
    assert server is not None
    task = plan.task
    scores = {client: task.summary(each.sums["own_client"])["accuracy"] for client, each in server.scores.items()}
    row = list(tiny.play(plan).store.rows())[-1]
    assert scores == {int(client): value for client, value in row["eval"]["own_client"]["per_client"].items()}  # type: ignore[typeddict-item]


# -- reported entries --


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method whose statistics are seen by the server for each client, and never averaged."""
    home = sys.modules["fednorm.core.registry"]
    monkeypatch.setattr(home, "_REGISTRY", dict(vars(home)["_REGISTRY"]))
    change = keep(statistic="reported", counter="local")
    register("told", paper="a test", summary="reported statistics")(lambda: Part(change))


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("per_round", [4, 2])
def test_the_server_keeps_what_each_client_reports(per_round: int, tmp_path: Path) -> None:
    plan = made("told", per_round)
    played = play(plan, tiny.residual_net(), tmp_path)
    assert played.fingerprint == fingerprint_of(tiny.play(plan))
    server = played.desk.server
    assert server is not None
    phase = plan.phases[0]
    assert phase.reported
    assert not set(phase.reported) & set(phase.shared)
    for client in range(4):
        kept = wire.load_mine(tmp_path / f"client-{client:03}").accepted.tree
        assert digest(server.reported[client]) == digest({key: kept[key] for key in phase.reported})
    marks = {digest(tree) for tree in server.reported.values()}
    assert len(marks) == 4
    initial = {key: plan.prepared.initial[key] for key in phase.reported}
    assert digest({key: server.tree[key] for key in phase.reported}) == digest(initial)


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(("value", "why"), [(torch.nan, "is not finite"), (-1.0, "is negative")])
def test_reported_entries_are_checked(value: float, why: str, tmp_path: Path) -> None:
    federation = Federation("told", tmp_path)
    for client, site in enumerate(federation.sites):
        update, _ = site.work(request_of(federation, client), Mine())
        key = next(key for key in update.reported if key.endswith("running_var"))
        bad = {**update.reported, key: torch.full_like(update.reported[key], value)}
        federation.server.take(replace(update, reported=bad) if client == 1 else update)
    with pytest.raises(DivergedError, match=rf"client 1: '{re.escape(key)}' {why}"):
        federation.server.close()


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("engine", ["workers", "stacked"])
def test_reported_entries_in_every_engine(engine: str) -> None:
    one, other = (tiny.play(made("told", 2, **tiny.engine(name))) for name in ("sequential", engine))
    for client in one.store.seen():
        left, right = one.store.get(client).tree, other.store.get(client).tree
        assert left.keys() == right.keys() >= set(one.plan.phases[0].reported)
        assert all(torch.allclose(left[key].double(), right[key].double(), atol=1e-10) for key in left)
    other.close()
