"""FedRevive on Fashion-MNIST: eight clients' models, no data at the server, and what a student learns of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.state import Tree
from fednorm.core.strategy import Arrived
from fednorm.halves.training import Trainer
from fednorm.running.config import RunConfig, updated
from fednorm.running.known import known_context
from fednorm.running.plan import Plan, make_plan
from fednorm.strategies.revive.server_step import ServerStep
from fednorm.strategies.revive.settings import Settings
from fednorm.strategies.revive.teachers import Teacher

CLIENTS = 8
VERSIONS, WARMUP = 14, 6
# A generator an eighth as wide and smaller batches than published, and FEMNIST's weight of the feature loss.
SETTINGS = Settings(
    freeze=0, warmup=WARMUP, width=16, batch=32, feature=0.3, crop=2, kd_batch=8, kd_lr=3e-4, teachers=CLIENTS
)
CONFIG = {
    "method": "tracker",
    "model": "fedbs_mnist_cnn",
    "data.name": "fashion_mnist_small",
    "data.clients": CLIENTS,
    "data.partition": "dir_client(alpha=0.5)",
    "train.local_steps": 40,
    "train.batch_size": 32,
    "train.optimizer": "adam",
    "train.lr": 1e-3,
    "train.momentum": 0.0,
    "engine.device": "cpu",
    "rounds": 1,
}


@dataclass(frozen=True)
class Learned:
    """What came of some versions: the feature loss before a version's first step, and agreement in percent."""

    features: list[float]
    before: float
    after: float


def arrivals(plan: Plan) -> list[Arrived]:
    """Every client's model after its local work on the model as it starts."""
    phase, start = plan.phase(PhaseId(Purpose.TRAIN)), plan.initial()
    sent, numbers = phase.start(start, {}, plan.device), plan.numbers(phase.id, 1)
    jobs = [plan.job(phase, client, sent, 0, numbers) for client in range(CLIENTS)]
    updates = [done.update for done in Trainer(plan).train(phase, jobs)]
    return [Arrived(n, 0, 0, each.report, each.shared, each.reported, start, {}) for n, each in enumerate(updates)]


@torch.no_grad()
def agreement(step: ServerStep, student: Tree, teachers: list[Teacher], x: torch.Tensor) -> float:
    """In how many percent of images a student says what a teacher says, on average over the teachers."""
    said = step.network(student, x).argmax(1)
    same = [(step.network(each.tree, x, each.mode).argmax(1) == said).double().mean() for each in teachers]
    return 100 * float(torch.stack(same).mean())


def learn(seed: int) -> Learned:
    """Some versions of FedRevive's server step, each on the student that the one before left."""
    plan = make_plan(updated(RunConfig(), {**CONFIG, "seed": seed}))
    step = ServerStep(SETTINGS, known_context(plan))
    recall, student = step.begin(), plan.initial()
    for each in arrivals(plan):
        step.take(recall, each)
    x = plan.batches.inputs(plan.federation.test_x)
    teachers, before = list(recall.teachers), agreement(step, student, list(recall.teachers), x)
    keys = [key for key, entry in plan.prepared.facts.entries.items() if entry.trainable]
    features: list[float] = []
    for version in range(VERSIONS):
        features.append(step.synthesise(recall, student, student, version).losses[0]["feature"])
        if version >= WARMUP:
            student = {**student, **step.distil(recall, student, keys, version).trained}
    return Learned(features, before, agreement(step, student, teachers, x))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_feature_loss_halves_and_the_student_learns_what_teachers_say(seed: int) -> None:
    found = learn(seed)
    told = f"feature loss {found.features}, agreement {found.before:.1f} -> {found.after:.1f} %"
    print(told)
    assert found.features[-1] <= found.features[0] / 2, told
    assert found.after >= found.before + 10, told
