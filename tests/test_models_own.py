"""Models as users bring them: attention, recurrence, texts, random functions; the same numbers in every engine."""

from __future__ import annotations

import re
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fednorm
import own_models
import tiny
from fednorm.core.state import digest
from fednorm.engines.sequential import SequentialEngine
from fednorm.engines.stack.slot import StackSlot
from fednorm.engines.worker_messages import from_message, to_message
from fednorm.errors import ConfigError
from fednorm.halves.habits import Habits
from fednorm.halves.prepared import prepare
from fednorm.methods import parse
from fednorm.models import build
from fednorm.running.run import Run
from fednorm.running.same_program import same_program
from fednorm.running.store import Store
from test_stacked import assert_same_clients, gap

EQUAL = own_models.text((8, 8, 8))
RAGGED = own_models.text((7, 14, 9, 3))
SMALL = {"rounds": 2, "train__local_steps": 1}
TRACED = ("weight norm", "bags", "everything")
"""What has all that a program may stumble upon; the others are traced in the slow tests."""
every_family = pytest.mark.parametrize("name", own_models.NAMES)
every_program = pytest.mark.parametrize(
    "name", [name if name in TRACED else pytest.param(name, marks=pytest.mark.slow) for name in own_models.NAMES]
)


def plan(name: str = "everything", method: str = "fedavg", **changes: Any):
    return tiny.plan(method, model=own_models.make(name), **{"data": EQUAL, **changes})


@every_family
def test_stacked_clients_equal_the_reference(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With dropout: the masks are the same, or nothing else would be."""
    reference, stacked = (tiny.play(plan(name, engine__name=engine)) for engine in ("sequential", "stacked"))
    assert gap(reference, stacked) < 1e-10
    assert not capsys.readouterr().err


@every_program
def test_rounds_on_the_device_equal_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    reference = tiny.play(plan(name, engine__name="sequential", **SMALL))
    stayed = tiny.play(plan(name, engine__name="stacked", **SMALL))
    assert isinstance(stayed.server.held, StackSlot)
    assert stayed.server.held.stack._programs
    assert not stayed.server.held.stack.refused
    assert gap(reference, stayed) < 1e-10


def test_clients_of_unequal_size_keep_what_is_their_own() -> None:
    changes = {"data": RAGGED, "train__local_steps": None, "train__local_epochs": 2, "rounds": 2}
    reference, stacked = (
        tiny.play(plan(method="fedbn", engine__name=engine, **changes)) for engine in ("sequential", "stacked")
    )
    assert gap(reference, stacked) < 1e-10
    assert_same_clients(reference, stacked)


def test_a_restart_and_another_order_change_no_bit() -> None:
    changes: dict[str, Any] = {"data": RAGGED, "rounds": 3, "method": "fedbn"}
    whole = tiny.fingerprint(tiny.play(plan(**changes)))
    store = Store()
    tiny.play(plan(**changes), store, rounds=1)
    assert tiny.fingerprint(tiny.play(plan(**changes), store)) == whole
    changes["data"] = tiny.relabelled(RAGGED, (2, 0, 3, 1))
    assert tiny.fingerprint(tiny.play(plan(**changes))) == whole


@pytest.mark.parametrize("name", [name for name in own_models.NAMES if name != "weight norm"])  # torch does not send it
def test_another_process_draws_the_same_bits(name: str) -> None:
    """A plan as it arrives there, and clients that work in another order."""
    made = plan(name)
    there, phases = from_message(to_message(made))
    (id, phase), numbers = next(iter(phases.items())), made.numbers(next(iter(phases)), 1)
    starts = phase.starts(made.initial(), [{}] * 3, made.device)
    jobs = [made.job(phase, client, start, 0, numbers) for client, start in enumerate(starts)]
    mine = list(SequentialEngine(made).train(made.phase(id), jobs))
    theirs = list(SequentialEngine(there).train(phase, jobs[::-1]))[::-1]
    assert [digest(each.update.shared) for each in mine] == [digest(each.update.shared) for each in theirs]


@pytest.mark.slow
def test_worker_processes_change_no_bit() -> None:
    workers = Run(plan(engine__name="workers", engine__workers=2), Store())
    try:
        list(workers.rounds())
        assert tiny.fingerprint(workers) == tiny.fingerprint(tiny.play(plan(engine__name="sequential")))
    finally:
        workers.engine.close()


def test_random_numbers_do_not_depend_on_torch_s_own_generator() -> None:
    torch.manual_seed(1)
    one = tiny.fingerprint(tiny.play(plan(**SMALL)))
    torch.manual_seed(2)
    assert tiny.fingerprint(tiny.play(plan(**SMALL))) == one
    assert tiny.fingerprint(tiny.play(plan(seed=1, **SMALL)))["server"] != one["server"]


# --- what a model is seen to do --------------------------------------------------------------------------------------


def test_models_of_known_layers_are_not_tried() -> None:
    for model in (tiny.conv_net(), tiny.residual_net(), nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(36, 3))):
        assert tiny.plan(model=model.double()).habits == Habits()


def test_only_what_draws_is_watched_in_training() -> None:
    assert plan("attention without dropout").habits == Habits(draws=False, special=True)
    assert plan("functional dropout").habits == Habits(draws=True, special=True)


class Shuffling(nn.Module):
    """It draws in a way that has no stand-in."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, tiny.NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1)[:, torch.randperm(36)])


class Packing(nn.Module):
    """It reads texts of their own lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(own_models.VOCABULARY, 4)
        self.lstm = nn.LSTM(4, 3, 2, dropout=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = torch.full((len(tokens),), tokens.shape[1] - 1)
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True)
        return self.lstm(packed)[1][0][-1]


@pytest.mark.parametrize(
    ("model", "data", "why"),
    [
        (Shuffling(), tiny.federation((8, 8, 8)), "vmap: called random operation while in randomness error mode"),
        (Packing(), EQUAL, "packed sequences have lengths of their own in every batch"),
    ],
    ids=["randperm", "packed"],
)
def test_what_cannot_be_stacked_says_so_and_is_reproducible(
    model: nn.Module, data: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        tiny.play(tiny.plan(model=model.double(), data=data, engine__name=engine, **SMALL))
        for engine in ("sequential", "sequential", "stacked")
    ]
    assert len({tiny.fingerprint(run)["server"] for run in runs}) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"stacked engine: the model cannot be mapped over clients ({why}")
    assert lines[0].endswith("; using sequential")


def test_recurrent_models_of_two_seeds_are_one_program() -> None:
    one, other = (tiny.plan(model=own_models.make("lstm"), data=EQUAL, seed=seed) for seed in (0, 1))
    assert same_program(one, other)


# --- several outputs -------------------------------------------------------------------------------------------------


@dataclass
class Returned:
    logits: Tensor


class Several(nn.Module):
    """It returns its logits in some structure."""

    def __init__(self, structure: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm2d(1)
        self.head = nn.Linear(36, tiny.NUM_CLASSES)
        self.structure = structure

    def forward(self, x: Tensor) -> Any:
        logits = self.head(self.norm(x).flatten(1))
        return self.structure(logits, x)


def as_tuple(logits: Tensor, x: Tensor) -> Any:
    return logits, x


def as_dict(logits: Tensor, x: Tensor) -> Any:
    return {"hidden": x, "logits": logits}


def as_object(logits: Tensor, x: Tensor) -> Any:
    return Returned(logits)


def plainly(logits: Tensor, x: Tensor) -> Any:
    return logits


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize(("structure", "which"), [(as_tuple, 0), (as_tuple, -2), (as_dict, "logits"), (plainly, 0)])
def test_one_of_several_outputs_is_chosen_in_one_line(structure: Any, which: int | str, engine: str) -> None:
    model = Several(structure).double()
    adapted = fednorm.output(model, which)
    assert adapted.state_dict().keys() == model.state_dict().keys()
    assert not model._forward_hooks
    runs = [
        tiny.play(tiny.plan("fedbn", model=each, engine__name=engine, **SMALL))
        for each in (Several(plainly).double(), adapted)
    ]
    assert tiny.fingerprint(runs[0]) == tiny.fingerprint(runs[1])


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        (as_tuple, "a tuple of 2, of which classification takes one; say which: fednorm.output(model, 0)"),
        (
            as_dict,
            "a dict with 'hidden', 'logits', of which classification takes one; say which: "
            "fednorm.output(model, 'logits')",
        ),
        (as_object, "a Returned, which classification does not take; return a tensor, or a tuple or dict of tensors"),
    ],
)
def test_outputs_that_a_task_does_not_take_are_refused_before_the_first_round(structure: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'the model (Several) returns {text}')}$"):
        tiny.plan(model=Several(structure).double())


@pytest.mark.parametrize(
    ("structure", "which", "text"),
    [
        (as_tuple, 2, "Several has no output 2; it returns 2 of them, counted from 0; give one of those"),
        (as_dict, "logit", "Several has no output 'logit'; it returns 'hidden', 'logits'; give one of those"),
    ],
)
def test_an_output_that_is_not_there_is_refused(structure: Any, which: int | str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(text)} to fednorm.output$"):
        tiny.plan(model=fednorm.output(Several(structure).double(), which))


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_the_built_in_text_model_learns_from_tokens(engine: str) -> None:
    x = torch.cat([torch.randint(1, 6, (30, 6)), torch.randint(6, 11, (30, 6))])  # two topics with words of their own
    y = torch.arange(60) // 30
    result = fednorm.run(
        model="text_lstm(vocabulary=11,width=4,depth=2,dropout=0.2)",
        clients=[(x[::2], y[::2]), (x[1::2], y[1::2])],
        test=(x, y),
        method="fedbn",
        engine=engine,
        rounds=5,
        batch_size=10,
        device="cpu",
    )
    (run,) = result.runs
    assert run["final"]["pooled"]["accuracy"] > 90


def test_a_model_of_texts_refuses_images() -> None:
    text = (
        "model 'text_lstm' takes texts as rows of whole numbers, 0 for padding; the data is torch.float64 of shape "
        "(1, 6, 6) an example"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        tiny.plan(model=build("text_lstm", num_classes=3, width=2))


def test_pixels_of_texts_are_not_moved() -> None:
    text = (
        "train.augment='flip' moves the pixels of images (channels, height, width), but an example of 'own data' has "
        "shape (5,); use train.augment=none"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        plan("lstm", train__augment="flip")


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (
            nn.Embedding(5, 2, sparse=True),
            "layer '0' (Embedding) has sparse=True, whose gradients cannot be merged; build it without",
        ),
        (
            nn.EmbeddingBag(5, 2, max_norm=1.5),
            "layer '0' (EmbeddingBag) has max_norm=1.5, which changes its weights as it looks them up; "
            "build it without",
        ),
    ],
)
def test_embeddings_with_odd_settings_are_refused(layer: nn.Module, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        prepare(nn.Sequential(layer, nn.Linear(2, 2)), parse("fedavg"))


def test_a_method_for_batch_norms_says_that_a_transformer_has_none() -> None:
    encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    with pytest.raises(ConfigError, match="'fedbn' finds no BatchNorm layer to act on in the model and would equal"):
        prepare(nn.Sequential(encoder, nn.Flatten(), nn.Linear(20, 3)), parse("fedbn"))


def test_the_example_of_texts_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[1] / "examples" / "own_text.py"))
    shares = [re.match(r"(fedavg|fedbn): (\d+) % of the clients' own sentences", line) for line in _lines(capsys)]
    assert [share[1] for share in shares if share] == ["fedavg", "fedbn"]
    assert all(int(share[2]) > 40 for share in shares if share)


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()
