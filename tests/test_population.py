"""Few of very many clients: cost follows the cohort and the clients seen, never the population; results stay the same.

The full size, a million clients and 1,000 rounds, is `benchmarks/population.py`; this is a quick version of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tiny
from fednorm.core import rng
from fednorm.data.batches import Batches
from fednorm.data.client_rows import MANY, ClientRows, client_rows, consecutive_rows
from fednorm.data.federation import Federation
from fednorm.errors import ConfigError
from fednorm.running.plan import Plan
from fednorm.running.run import Run
from fednorm.running.store import Store

LARGE = 100_000
EXAMPLES = 6


def net() -> nn.Module:
    torch.manual_seed(0)
    return tiny.randomise_norms(nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Linear(32, 2)).double())


def crowd(population: int) -> Federation:
    """Clients that all have some examples, in the compact form; data of the first is the same for every population."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(population * EXAMPLES, 4, generator=generator, dtype=torch.float64)
    starts = torch.arange(population) * EXAMPLES
    own = torch.arange(population) % 40
    return Federation(
        name="crowd",
        x=x,
        y=(x[:, 0] > 0).long(),
        clients=ClientRows(starts, starts + EXAMPLES),
        test_x=x[:44],
        test_y=(x[:44, 0] > 0).long(),
        own_test=ClientRows(own, own + 4),
        num_classes=2,
    )


def plan(data: Federation, method: str = "fedbn", **changes) -> Plan:
    chosen = {"clients_per_round": 20, "rounds": 3, "eval__every": 3, "engine__name": "stacked"} | changes
    return tiny.plan(method, model=net(), data=data, **chosen)


# -- drawing clients --


def sample(made: Plan, round: int) -> Sequence[int]:
    """Who trains in a round."""
    return Run(made, Store()).server.cohort(round, made.phases[0])


@given(st.integers(1, 10**12), st.integers(0, 60), st.integers(0, 10**6))
def test_a_subset_has_different_members_and_is_a_function_of_its_key(count: int, size: int, seed: int) -> None:
    size = min(size, count)
    drawn = rng.subset(rng.key(seed, "draw"), count, size)
    assert drawn == sorted(set(drawn)) == rng.subset(rng.key(seed, "draw"), count, size)
    assert len(drawn) == size
    assert all(0 <= member < count for member in drawn)


def test_cohorts_are_keyed_by_seed_and_round() -> None:
    data = crowd(LARGE)
    cohorts = {
        (seed, number): tuple(sample(plan(data, seed=seed), number)) for seed in (0, 1) for number in range(1, 6)
    }
    assert len(set(cohorts.values())) == 10
    assert cohorts[1, 3] == tuple(sample(plan(data, seed=1), 3))


@pytest.mark.parametrize(("count", "size"), [(10, 1), (10, 3), (10, 9), (1000, 100)])
def test_every_member_and_every_pair_is_equally_likely(count: int, size: int) -> None:
    draws = 4000
    members: Counter[int] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    for number in range(draws):
        drawn = rng.subset(rng.key(5, "uniform", number), count, size)
        members.update(drawn)
        first = [each for each in drawn if each < 10]
        pairs.update((a, b) for a in first for b in first if a < b)
    share = size / count
    expected = draws * share
    # Draws without replacement vary less than independent ones, hence the factor; then it is chi-square as usual.
    chi2 = sum((members[c] - expected) ** 2 for c in range(count)) / expected / (1 - share) * (count - 1) / count
    assert abs(chi2 - (count - 1)) < 5 * (2 * (count - 1)) ** 0.5
    together = draws * size * (size - 1) / (count * (count - 1))
    assert all(abs(pairs[a, b] - together) <= 5.5 * (together + 1) ** 0.5 for a in range(10) for b in range(a + 1, 10))


def test_full_participation_takes_everybody() -> None:
    assert sample(plan(crowd(30), clients_per_round=None), 1) == list(range(30))
    assert sample(plan(crowd(30), clients_per_round=30), 1) == list(range(30))


def test_unseen_clients_are_never_drawn() -> None:
    last = replace(crowd(MANY), unseen=frozenset(range(30, MANY)))
    middle = replace(crowd(MANY), unseen=frozenset(range(10, MANY - 20)))
    assert sample(plan(last, clients_per_round=29), 1)[-1] < 30
    drawn = sample(plan(middle, clients_per_round=29), 1)
    assert not set(drawn) & middle.unseen
    assert isinstance(last.training_clients, range)
    assert len(middle.training_clients) == 30


# -- rows of clients --


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_compact_rows_behave_like_a_tuple(sizes: list[int]) -> None:
    plain = consecutive_rows(sizes)
    stops = torch.tensor(sizes).cumsum(0)
    starts = stops - torch.tensor(sizes)
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(1))
    for rows, expected in (
        (ClientRows(starts, stops), [own.tolist() for own in plain]),
        (ClientRows(starts, stops, order), [order[own].tolist() for own in plain]),
    ):
        assert [own.tolist() for own in rows] == expected
        assert [rows[c].tolist() for c in range(-len(sizes), 0)] == expected
        assert [own.tolist() for own in rows[1:]] == expected[1:]
        assert len(rows) == len(sizes)
        assert rows.sizes.tolist() == sizes
        with pytest.raises(IndexError):
            rows[len(sizes)]


def test_many_clients_become_compact_and_few_stay_a_tuple() -> None:
    sizes = [1, 2] * (MANY // 2)
    many = consecutive_rows(sizes)
    again = client_rows(many)
    assert isinstance(many, ClientRows)
    assert isinstance(again, ClientRows)
    assert many[-1].tolist() == again[-1].tolist() == [sum(sizes) - 2, sum(sizes) - 1]
    assert isinstance(client_rows([torch.arange(2)]), tuple)


def test_rows_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        ClientRows(torch.tensor([2]), torch.tensor([1]))
    assert str(refusal.value).startswith("client rows need one start and one stop for each client")


@pytest.mark.parametrize("method", ["fedbn", "fedavg", "silobn+local-momentum", "standalone"])
def test_a_run_on_compact_rows_equals_one_on_a_tuple(method: str) -> None:
    compact = replace(crowd(60), unseen=frozenset({58, 59}))
    plain = replace(compact, clients=tuple(compact.clients), own_test=tuple(compact.own_test))
    runs = [tiny.play(plan(data, method, data__val_fraction=0.3)) for data in (compact, plain)]
    assert tiny.fingerprint(runs[0]) == tiny.fingerprint(runs[1])


def test_a_small_cache_and_short_memory_change_nothing(tmp_path: Path) -> None:
    made = plan(crowd(60), "fedbn+local-momentum")
    forgetful = replace(made, batches=replace(made.batches, remembered=2))
    runs = [tiny.play(made), tiny.play(forgetful, Store(tmp_path / "state.sqlite", cache_bytes=2000))]
    assert tiny.fingerprint(runs[0]) == tiny.fingerprint(runs[1])


def test_batches_remember_so_many_clients_and_no_more() -> None:
    batches = Batches(pool=crowd(50).pool, seed=0, batch_size=2, union_batch_size=2, val_fraction=0.5, remembered=7)
    for client in range(50):
        batches.batch(client, 0)
    assert batches.stream.cache_info().currsize == batches.split.cache_info().currsize == 7  # type: ignore[attr-defined]


# -- scores --


def test_scores_of_many_clients_are_those_of_a_sample_and_say_so() -> None:
    data = crowd(200)
    everyone = tiny.play(plan(data))
    sampled = tiny.play(plan(data, eval__max_clients=15))
    assert tiny.fingerprint(everyone)["clients"] == tiny.fingerprint(sampled)["clients"]
    full, part = (list(run.store.rows())[-1]["eval"]["own_client"] for run in (everyone, sampled))
    assert "sample" not in full
    assert len(full["per_client"]) == 200
    assert part["sample"] == "15 of 200 clients"
    assert part["per_client"].items() <= full["per_client"].items()
    assert part["accuracy"] == sum(part["per_client"].values()) / 15


def test_clients_without_shared_weights_are_sampled_among_those_that_trained() -> None:
    run = tiny.play(plan(crowd(5000), "standalone", eval__max_clients=10))
    pooled = list(run.store.rows())[-1]["eval"]["pooled"]
    assert {int(client) for client in pooled["per_client"]} <= set(run.store.seen())
    assert pooled["sample"] == f"10 of {len(run.store.seen())} clients"


# -- memory and disk --

_CHILD = """
import json, resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import test_population as here
from fednorm.running.run import Run
from fednorm.core.state import tree_bytes
from fednorm.running.store import Store
population, folder = int(sys.argv[1]), Path(sys.argv[2])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = here.plan(here.crowd(population), rounds=20, eval__every=20, eval__max_clients=50)
store = Store(folder / "state.sqlite")
course = Run(made, store).rounds()
next(course), next(course)
before = peak()
for _ in course: pass
seen = store.seen()
bytes_each = tree_bytes(store.get(seen[0]).tree) + 8
store.close()
print(json.dumps({"grown": (peak() - before) * 1024, "seen": len(seen), "state": len(seen) * bytes_each}))
"""


def measured(population: int, folder: Path) -> dict[str, int]:
    folder.mkdir()
    tests, source = Path(__file__).parent, Path(__file__).parents[1] / "src"
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(population), str(folder)],
        env={"PYTHONPATH": f"{source}:{tests}"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout) | {"disk": (folder / "state.sqlite").stat().st_size}


@pytest.mark.skipif(sys.platform == "win32", reason="memory is read from getrusage, which Windows has not")
def test_memory_and_disk_follow_the_clients_seen(tmp_path: Path) -> None:
    small, large = (measured(population, tmp_path / str(population)) for population in (1000, LARGE))
    assert 390 <= large["seen"] <= 400
    assert large["grown"] < 48 << 20
    # Twenty rounds of rows and a score in JSON, and the empty tables, are in the file beside the states.
    for each in (small, large):
        assert each["disk"] < 1.15 * each["state"] + (160 << 10)


def test_a_run_resumes_among_many(tmp_path: Path) -> None:
    data = crowd(LARGE)
    path = tmp_path / "state.sqlite"
    first = Store(path)
    tiny.play(plan(data), first, rounds=2)
    first.close()
    again = Store(path)
    whole = tiny.fingerprint(tiny.play(plan(data)))
    resumed = Run(plan(data), again)
    assert resumed.round == 2
    list(resumed.rounds())
    assert tiny.fingerprint(resumed) == whole
    again.close()


def test_a_plan_refuses_the_one_client_without_examples() -> None:
    data = crowd(LARGE)
    stops = data.clients.stops.clone()  # type: ignore[attr-defined]
    stops[777] -= EXAMPLES
    broken = replace(data, clients=ClientRows(data.clients.starts, stops))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as refusal:
        plan(broken)
    assert str(refusal.value) == "client 777 has no examples; leave it out or give it data"
    assert isinstance(Run(plan(replace(broken, unseen=frozenset({777}))), Store()), Run)
