"""The server's half where clients come one by one: what versions are made of, worked out by hand and over the wire."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from arriving import Federation, federation, fingerprint
from fednorm import strategies
from fednorm.core.report import LOSSES, Report
from fednorm.core.state import Kind, Tree, digest
from fednorm.core.strategy import Arrived, Constant, Context, Memory, Strategy
from fednorm.errors import ConfigError, WireError
from fednorm.halves import wire
from fednorm.halves.arrivals import ArrivalServer
from fednorm.halves.landing import Landing
from fednorm.halves.messages import Request, Update, Welcome
from fednorm.halves.mine import Mine
from fednorm.halves.recent import REMEMBERED
from fednorm.halves.site import Site
from fednorm.pieces.switches import After
from test_docs import DOCS, load_file, python_blocks

WEIGHT, MEAN, COUNT = "0.weight", "1.running_mean", "1.num_batches_tracked"
SAME_AS_ROUNDS = [
    "fedavg",
    "fedbn",
    "silobn",
    "fixbn",
    "fixbn+local-momentum",
    "global-momentum",
    "fedadam",
    "fedavgm+fedprox",
    "fbn",
    "pooled",
    "feddna",
    "fedbs",
    "gn",
]


@pytest.mark.parametrize("method", SAME_AS_ROUNDS)
def test_a_full_buffer_of_fresh_updates_is_a_round(method: str) -> None:
    """Over the wire, in whatever order they come: server, what merges remember, and what clients keep."""
    made = federation("fedbuff(b=3,staleness=none)", method)
    while not made.server.finished:
        for client in (1, 2, 0):
            made.dispatch(client)
        for client in (2, 0, 1):
            made.arrive(client)
    rounds = tiny.play(tiny.plan(method, model=tiny.conv_net(), train__weights="uniform"))
    assert digest(made.server.tree) == digest(rounds.server.tree)
    assert digest(made.server.held.memory) == digest(rounds.server.held.memory)
    kept = [made.mine[client].as_of(made.server.accepted[client]).accepted for client in range(3)]
    states = [rounds.store.get(client) for client in range(3)]
    assert [(own.steps, digest(own.tree)) for own in kept] == [(own.steps, digest(own.tree)) for own in states]


def played_by_hand(made: Federation) -> tuple[list[Tree], list[Tree], list[int]]:
    """Clients 0, 1 and 2 are sent version 0. 0 comes and is sent version 1; then 1, 2 and 0 come.

    Every update makes a version. The trees of the versions, what came, and how stale it was.
    """
    trees, came, stale = [dict(made.server.tree)], [], []
    for client in (0, 1, 2):
        made.dispatch(client)
    for client in (0, 1, 2, 0):
        came.append(made.update(client).shared)
        stale.append(made.arrive(client).staleness)
        trees.append(dict(made.server.tree))
        if len(came) == 1:
            made.dispatch(0)
    return trees, came, stale


BEGAN = [0, 0, 0, 1]
"""The versions that those updates began at."""


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    ("strategy", "rate", "counts"),
    [
        ("fedbuff(b=1,lr=0.5)", 0.5, [1.0, 1 / sqrt(2), 1 / sqrt(3), 1 / sqrt(3)]),
        ("fedbuff(b=1,lr=1.4,a=1)", 1.4, [1.0, 1 / 2, 1 / 3, 1 / 3]),
        ("fedbuff(b=1,staleness=none)", 1.0, [1.0] * 4),
        ("afl-dw(lr=0.1,s_max=2)", 0.1, [1.0, 0.5 * (1 + sqrt(0.5)), 0.5, 0.5]),
    ],
)
def test_stale_updates_go_on_from_where_the_server_is(strategy: str, rate: float, counts: list[float]) -> None:
    trees, came, stale = played_by_hand(federation(strategy))
    assert stale == [0, 1, 2, 2]
    for index, (sent, count, began) in enumerate(zip(came, counts, BEGAN, strict=True)):
        before, after = trees[index], trees[index + 1]
        close(after[WEIGHT], before[WEIGHT] + rate * count * (sent[WEIGHT] - trees[began][WEIGHT]))
        share = min(rate, 1.0)
        close(after[MEAN], (1 - share) * before[MEAN] + share * sent[MEAN])
        assert after[COUNT] == max(before[COUNT], sent[COUNT])


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ("lr=0.6", [1.0, 1 / sqrt(2), 1 / sqrt(3), 1 / sqrt(3)]),
        ("lr=0.6,staleness=hinge,a=4,b=1", [1.0, 1.0, 1 / 5, 1 / 5]),
        ("lr=0.6,staleness=constant", [1.0] * 4),
    ],
)
def test_fedasync_mixes_models(options: str, counts: list[float]) -> None:
    """x <- (1 - alpha s) x + alpha s x_new, statistics too."""
    trees, came, _ = played_by_hand(federation(f"fedasync({options})"))
    for before, after, sent, count in zip(trees, trees[1:], came, counts, strict=False):
        for key in (WEIGHT, MEAN):
            close(after[key], (1 - 0.6 * count) * before[key] + 0.6 * count * sent[key])


def test_statistics_of_stale_updates_count_as_the_strategy_says() -> None:
    shares = {
        "values": [0.5] * 4,
        "discounted": [0.5, 0.5 / sqrt(2), 0.5 / sqrt(3), 0.5 / sqrt(3)],
        "fresh": [0.5, 0.0, 0.0, 0.0],
        "fresh,fresh=1": [0.5, 0.5, 0.0, 0.0],
    }
    for rule, share in shares.items():
        trees, came, _ = played_by_hand(federation(f"fedbuff(b=1,lr=0.5,statistics={rule})"))
        for before, after, sent, own in zip(trees, trees[1:], came, share, strict=False):
            close(after[MEAN], (1 - own) * before[MEAN] + own * sent[MEAN])


def test_updates_of_a_buffer_weigh_by_size_where_the_method_says_so() -> None:
    """Clients 1 (12 examples, one version late) and 0 (8 examples, fresh) make the second version."""
    for weights, shares in {"method": (8 / 20, 12 / 20), "uniform": (0.5, 0.5)}.items():
        made = federation(f"fedbuff(b=2,weights={weights},statistics=discounted)")
        first = made.server.tree
        for client in (0, 1, 2):
            made.dispatch(client)
        assert made.arrive(0).row is None
        row = made.arrive(2).row
        assert row is not None
        assert (row["cohort"], row["staleness"]) == ([0, 2], [0, 0])
        second = made.server.tree
        made.dispatch(0)
        fresh, late = made.update(0).shared, made.update(1).shared
        assert made.arrive(1).staleness == 1
        row = made.arrive(0).row
        assert row is not None
        assert (row["cohort"], row["staleness"]) == ([0, 1], [0, 1])
        moved = second[WEIGHT] + (late[WEIGHT] - first[WEIGHT]) / sqrt(2)
        close(made.server.tree[WEIGHT], shares[0] * fresh[WEIGHT] + shares[1] * moved)
        counted = (shares[0], shares[1] / sqrt(2))
        mixed = (counted[0] * fresh[MEAN] + counted[1] * late[MEAN]) / sum(counted)
        share = (1 + 1 / sqrt(2)) / 2
        close(made.server.tree[MEAN], (1 - share) * second[MEAN] + share * mixed)


def test_ca2fl_counts_the_last_updates_of_those_who_did_not_come() -> None:
    """With three clients: h = mean of h_k, v = h + mean over the buffer of (Delta_k - h_k)."""
    made = federation("ca2fl(b=2,lr=0.5)")
    zero = torch.zeros_like(made.server.tree[WEIGHT])
    cached = dict.fromkeys(range(3), zero)
    for clients in ((0, 1), (1, 2), (0, 2), (2, 1)):
        for client in clients:
            made.dispatch(client)
        before = made.server.tree[WEIGHT]
        deltas = {client: made.update(client).shared[WEIGHT] - before for client in clients}
        for client in clients:
            made.arrive(client)
        mean = sum(cached.values(), zero) / 3
        step = mean + sum((deltas[client] - cached[client] for client in clients), zero) / 2
        close(made.server.tree[WEIGHT], before + 0.5 * step)
        cached |= deltas


def test_what_began_before_the_freeze_merges_only_what_both_phases_share() -> None:
    made = federation("fedbuff(b=1,lr=0.5,staleness=none)", "fixbn(at=1)")
    for client in (0, 1):
        made.dispatch(client)
    made.arrive(0)
    assert made.server.stage == 1
    made.dispatch(2)
    before, late = made.server.tree, made.update(1).shared
    arrival = made.arrive(1)
    assert (arrival.staleness, arrival.version) == (1, 2)
    assert torch.equal(made.server.tree[MEAN], before[MEAN])
    assert not torch.equal(late[MEAN], before[MEAN])
    assert torch.equal(made.server.tree[COUNT], before[COUNT])
    assert not torch.equal(made.server.tree[WEIGHT], before[WEIGHT])
    assert MEAN not in made.update(2).shared
    made.arrive(2)
    assert torch.equal(made.server.tree[MEAN], before[MEAN])


def test_a_buffer_may_hold_updates_of_both_phases() -> None:
    made = federation("fedbuff(b=2,staleness=none)", "fixbn(at=1)")
    for client in (0, 1, 2):
        made.dispatch(client)
    for client in (0, 1):
        made.arrive(client)
    before = made.server.tree
    made.dispatch(0)
    first = federation("fedbuff", "fixbn(at=1)").server.tree
    fresh, late = made.update(0).shared, made.update(2).shared
    for client in (2, 0):
        made.arrive(client)
    moved = late[WEIGHT] + (before[WEIGHT] - first[WEIGHT])
    close(made.server.tree[WEIGHT], (fresh[WEIGHT] + moved) / 2)
    assert torch.equal(made.server.tree[MEAN], before[MEAN])


def test_entries_that_only_some_updates_have_are_merged_of_these() -> None:
    """Stage 1 shares the statistics that clients keep in stage 0: an update begun before has none to merge."""
    late_sharing = federation("fedbuff(b=2,staleness=none)").server.agreed.method
    phase = late_sharing.stages[0][0]
    kept = replace(phase, policy={**phase.policy, Kind.STATISTIC: "local", Kind.COUNTER: "local"})
    method = replace(late_sharing, stages=((kept,), (phase,)), switch=After(1))
    made = tiny.plan(method, model=tiny.conv_net())
    server = ArrivalServer(made, range(3), strategies.parse("fedbuff(b=2,staleness=none)"))
    flights = [server.begin(client) for client in range(3)]
    first = server.tree
    update = made_up(server, 1.0)
    without = {key: value for key, value in update.items() if key in made.phase(flights[0].phase).shared}
    for flight in flights[:2]:
        list(server.land([Landing(flight.number, Update(report(flight.client), without))]))
    assert (server.version, server.stage) == (1, 1)
    assert torch.equal(server.tree[MEAN], first[MEAN])
    fresh = server.begin(0)
    list(server.land([Landing(flights[2].number, Update(report(2), without))]))
    list(server.land([Landing(fresh.number, Update(report(0), made_up(server, 3.0)))]))
    assert server.version == 2
    close(server.tree[MEAN], first[MEAN] + 3.0)


def report(client: int, examples: int = 8) -> Report:
    return Report(client, examples, dict.fromkeys(LOSSES, 1.0))


def made_up(server: ArrivalServer, step: float) -> Tree:
    """What a client would send whose numbers all grew by the same."""
    return {key: value + (step if value.is_floating_point() else 1) for key, value in server.tree.items()}


class Same:
    """A reviser that leaves everything as it is, and counts."""

    def begin(self, context: Context) -> Memory:
        return Memory({"seen": 0, "clients": len(context.clients)}, {"last": torch.zeros(1)})

    def revise(
        self, arrivals: Sequence[Arrived], server: Tree, memory: Memory, context: Context
    ) -> tuple[Sequence[Tree | None], Memory]:
        for each in arrivals:
            assert each.whole.keys() == context.facts.entries.keys()
        seen = memory.facts["seen"] + len(arrivals)
        return [None] * len(arrivals), Memory({**memory.facts, "seen": seen}, {"last": memory.tree["last"] + 1})


def test_a_reviser_that_changes_nothing_changes_no_bit() -> None:
    plain = Strategy(name="plain", rate=0.1, discount=Constant())
    servers = [federation(each) for each in (plain, replace(plain, revise=Same()))]
    for made in servers:
        played_by_hand(made)
    assert digest(servers[0].server.tree) == digest(servers[1].server.tree)
    reviser = servers[1].server.reviser
    assert reviser is not None
    assert (dict(reviser.memory.facts), reviser.memory.tree["last"].item()) == ({"seen": 4, "clients": 3}, 4.0)


def test_all_else_that_a_reviser_gives_takes_the_place_of_what_came() -> None:
    class Doubled(Same):
        def revise(
            self, arrivals: Sequence[Arrived], server: Tree, memory: Memory, context: Context
        ) -> tuple[Sequence[Tree | None], Memory]:
            return [{WEIGHT: 2 * each.moved[WEIGHT] - server[WEIGHT]} for each in arrivals], memory

    made = federation(Strategy(name="doubled", rate=0.5, revise=Doubled()))
    trees, came, _ = played_by_hand(made)
    for index, (sent, began) in enumerate(zip(came, BEGAN, strict=True)):
        close(trees[index + 1][WEIGHT], trees[index][WEIGHT] + sent[WEIGHT] - trees[began][WEIGHT])
        bias = trees[index]["0.bias"] + 0.5 * (sent["0.bias"] - trees[began]["0.bias"])
        close(trees[index + 1]["0.bias"], bias)


@pytest.mark.parametrize("method", ["fedbn+local-momentum", "fixbn(at=2)", "fedadam"])
def test_a_server_that_is_started_again_at_any_point_makes_the_same_versions(method: str, tmp_path: Path) -> None:
    def play(restarts: bool) -> dict[str, Any]:
        made = federation("fedbuff(b=2)", method, rounds=5)
        for step, (client, comes) in enumerate(COMINGS):
            if restarts:
                facts, trees = made.server.state()
                wire.save(tmp_path / f"{step}", facts, trees)
                made.server = federation("fedbuff(b=2)", method, rounds=5).server
                made.server.load(*wire.load(tmp_path / f"{step}"))
            if comes:
                made.arrive(client)
            else:
                made.dispatch(client)
        assert made.server.finished
        return fingerprint(made.server)

    assert play(restarts=True) == play(restarts=False)


COMINGS = [(0, 0), (1, 0), (2, 0), (1, 1), (1, 0), (0, 1), (0, 0), (1, 1), (2, 1), (2, 0)]
COMINGS += [(0, 1), (1, 0), (1, 1), (1, 0), (0, 0), (1, 1), (0, 1), (2, 1), (0, 0), (0, 1)]
"""A client, and whether it comes or is sent the model."""


def test_the_smallest_server_of_the_page_on_the_two_halves(tmp_path: Path) -> None:
    """Sites answer in the order in which they were asked."""
    (block,) = (each for each in python_blocks(DOCS / "halves.md") if "found_arrivals" in each)
    (tmp_path / "block.py").write_text(block)
    one_by_one = vars(load_file(tmp_path / "block.py"))["one_by_one"]
    made, model = federation("fedbuff(b=2)", "fedbn"), tiny.conv_net()
    hellos = [Site.hello(name, model, size) for name, size in zip(made.names, (8, 12, 9), strict=True)]
    asked: list[Request] = []
    mine = [Mine() for _ in made.names]

    def ask(welcomes: dict[str, Welcome], requests: list[Request]) -> Update:
        asked.extend(requests)
        request = asked.pop(0)
        site = made.sites[welcomes[made.names[request.client]].client]
        answer, mine[request.client] = site.work(request, mine[request.client])
        return answer

    made.sites = [replace_terms(site, "trial") for site in made.sites]
    tree = one_by_one(hellos, model, "fedbn", made.server.agreed.work, "fedbuff(b=2)", ask)
    other = federation("fedbuff(b=2)", "fedbn")
    for turn in range(8):
        for client in range(3):
            if client not in other.server.busy:
                other.dispatch(client)
        other.arrive(turn % 3)
    assert digest(tree) == digest(other.server.tree)


def replace_terms(site: Site, run: str) -> Site:
    """A site as it is in a run of another name."""
    site.terms = replace(site.terms, run=run)
    return site


def test_a_request_that_is_asked_for_again_is_the_same() -> None:
    made = federation("fedbuff(b=1)", "fedbn")
    for client in (0, 1):
        made.dispatch(client)
    made.arrive(0)
    again = made.server.request(1)
    assert again is not None
    assert wire.encode(again) == made.sent[1]
    assert made.server.request(0) is None


def test_trees_are_kept_only_while_somebody_builds_on_them() -> None:
    made = federation("fedbuff(b=1)")
    for client in (0, 1, 2):
        made.dispatch(client)

    def kept() -> set[str]:
        return {name for name in made.server.state()[1] if name.startswith("base")}

    made.arrive(0)
    assert kept() == {"base 0"}
    made.dispatch(0)
    made.arrive(1)
    assert kept() == {"base 0", "base 1"}
    made.server.give_up(2)
    assert kept() == {"base 1"}
    made.arrive(0)
    assert kept() == set()


def test_a_barrier_waits_for_all_that_are_there() -> None:
    made = federation("sync")
    for client in (0, 1, 2):
        made.dispatch(client)
    assert [made.arrive(client).version for client in (1, 0)] == [0, 0]
    row = made.server.give_up(2)
    assert row is not None
    assert (row["cohort"], made.server.version) == ([0, 1], 1)
    assert made.server.give_up(2) is None


def test_reported_entries_are_kept_for_each_client() -> None:
    method = federation("fedbuff").server.agreed.method
    told = method.map_phases(lambda phase: replace(phase, policy={**phase.policy, Kind.STATISTIC: "reported"}))
    made = tiny.plan(told, model=tiny.conv_net())
    server = ArrivalServer(made, range(3), strategies.parse("fedbuff(b=1)"))
    for client in (0, 2):
        flight = server.begin(client)
        whole = made_up(server, client + 1.0)
        parts = made.phase(flight.phase).split({**made.prepared.initial, **whole, **momenta(made, flight.phase)})
        list(server.land([Landing(flight.number, Update(report(client), parts.shared, parts.reported))]))
    assert server.reported.keys() == {0, 2}
    assert torch.equal(server.reported[2][MEAN], server.tree[MEAN] + 3.0)
    other = ArrivalServer(made, range(3), strategies.parse("fedbuff(b=1)"))
    facts, trees = server.state()
    other.load(json.loads(json.dumps(facts)), trees)
    assert fingerprint(other) == fingerprint(server)


def momenta(made: Any, phase: Any) -> Tree:
    schema = made.phase(phase).schema
    return {key: torch.zeros(entry.shape) for key, (entry, _) in schema.items() if entry.kind is Kind.OPTIMIZER}


# -- what is refused --


def test_updates_that_are_late_foreign_or_altered_change_nothing() -> None:
    made = federation("fedbuff(b=1)")
    for client in (0, 1):
        made.dispatch(client)
    first = made.update(0)
    made.arrive(0)
    before = fingerprint(made.server)
    with pytest.raises(WireError, match=r"^client 0: it has no job; its answer was ignored$"):
        made.server.take(first)
    made.dispatch(0)
    late = "it answers attempt 1 of exchange 1, open is attempt 1 of exchange 3; it is late$"
    with pytest.raises(WireError, match=late):
        made.server.take(first)
    made.server.give_up(0)
    assert fingerprint(made.server)["trees"] == before["trees"]
    own = made.update(1)
    shared = dict(own.shared)
    del shared[WEIGHT]
    with pytest.raises(WireError, match=r"^client 1, exchange 2, entry '0.weight': is missing$"):
        made.server.take(replace(own, shared=shared))
    with pytest.raises(WireError, match=r"it weighs 7 examples, but said it trains on 12$"):
        made.server.take(replace(own, report=replace(own.report, num_examples=7)))
    with pytest.raises(WireError, match=r"expected an update$"):
        made.server.take("hello")  # type: ignore[arg-type]
    assert made.arrive(1).version == 2


def test_a_client_has_one_job_at_a_time() -> None:
    made = federation("fedbuff(b=1)")
    made.dispatch(0)
    with pytest.raises(WireError, match=r"^client 0: it has job 1 already; take its update, or give it up$"):
        made.dispatch(0)
    with pytest.raises(WireError, match=r"^there is no client 7 in this run$"):
        made.server.dispatch(7)
    assert made.server.busy == {0}


def test_values_that_cannot_be_used_are_refused_and_their_client_does_not_advance() -> None:
    made = federation("fedbuff(b=1)")
    made.dispatch(0)
    own = made.update(0)
    before = digest(made.server.tree)
    arrival = made.server.take(replace(own, shared={**own.shared, WEIGHT: own.shared[WEIGHT] * torch.nan}))
    assert (arrival.refused, arrival.version) == ("'0.weight' is not finite", 0)
    assert (digest(made.server.tree), made.server.accepted, made.server.busy) == (before, {}, set())
    assert made.server.row["refused"] == {0: "'0.weight' is not finite"}
    made.dispatch(0)
    assert wire.decode(made.sent[0]).accepted == 0  # type: ignore[union-attr]
    row = made.arrive(0).row
    assert row is not None
    assert row["refused"] == {0: "'0.weight' is not finite"}


def test_counters_are_measured_by_what_the_client_was_sent() -> None:
    """Two steps explain 131072 calls of a layer; what the server counts meanwhile explains nothing."""
    made = federation("fedbuff(b=1)")
    for client in (0, 1, 2):
        made.dispatch(client)
    for client, grown, why in ((0, 131072, ""), (1, 131073, "counts 131073 more than it started with")):
        own = made.update(client)
        arrival = made.server.take(replace(own, shared={**own.shared, COUNT: torch.tensor(grown)}))
        assert why in arrival.refused
        assert bool(arrival.refused) == bool(why)
    assert made.server.tree[COUNT] == 131072
    made.arrive(2)
    assert made.server.tree[COUNT] == 131072


def test_an_update_is_measured_by_those_that_came_before() -> None:
    made = tiny.plan(model=tiny.conv_net(), rounds=1000)
    server = ArrivalServer(made, range(3), strategies.parse("fedbuff(b=1)"), norm_factor=10.0)

    def arrive(client: int, step: float) -> str:
        flight = server.begin(client)
        update = Update(report(client), {**server.tree, WEIGHT: server.tree[WEIGHT] + step})
        (arrival,) = server.land([Landing(flight.number, update)])
        return arrival.refused

    assert [arrive(client, 1.0) for client in (0, 1, 2)] == ["", "", ""]
    assert arrive(1, 100.0) == "'0.weight' moved 100 times as far as the median client; norm_factor=10 allows less"
    for _ in range(REMEMBERED):
        assert arrive(0, 5.0) == ""
    assert len(server.state()[0]["recent"]) == REMEMBERED
    assert arrive(1, 45.0) == ""


def test_nothing_is_asked_or_taken_once_the_run_is_over() -> None:
    made = federation("fedbuff(b=1)", rounds=1)
    for client in (0, 1):
        made.dispatch(client)
    made.arrive(0)
    assert made.server.finished
    with pytest.raises(WireError, match=r"^the run is over; nothing is asked any more$"):
        made.dispatch(2)
    after = digest(made.server.tree)
    assert made.arrive(1).refused == "the run is over"
    assert digest(made.server.tree) == after


def test_state_of_another_strategy_or_run_is_refused() -> None:
    facts, trees = federation("fedbuff(b=1)").server.state()
    told = "the stored state is of 'fedbuff(b=1)', this run of 'fedbuff(b=1,lr=2)'; give the same"
    with pytest.raises(WireError, match=r"^the stored state is of other terms"):
        federation("fedbuff(b=1)", rounds=9).server.load(facts, trees)
    with pytest.raises(WireError) as error:
        federation("fedbuff(b=1,lr=2)").server.load(facts, trees)
    assert str(error.value) == told


ONE_BY_ONE = "and here clients come one by one; play it in rounds, or take another method here"


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("fedtan", f"'fedtan' needs all clients of a round in lock-step, {ONE_BY_ONE}"),
        ("centralized", f"'centralized' needs the data of all clients in one place, {ONE_BY_ONE}"),
        (
            "decoupled",
            "'decoupled' takes 2 exchanges with the same clients to a round, and here every client has one job at a "
            "time; play it in rounds, or take another method here",
        ),
    ],
)
def test_methods_that_need_rounds_are_refused_by_name(method: str, told: str) -> None:
    for strategy in ("fedbuff", "sync"):
        with pytest.raises(ConfigError) as error:
            strategies.joined(strategies.parse(strategy), method)
        assert str(error.value) == told


# -- versions and staleness add up --

WHAT = ["send", "come", "bad", "leave"]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["send", "come", "bad", "leave"])), max_size=60),
)
def test_versions_staleness_and_jobs_add_up(buffer: int, steps: list[tuple[int, str]]) -> None:
    server = ArrivalServer(PLAN, range(5), strategies.parse(f"fedbuff(b={buffer})"))
    under_way: dict[int, tuple[int, int]] = {}
    accepted = sent = 0
    stale: list[int] = []
    for client, what in steps:
        if what == "send" and client not in under_way:
            flight = server.begin(client)
            sent += 1
            under_way[client] = sent, server.version
            assert (flight.number, flight.version) == under_way[client]
        elif what in ("come", "bad") and client in under_way:
            number, began = under_way.pop(client)
            age = server.version - began
            landing = Landing(number, Update(report(client), made_up(server, 0.1)), "bad" if what == "bad" else "")
            (arrival,) = server.land([landing])
            assert (arrival.staleness, arrival.refused) == (age, "bad" if what == "bad" else "")
            accepted += what == "come"
            stale += [age] * (what == "come")
            if arrival.row is not None:
                assert sorted(arrival.row["staleness"]) == sorted(stale[-buffer:])
        elif what == "leave":
            server.give_up(client)
            under_way.pop(client, None)
        assert server.version == accepted // buffer
        assert len(server.buffer) == accepted % buffer
        assert server.busy == under_way.keys()
        bases = {int(name.split()[1]) for name in server.state()[1] if name.startswith("base")}
        assert bases >= {began for _, began in under_way.values()} - {server.version}


PLAN = tiny.plan(model=tiny.conv_net(), rounds=100)
