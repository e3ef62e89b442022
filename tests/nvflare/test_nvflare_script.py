"""Scripts of the Client API as clients: their loop by hand, one run of the script a task, the state on the disk."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import by_hand
import pytest
import torch
from torch import Tensor, nn

from fednorm.core.phases import PhaseId
from fednorm.core.report import Report
from fednorm.core.state import Tree, digest, model_state
from fednorm.errors import ConfigError, WireError
from fednorm.halves.founding import found
from fednorm.halves.messages import LocalWork, Refusal, Request, Scores, Update, Welcome
from fednorm.halves.server import Server
from fednorm.nvflare import parts
from fednorm.nvflare.keeping import load_own, site_file
from fednorm.nvflare.recipe import Recipe
from fednorm.nvflare.script import Client, join
from fednorm.nvflare.script_job import Job

pytestmark = pytest.mark.nvflare

SITES = ("site-1", "site-2")
DATA = {
    site: (torch.randn(size, 4, generator=torch.Generator().manual_seed(size)), torch.arange(size) % 3)
    for site, size in zip(SITES, (10, 14), strict=True)
}
LR = 0.1


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def one_step(client: Client, job: Job, site: str) -> None:
    """What a user's loop does: one step on all examples."""
    optimizer = torch.optim.SGD(client.model.parameters(), lr=LR)
    with job.training(optimizer) as rules:
        optimizer.zero_grad()
        rules.loss(loss_of(client.model, DATA[site])).backward()
        optimizer.step()
    job.send()


Loop = Callable[[Client, Job, str], None]


def script(site: str, folder: Path, loop: Loop = one_step, **options: Any) -> by_hand.Script:
    def run() -> None:
        client = join(net(), [DATA[site]], state_dir=str(folder), **options)
        for job in client:
            loop(client, job, site)

    return run


def begun(folder: Path, method: str, rounds: int = 3, **options: Any) -> tuple[Server, dict[str, Welcome]]:
    hellos = [by_hand.hello(script(site, folder), site) for site in SITES]
    return found(hellos, net(), method, LocalWork(rounds=rounds, lr=LR), run="r", norm_factor=None, **options)


def play(folder: Path, method: str, loop: Loop = one_step, **options: Any) -> tuple[Server, dict[str, Welcome]]:
    server, welcomes = begun(folder, method, **options)
    while not server.finished:
        for client, request in server.requests().items():
            site = SITES[client]
            answer = by_hand.answer(script(site, folder, loop), site, welcomes[site], request)
            assert isinstance(answer, Update | Scores), answer
            server.take(answer)
        server.close()
    return server, welcomes


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


def refused(folder: Path, request: Request, welcome: Welcome, loop: Loop = one_step) -> str:
    """What the server is told, in one line."""
    answer, _ = by_hand.asked(script("site-1", folder, loop), "site-1", parts.to_shareable(request, welcome))
    assert isinstance(answer, Refusal)
    return answer.why


def test_what_cannot_be_done_is_told_to_the_server(tmp_path: Path) -> None:
    server, welcomes = begun(tmp_path, "fedbn")
    welcome, request = welcomes["site-1"], server.requests()[0]
    terms = welcome.terms
    other = replace(welcome, terms=replace(terms, schema="ab" * 32))
    assert refused(tmp_path, request, other) == (
        f"the server has schema 'abababab', this side '{terms.schema[:8]}'; "
        "give both the same model, method and settings"
    )
    assert refused(tmp_path, replace(request, phase=PhaseId.parse("train.3.0")), welcome) == (
        "client 0: 'fedbn' has no phase train.3.0"
    )
    assert refused(tmp_path, replace(request, accepted=2), welcome) == (
        "the server goes on from this client's exchange 2, but its state is that of exchange 0; bring back the state "
        "it had, or let it start anew (lost_state='anew')"
    )
    more = replace(request, tree={**request.tree, "1.weight": torch.ones(6)})
    assert refused(tmp_path, more, welcome) == "client 0, exchange 1, entry '1.weight': was not expected"
    lock = replace(welcome, terms=replace(terms, method="fedavg+local-momentum"))
    assert refused(tmp_path, request, lock) == (
        "'fedavg+local-momentum' cannot be a script's: it keeps or shares what the optimizer remembers; "
        "give data= in place of train_script="
    )


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (
            "fedavg+local-momentum",
            "'fedavg+local-momentum' cannot be a script's: it keeps or shares what the optimizer remembers; "
            "give data= in place of train_script=",
        ),
        (
            "fedtan",
            "'fedtan' needs all clients of a round in lock-step, which only the simulator has; "
            "use fednorm.run, or another method here",
        ),
        (
            "centralized",
            "'centralized' needs the data of all clients in one place, which only the simulator has; "
            "use fednorm.run, or another method here",
        ),
    ],
)
def test_a_recipe_refuses_what_no_script_can_do(method: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe(method=method, model="resnet20", train_script="train.py", num_rounds=1, min_clients=2)
    assert str(caught.value) == text


def unsent(client: Client, job: Job, site: str) -> None:
    with job.training():
        pass


def untrained(client: Client, job: Job, site: str) -> None:
    job.send()


def silent(client: Client, job: Job, site: str) -> None:
    with job.training():
        loss_of(client.model, DATA[site]).backward()
    job.send()


def twice(client: Client, job: Job, site: str) -> None:
    one_step(client, job, site)
    job.send()


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (unsent, "the job of round 1 was not sent; call job.send() after training"),
        (untrained, "the job of round 1 was not trained; do it inside `with job.training():`"),
        (silent, "the job of round 1 has no losses; train with rules.loss(loss), or send(losses=[...])"),
        (twice, "the job of round 1 was sent already; send each once"),
    ],
)
def test_a_loop_that_forgets_something_is_told(tmp_path: Path, loop: Loop, text: str) -> None:
    server, welcomes = begun(tmp_path, "fedbn")
    task = parts.to_shareable(server.requests()[0], welcomes["site-1"])
    _, raised = by_hand.asked(script("site-1", tmp_path, loop), "site-1", task)
    assert isinstance(raised, ConfigError)
    assert str(raised) == text


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


def test_terms_are_wanted_before_jobs() -> None:
    with pytest.raises(ConfigError, match=r"the server has not named its terms yet; make the client with fednorm\.nvf"):
        Client(net(), [DATA["site-1"]])._settled()


def test_a_server_that_is_not_ours_is_told(tmp_path: Path) -> None:
    _, welcomes = begun(tmp_path, "fedbn")
    answer, raised = by_hand.asked(script("site-1", tmp_path), "site-1", parts.to_shareable(welcomes["site-1"]))
    assert answer == Refusal("the server sent a welcome where a request was expected")
    assert isinstance(raised, WireError)
