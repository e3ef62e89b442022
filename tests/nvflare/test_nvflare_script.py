"""Scripts of the Client API as clients: their loop by hand, one run of the script a task, the state on the disk."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import by_hand
import pytest
import torch
from scripted import DATA, LR, SITES, begun, loss_of, net, one_step, play, script
from torch import nn

from fednorm.core.report import Report
from fednorm.core.state import Tree, digest, model_state
from fednorm.halves.messages import Scores, Update
from fednorm.halves.server import Server
from fednorm.nvflare.keeping import load_own, site_file
from fednorm.nvflare.script import Client
from fednorm.nvflare.script_job import Job

pytestmark = pytest.mark.nvflare


def by_plain_torch(rounds: int, local: Callable[[str], bool]) -> tuple[Tree, list[Tree]]:
    """The same with nothing but torch: each site's own model, of which what is not local is averaged by size."""
    models = [net() for _ in SITES]
    sizes = [len(DATA[site][1]) for site in SITES]
    for _ in range(rounds):
        for model, site in zip(models, SITES, strict=True):
            optimizer = torch.optim.SGD(model.train().parameters(), lr=LR)
            optimizer.zero_grad()
            loss_of(model, DATA[site]).backward()
            optimizer.step()
        states = [copy.deepcopy(model.state_dict()) for model in models]
        mean = {
            key: sum(s[key].double() * (n / sum(sizes)) for s, n in zip(states, sizes, strict=True)).float()
            for key in states[0]
            if not local(key)
        }
        for model, state in zip(models, states, strict=True):
            model.load_state_dict({**state, **mean})
    return mean, [model.state_dict() for model in models]


def kept(folder: Path, server: Server, site: str) -> Tree:
    assert server.terms is not None
    mine = load_own(site_file(folder, "r", site), server.terms)
    assert mine.pending is not None
    return mine.pending.tree


def test_fedbn_by_a_script_is_fedbn_by_hand(tmp_path: Path) -> None:
    """The state of batch norm is each site's own and outlives the script, which is begun anew for every task."""
    server, _ = play(tmp_path, "fedbn")
    mean, own = by_plain_torch(3, local=lambda key: key.startswith("1."))
    assert {key: server.tree[key] for key in mean}.keys() == mean.keys()
    for key, value in mean.items():
        torch.testing.assert_close(server.tree[key], value, rtol=1e-6, atol=1e-7)
    for site, state in zip(SITES, own, strict=True):
        tree = kept(tmp_path, server, site)
        assert tree.keys() == {key for key in state if key.startswith("1.")}
        for key, value in tree.items():
            torch.testing.assert_close(value, state[key], rtol=1e-6, atol=1e-7)
        assert tree["1.num_batches_tracked"] == 3


def test_an_update_has_only_what_is_shared(tmp_path: Path) -> None:
    server, welcomes = begun(tmp_path, "silobn")
    request = server.requests()[0]
    answer = by_hand.answer(script("site-1", tmp_path), "site-1", welcomes["site-1"], request)
    assert isinstance(answer, Update)
    assert answer.shared.keys() == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert answer.reported == {}
    assert answer.address == request.address
    loss = float(loss_of(net().train(), DATA["site-1"]).detach())
    assert answer.report == Report(0, 10, dict.fromkeys(("all", "last_epoch", "last_batch"), loss))


def test_a_request_that_comes_twice_is_answered_twice_with_the_same_bits(tmp_path: Path) -> None:
    """Also after the site's answer was lost: what was not accepted does not count."""
    server, welcomes = begun(tmp_path, "fedbn")
    request = server.requests()[0]
    first, again = (by_hand.answer(script("site-1", tmp_path), "site-1", welcomes["site-1"], request) for _ in range(2))
    assert isinstance(first, Update)
    assert isinstance(again, Update)
    assert digest(first.shared) == digest(again.shared)
    assert kept(tmp_path, server, "site-1")["1.num_batches_tracked"] == 1


def test_rules_are_in_force_in_an_optimizers_own_step(tmp_path: Path) -> None:
    """FedProx's penalty and a bound on gradients, by `optimizer.step()` and by `rules.step(optimizer)`."""

    def stepping(client: Client, job: Job, site: str) -> None:
        optimizer = torch.optim.SGD(client.model.parameters(), lr=LR)
        with job.training() as rules:
            for _ in range(2):
                optimizer.zero_grad()
                rules.loss(loss_of(client.model, DATA[site])).backward()
                rules.step(optimizer)
        job.send()

    def hooked(client: Client, job: Job, site: str) -> None:
        optimizer = torch.optim.SGD(client.model.parameters(), lr=LR)
        with job.training(optimizer) as rules:
            for _ in range(2):
                optimizer.zero_grad()
                rules.loss(loss_of(client.model, DATA[site])).backward()
                optimizer.step()
        job.send()

    method = "fedprox(mu=3)+clip(norm=0.05)"
    one, _ = play(tmp_path / "a", method, stepping)
    two, _ = play(tmp_path / "b", method, hooked)
    plain, _ = play(tmp_path / "c", "fedavg", hooked)
    assert digest(one.tree) == digest(two.tree)
    assert digest(one.tree) != digest(plain.tree)


def test_an_optimizer_begins_anew_in_every_job(tmp_path: Path) -> None:
    """Momentum of the round before is no part of the method; hooks do not stay behind either."""
    held: dict[str, torch.optim.SGD] = {}

    def reused(client: Client, job: Job, site: str) -> None:
        optimizer = torch.optim.SGD(client.model.parameters(), lr=LR, momentum=0.9)
        optimizer.state[next(iter(client.model.parameters()))] = {"momentum_buffer": torch.full((6, 4), 100.0)}
        held[site] = optimizer
        with job.training(optimizer) as rules:
            optimizer.zero_grad()
            rules.loss(loss_of(client.model, DATA[site])).backward()
            optimizer.step()
        job.send()

    assert digest(play(tmp_path / "a", "fedbn", reused)[0].tree) == digest(play(tmp_path / "b", "fedbn")[0].tree)
    assert not held["site-1"]._optimizer_step_pre_hooks
    assert not held["site-1"]._optimizer_step_post_hooks


def test_stages_follow_the_servers_word(tmp_path: Path) -> None:
    """FixBN holds statistics in its second stage: they come down, are not moved and do not go up."""
    server, _ = play(tmp_path, "fixbn(at=0.4)", rounds=3)
    assert server.stage == 1
    assert server.tree["1.num_batches_tracked"] == 1


def test_losses_choose_weights(tmp_path: Path) -> None:
    """FedBS weighs by the losses that `rules.loss` has seen; its switch looks at them too."""
    server, _ = play(tmp_path, "fedbs", rounds=2)
    plain, _ = play(tmp_path / "plain", "fedavg", rounds=2)
    assert [round(report.losses["all"], 6) for report in server.reports] != [0, 0]
    assert digest(server.tree) != digest(plain.tree)


def test_statistics_and_tests_are_fednorms_own(tmp_path: Path) -> None:
    """The script is asked to train three times; statistics after the last round, and tests, are not its business."""
    trained: list[str] = []

    def counted(client: Client, job: Job, site: str) -> None:
        trained.append(site)
        one_step(client, job, site)

    server, welcomes = begun(tmp_path, "posthoc", score_every=3)
    while not server.finished:
        for client, request in server.requests().items():
            site = SITES[client]
            run = script(site, tmp_path, counted, test_loader=[DATA[site]])
            answer = by_hand.answer(run, site, welcomes[site], request)
            assert isinstance(answer, Update | Scores), answer
            server.take(answer)
        server.close()
    assert trained == [*SITES] * 3
    model = net().train()
    model.load_state_dict({**server.tree})
    x = torch.cat([DATA[site][0] for site in SITES])
    torch.testing.assert_close(server.tree["1.running_mean"], model[0](x).mean(0).detach(), rtol=1e-5, atol=1e-6)
    counts = {client: sums["own_client"]["count"] for client, sums in server.row["sums"].items()}
    assert counts == {0: [4.0, 3.0, 3.0], 1: [5.0, 5.0, 4.0]}  # by class


def test_without_a_test_loader_there_are_no_scores(tmp_path: Path) -> None:
    server, _ = play(tmp_path, "fedbn", rounds=1, score_every=1)
    assert server.row["sums"] == {0: {}, 1: {}}


def test_surgery_is_done_on_what_the_script_trains(tmp_path: Path) -> None:
    seen: list[nn.Module] = []

    def looked(client: Client, job: Job, site: str) -> None:
        seen.append(client.model)
        one_step(client, job, site)

    play(tmp_path, "gn", looked, rounds=1)
    assert [type(layer) for layer in seen[0]][1] is nn.GroupNorm


def test_losses_may_be_given(tmp_path: Path) -> None:
    def given(client: Client, job: Job, site: str) -> None:
        with job.training():
            pass
        job.send(losses=[3.0, 1.0])

    server, welcomes = begun(tmp_path, "fedbn")
    answer = by_hand.answer(script("site-1", tmp_path, given), "site-1", welcomes["site-1"], server.requests()[0])
    assert isinstance(answer, Update)
    assert answer.report.losses == {"all": 2.0, "last_epoch": 1.0, "last_batch": 1.0}
    assert digest(answer.shared) == digest({key: model_state(net())[key] for key in answer.shared})
