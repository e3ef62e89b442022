"""FedRevive at a server whose clients come one by one, over bytes, on images of six by six pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

import arriving
import tiny
from fednorm.core import rng
from fednorm.core.state import Tree, digest
from fednorm.errors import ConfigError
from fednorm.halves.arrivals import ArrivalServer
from fednorm.halves.landing import context_of
from fednorm.running.clock_run import ClockRun
from fednorm.running.store import Store
from fednorm.scoring.regression import Regression
from fednorm.strategies.revive.profile import server_step_seconds
from fednorm.strategies.revive.reviser import Revive
from fednorm.strategies.revive.server_step import ServerStep
from fednorm.strategies.revive.settings import Settings

SMALL = (
    "freeze=0,warmup=0,batch=6,latent=4,width=2,crop=1,kd_batch=3,kd_steps=2,kd_lr=0.01,teachers=3,s_max=1.0,probes=4"
)
ORDER = (0, 1, 2, 0, 2, 1, 1, 0)
"""who comes, while all others work: their updates are up to three versions old"""


def federation(strategy: str, method: str = "fedavg", **changes: Any) -> arriving.Federation:
    """Three tiny clients, all of them at work."""
    knows = {"num_classes": tiny.NUM_CLASSES, "input_shape": (1, 6, 6), "examples": changes.pop("examples", None)}
    model = tiny.conv_net()
    made = tiny.plan(method, model=model, rounds=50, **changes)
    found = arriving.Federation(strategy, made, model, norm_factor=None, **knows)
    for client in range(3):
        found.dispatch(client)
    return found


def come(found: arriving.Federation, order: tuple[int, ...] = ORDER) -> arriving.Federation:
    for client in order:
        found.arrive(client)
        found.dispatch(client)
    return found


def remembered(server: ArrivalServer) -> tuple[dict[str, Any], Tree]:
    assert server.reviser is not None
    return dict(server.reviser.memory.facts), server.reviser.memory.tree


def test_without_a_share_of_distillation_it_is_fedbuff_to_the_bit() -> None:
    plain = come(federation("fedbuff(b=1,lr=0.3,staleness=none)", "fedavg+tracker"))
    revived = come(federation(f"fedrevive(lr=0.3,schedule=constant,share=0.0,{SMALL})", "fedavg+tracker"))
    assert max(plain.server.version - version for version in (5, 6, 7)) == 3
    assert digest(revived.server.tree) == digest(plain.server.tree)


def test_during_its_warm_up_it_is_afl_dw_to_the_bit() -> None:
    """Nothing is distilled yet, and stale updates are shrunk all the same."""
    plain = come(federation("afl-dw(lr=0.3,s_max=1.0)", "fedavg+tracker"))
    revived = come(federation(f"fedrevive(lr=0.3,{SMALL.replace('warmup=0', 'warmup=50')})", "fedavg+tracker"))
    assert digest(revived.server.tree) == digest(plain.server.tree)
    assert len(remembered(revived.server)[1]["pool|labels"]) > 0


def test_before_the_freeze_is_over_nothing_is_synthesised() -> None:
    plain = come(federation("fedbuff(b=1,lr=0.3,staleness=none)", "fedavg+tracker"))
    frozen = come(federation(f"fedrevive(lr=0.3,{SMALL.replace('freeze=0', 'freeze=50')})"))
    assert digest(frozen.server.tree) == digest(plain.server.tree)
    facts, tree = remembered(frozen.server)
    assert facts["synthesised"] is None
    assert len(tree["pool|labels"]) == 0
    assert [client for client, _ in facts["teachers"]] == [0, 1, 1]


def test_distillation_changes_the_model_and_the_statistics_stay_with_their_clients() -> None:
    plain = come(federation("afl-dw(lr=0.3,s_max=1.0)", "fedavg+tracker"))
    revived = come(federation(f"fedrevive(lr=0.3,{SMALL})"))
    tree = revived.server.tree
    assert not tree["0.weight"].equal(plain.server.tree["0.weight"])
    assert tree["1.running_mean"].tolist() == [0.0] * 4
    assert tree["1.running_var"].tolist() == [1.0] * 4
    newest = remembered(revived.server)[1]["teacher|0|1.running_mean"]
    assert newest.equal(revived.mine[ORDER[-1]].accepted.tree["1.running_mean"])


def test_the_same_run_again_gives_the_same_bits() -> None:
    first, again = (come(federation(f"fedrevive(lr=0.3,{SMALL})")) for _ in range(2))
    assert arriving.fingerprint(first.server) == arriving.fingerprint(again.server)


@pytest.mark.parametrize("after", [1, 4, 7])
def test_a_restart_goes_on_to_the_same_bits(after: int) -> None:
    whole = come(federation(f"fedrevive(lr=0.3,proportions=true,{SMALL})"))
    begun = come(federation(f"fedrevive(lr=0.3,proportions=true,{SMALL})"), ORDER[:after])
    facts, trees = begun.server.state()
    kept = json.dumps(facts), {name: save(tree) for name, tree in trees.items()}
    other = federation(f"fedrevive(lr=0.3,proportions=true,{SMALL})")
    other.server.load(json.loads(kept[0]), {name: load(data) for name, data in kept[1].items()})
    other.mine, other.brought = begun.mine, begun.brought
    come(other, ORDER[after:])
    assert arriving.fingerprint(other.server) == arriving.fingerprint(whole.server)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_on_the_clock_a_kill_at_any_event_changes_no_bit(engine: str, tmp_path: Path) -> None:
    made = {"model": tiny.conv_net(), "data": tiny.federation((8, 8, 8, 8)), "clock__concurrency": 3, "rounds": 7}
    method = f"fedrevive(lr=0.3,{SMALL})+gn"

    def play(store: Store, events: int) -> ClockRun:
        run = ClockRun(tiny.plan(method, engine__name=engine, **made), store)
        for _ in range(events):
            if not run.over:
                run.step()
        run.stop()
        return run

    whole = play(Store(), 100)
    assert whole.server.finished
    for events in (2, 4, 6):
        path = tmp_path / f"{events}.sqlite"
        begun = play(Store(path), events)
        assert not begun.server.finished
        begun.store.close()
        assert arriving.fingerprint(play(Store(path), 100).server) == arriving.fingerprint(whole.server)


def test_what_is_given_to_the_reviser_stays_as_it_is() -> None:
    found = come(federation(f"fedrevive(lr=0.3,{SMALL})"), ORDER[:5])
    facts, tree = remembered(found.server)
    before = json.dumps(facts), digest(tree), digest(found.server.tree)
    server = found.server.tree
    found.arrive(ORDER[5])
    assert (json.dumps(facts), digest(tree), digest(server)) == before


def test_images_are_made_every_few_versions() -> None:
    found = come(federation(f"fedrevive(lr=0.3,every=3,{SMALL})"))
    assert remembered(found.server)[0]["synthesised"] == 7  # 1, 4, 7: version 0 has no stale update
    assert len(remembered(found.server)[1]["pool|labels"]) == 3 * 6


def test_clients_tell_the_counts_of_their_labels_only_when_asked_to() -> None:
    probed = come(federation(f"fedrevive({SMALL})"), ORDER[:3])
    assert probed.server.agreed.method.name == "fedavg+tracker"
    counted = come(federation(f"fedrevive(proportions=true,{SMALL})"), ORDER[:3])
    assert counted.server.agreed.method.name == "fedavg+tracker+label-counts"
    counts = counted.update(0).reported["label_counts.counts"]
    assert counts.sum() == 2 * 2 * 4  # two jobs of two steps of four examples
    facts, tree = remembered(counted.server)
    assert [client for client, _ in facts["teachers"]] == [2, 1, 0]
    assert tree["proportions"].sum(1).tolist() == [1.0, 1.0, 1.0]
    assert "belief|clients" not in tree


def test_the_first_two_uploads_of_a_client_are_probed() -> None:
    found = come(federation(f"fedrevive({SMALL})"), (0, 0, 0, 1))
    _, tree = remembered(found.server)
    assert tree["belief|clients"].tolist() == [0, 1]
    assert tree["belief|uploads"].tolist() == [2, 1]
    assert torch.allclose(tree["belief|proportions"].sum(1), torch.ones(2, dtype=torch.float64))
    assert tree["proportions"][1].equal(tree["belief|proportions"][0])


@pytest.mark.parametrize(
    ("strategy", "method", "modes"),
    [
        ("statistics=bn", "fedavg", {"still"}),
        ("statistics=bn", "silobn(report=true)", {"still"}),
        ("statistics=bn", "fedbn(report=true)", {"still"}),
        ("statistics=none", "fedbn", {"batch"}),
        ("statistics=none", "silobn", {"batch"}),
        ("statistics=bn", "fixbn(at=3)", {"still"}),
        ("statistics=tracker", "gn", {"still"}),
        ("statistics=tracker", "fedwon", {"still"}),
        ("statistics=tracker", "nonorm", {"still"}),
        ("statistics=tracker,b=2", "fedavg", {"still"}),
    ],
)
def test_it_composes_with_methods(strategy: str, method: str, modes: set[str]) -> None:
    found = come(federation(f"fedrevive(lr=0.3,{strategy},{SMALL})", method))
    facts, _ = remembered(found.server)
    assert {mode for _, mode in facts["teachers"]} == modes
    assert all(torch.isfinite(value).all() for value in found.server.tree.values())
    assert "feature" in facts["guard"] or strategy == "statistics=none"


@pytest.mark.parametrize("method", ["fedbn", "silobn"])
def test_local_statistics_leave_the_user_a_choice(method: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        federation(f"fedrevive({SMALL})", method)
    assert str(refusal.value) == (
        f"'{method}' keeps statistics local, so FedRevive's feature loss has none to match; write "
        "fedrevive(statistics=none) to do without it, or let the server see those of each client, never averaged: "
        "silobn(report=true) or fedbn(report=true) with fedrevive(statistics=bn)"
    )


def test_what_it_cannot_distil_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="FedRevive's statistics=bn finds no BatchNorm with running statistics"):
        federation(f"fedrevive(statistics=bn,{SMALL})", "gn")
    with pytest.raises(ConfigError, match="FedRevive with images=real distils on examples that the server has"):
        federation("dd-fedrevive")
    agreed = federation("fedbuff").server.agreed
    context = context_of(agreed, range(3), input_shape=(1, 6, 6), task=Regression())
    with pytest.raises(ConfigError) as refusal:
        Revive(Settings(statistics="none")).begin(context)
    assert str(refusal.value) == (
        "FedRevive distils the scores of classes, but the model's outputs are of shape (3,) in the task 'regression'; "
        "use another strategy"
    )
    with pytest.raises(ConfigError, match=r"an example here has a shape nobody told the server of; use another"):
        arriving.federation(f"fedrevive({SMALL})")


def test_the_upper_bound_distils_on_real_examples_and_makes_none() -> None:
    """From the second version on, with nothing to wait for: there is no generator that must learn first."""
    strategy = "dd-fedrevive(lr=0.3,kd_batch=3,kd_steps=2,crop=1)"
    found = come(federation(strategy, examples=tiny.examples(12, 0.0, 5)))
    again = come(federation(strategy, examples=tiny.examples(12, 0.0, 5)))
    other = come(federation(strategy, examples=tiny.examples(12, 0.0, 6)))
    assert digest(found.server.tree) == digest(again.server.tree) != digest(other.server.tree)
    facts, tree = remembered(found.server)
    assert len(facts["guard"]["distillation"]) == (len(ORDER) - 1) * 2
    assert not any(name.startswith("generator") for name in tree)
    assert found.server.agreed.method.name == "fedavg"


def test_real_examples_are_augmented_as_images() -> None:
    """White images: what a crop moves in from outside is black, as for clients, and not the grey of the mean."""
    white, labels = torch.full((3, 1, 6, 6), (1 - 0.5) / 0.25), torch.zeros(3, dtype=torch.int64)
    found = federation("fedbuff").server.agreed
    knows: dict[str, Any] = {"input_shape": (1, 6, 6), "num_classes": 3, "mean": (0.5,), "std": (0.25,)}
    step = ServerStep(Settings(images="real", crop=1), context_of(found, range(3), examples=(white, labels), **knows))
    inputs = step.drawn(step.begin().pool, rng.key(0), torch.zeros(20, dtype=torch.int64))
    assert set(inputs.unique().tolist()) == {-2.0, 2.0}


def test_the_parts_of_the_server_s_step_are_timed() -> None:
    server = federation(f"fedrevive({SMALL})").server
    assert server.reviser is not None
    assert isinstance(server.strategy.revise, Revive)
    seconds = server_step_seconds(server.strategy.revise.settings, server.reviser.context, repeats=1)
    assert seconds.keys() == {"teacher", "synthesis", "distillation"}
    assert all(value > 0 for value in seconds.values())
