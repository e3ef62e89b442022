"""The stacked engine against the reference: the same numbers, for every method, ragged clients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tiny
from fednorm.engines.stack.stacked import StackTrainer
from fednorm.methods import known_methods
from fednorm.running.run import Run
from fednorm.running.store import Store

PAIRS = ("fixbn+global-momentum", "fedwon+fedprox", "fedbn+fedadam", "fedbs+gn", "gn+ws", "fixbn(at=window,window=2)")


def gap(left: Run, right: Run) -> float:
    """The largest difference of the two servers, relative to the size of each tensor."""
    worst = 0.0
    for key, value in left.server.tree.items():
        scale = value.double().abs().max().clamp_min(1e-3)
        worst = max(worst, float((value.double() - right.server.tree[key].double()).abs().max() / scale))
    return worst


def assert_same_clients(left: Run, right: Run) -> None:
    """Every client has used as many batches in both, and keeps the same."""
    for client in left.store.seen():
        mine, theirs = left.store.get(client), right.store.get(client)
        assert mine.steps == theirs.steps
        assert mine.tree.keys() == theirs.tree.keys()
        for key, value in mine.tree.items():
            assert torch.allclose(value, theirs.tree[key], rtol=1e-8, atol=1e-10), (client, key)


def both(method: str, **changes: object) -> tuple[Run, Run]:
    runs = [tiny.play(tiny.plan(method, engine__name=name, **changes)) for name in ("sequential", "stacked")]
    return runs[0], runs[1]


@pytest.mark.parametrize("method", [*known_methods(), *PAIRS])
def test_stacked_equals_sequential_after_fifty_steps(method: str) -> None:
    equal = tiny.federation((8, 8, 8))  # lock-step methods need equal batches
    reference, stacked = both(method, data=equal, rounds=10, train__local_steps=5, train__lr=0.02, eval__every=10)
    assert gap(reference, stacked) < 1e-10
    assert_same_clients(reference, stacked)


def test_float32_agrees_after_one_step() -> None:
    reference, stacked = both("fedavg", rounds=1, train__local_steps=1, train__dtype="float32")
    assert gap(reference, stacked) < 1e-5


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "local-momentum", "posthoc"])
def test_ragged_clients_see_exactly_their_own_batches(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Unequal sizes give unequal numbers of steps and trailing partial batches."""
    ragged = tiny.federation((7, 14, 9, 3))  # in the first step three clients have full batches, one has not
    reference, stacked = both(method, data=ragged, rounds=3, train__local_steps=None, train__local_epochs=2)
    assert gap(reference, stacked) < 1e-10
    assert not capsys.readouterr().err, "it was the stack that played, and nothing in its place"


def test_reports_and_probes_agree() -> None:
    probes = ("grad-norm", "drift", "running-var")
    made = [tiny.plan("fedprox", engine__name=name, eval__probes=probes) for name in ("sequential", "stacked")]
    rows = [list(Run(each, Store()).rounds())[-1] for each in made]
    assert rows[0]["train_loss"] == pytest.approx(rows[1]["train_loss"], rel=1e-10)
    for client, seen in rows[0]["probes"]["train"].items():
        assert rows[1]["probes"]["train"][client] == pytest.approx(seen, rel=1e-8)


def test_a_cohort_larger_than_memory_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stack does not fit, halves are tried, and the result is the same."""
    tried: list[int] = []
    whole = StackTrainer._train_stack

    def scarce(self: StackTrainer, phase, jobs, probing):
        tried.append(len(jobs))
        if len(jobs) > 2:
            raise torch.OutOfMemoryError("scarce")
        return whole(self, phase, jobs, probing)

    data = tiny.federation((8, 8, 8, 8, 8))
    reference = tiny.play(tiny.plan("fedavg", data=data, rounds=2))
    monkeypatch.setattr(StackTrainer, "_train_stack", scarce)
    split = tiny.play(tiny.plan("fedavg", data=data, rounds=2, engine__name="stacked"))
    assert gap(reference, split) < 1e-10
    assert tried == [5, 2, 2, 1, 2, 2, 1]


class DataDependent(nn.Module):
    """A network that looks at its numbers to decide what to do, which no mapping can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(1), nn.Linear(36, tiny.NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.head(x.flatten(1) if x.sum() > 0 else -x.flatten(1))


def test_a_model_that_cannot_be_mapped_falls_back_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = DataDependent().double()
    reference, stacked = both("fedavg", model=model, rounds=2)
    assert tiny.fingerprint(reference)["server"] == tiny.fingerprint(stacked)["server"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("stacked engine: the model cannot be mapped over clients (vmap:")
    assert lines[0].endswith("; using sequential")
