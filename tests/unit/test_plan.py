"""What making a plan leaves alone."""

from __future__ import annotations

from dataclasses import replace

import torch

import tiny
from fednorm.core.state import digest
from fednorm.running.config import updated
from fednorm.running.plan import make_plan


def test_the_callers_model_stays_as_it_is() -> None:
    model = tiny.conv_net().float().train()
    before = digest(dict(model.state_dict()))
    plan = make_plan(tiny.config("gn"), model=model, federation=tiny.federation())
    assert next(plan.prepared.model.parameters()).dtype is torch.float64
    assert digest(dict(model.state_dict())) == before
    assert model.training
    tiny.play(plan)
    assert digest(dict(model.state_dict())) == before


def test_precision_switches_are_put_back() -> None:
    """They are torch's own and belong to the whole program."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic
    plan = tiny.plan()
    coarse = replace(plan, config=updated(plan.config, {"engine.precision": "tf32"}))  # a CPU's plan would be refused
    rounds = tiny.Run(coarse, tiny.Store()).rounds()
    next(rounds)
    assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic) == before
    list(rounds)
    assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic) == before
