"""What a script of the Client API is told where it cannot be a client, forgets something, or meets another server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import by_hand
import pytest
import torch
from scripted import DATA, LR, Loop, begun, loss_of, net, one_step, script

from fednorm.core.phases import PhaseId
from fednorm.errors import ConfigError, WireError
from fednorm.halves.messages import Refusal, Request, Update, Welcome
from fednorm.nvflare import parts
from fednorm.nvflare.recipe import Recipe
from fednorm.nvflare.script import Client
from fednorm.nvflare.script_job import Job

pytestmark = pytest.mark.nvflare


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


def without_penalty(client: Client, job: Job, site: str) -> None:
    optimizer = torch.optim.SGD(client.model.parameters(), lr=LR)
    with job.training(optimizer):
        loss_of(client.model, DATA[site]).backward()
        optimizer.step()
    job.send(losses=[1.0])


def without_hooks(client: Client, job: Job, site: str) -> None:
    optimizer = torch.optim.SGD(client.model.parameters(), lr=LR)
    with job.training() as rules:
        rules.loss(loss_of(client.model, DATA[site])).backward()
        optimizer.step()
    job.send()


@pytest.mark.parametrize(
    ("method", "loop", "text"),
    [
        ("fedprox", without_penalty, "'fedprox' adds to the loss, and was shown none; train with rules.loss(loss)"),
        (
            "clip",
            without_hooks,
            "'clip' has a part in every step, and saw none; train inside job.training(optimizer), or step by "
            "rules.step(optimizer)",
        ),
    ],
)
def test_work_without_the_methods_rules_is_not_sent(tmp_path: Path, method: str, loop: Loop, text: str) -> None:
    server, welcomes = begun(tmp_path, method)
    task = parts.to_shareable(server.requests()[0], welcomes["site-1"])
    answer, raised = by_hand.asked(script("site-1", tmp_path, loop), "site-1", task)
    assert answer is None
    assert isinstance(raised, ConfigError)
    assert str(raised) == text
    right = by_hand.answer(script("site-1", tmp_path), "site-1", welcomes["site-1"], server.requests()[0])
    assert isinstance(right, Update)


def test_terms_are_wanted_before_jobs() -> None:
    with pytest.raises(ConfigError, match=r"the server has not named its terms yet; make the client with fednorm\.nvf"):
        Client(net(), [DATA["site-1"]])._settled()


def test_a_server_that_is_not_ours_is_told(tmp_path: Path) -> None:
    _, welcomes = begun(tmp_path, "fedbn")
    answer, raised = by_hand.asked(script("site-1", tmp_path), "site-1", parts.to_shareable(welcomes["site-1"]))
    assert answer == Refusal("the server sent a welcome where a request was expected")
    assert isinstance(raised, WireError)
