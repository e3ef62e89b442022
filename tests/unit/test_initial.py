"""Starting from a file: of the model, of a run whose surgery is done, or of something that fits in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fednorm
import tiny
from fednorm.core.state import Tree, digest, model_state
from fednorm.errors import CheckpointError, ConfigError

START = {"rounds": 2, "train__local_steps": 1, "eval__every": 2}


def initial(method: str, path: Path, model: nn.Module | None = None, **more: Any) -> Tree:
    """What a run of a method starts from."""
    return tiny.plan(method, model=model or tiny.conv_net(seed=5), init=str(path), **{**START, **more}).prepared.initial


def saved(tree: Tree, path: Path) -> Path:
    save_file({key: value.contiguous() for key, value in tree.items()}, path)
    return path


def trained(method: str, folder: Path) -> Tree:
    """The final model of a run, whose file is in the folder."""
    settings = {"rounds": 2, "local_steps": 1, "batch_size": 4, "dtype": "float64", "engine.device": "cpu"}
    result = fednorm.run(
        method=method, model=tiny.conv_net(), federation=tiny.federation(), out=folder, lr=0.1, **settings
    )
    return model_state(result.model())


@pytest.mark.parametrize("method", ["fedavg", "gn", "fedwon", "brn"])
def test_a_run_starts_from_the_model_of_a_run_of_its_method(method: str, tmp_path: Path) -> None:
    end = trained(method, tmp_path / "a")
    plan = tiny.plan(method, model=tiny.conv_net(seed=5), init=str(tmp_path / "a" / "model.safetensors"), **START)
    assert digest(plan.prepared.initial) == digest(end)
    assert digest(model_state(plan.prepared.model)) == digest(end)
    assert tiny.play(plan).round == 2


def test_a_file_of_the_model_itself_goes_through_surgery(tmp_path: Path) -> None:
    path = saved(model_state(tiny.conv_net(seed=1)), tmp_path / "m.safetensors")
    assert digest(initial("gn", path)) == digest(tiny.plan("gn", model=tiny.conv_net(seed=1)).prepared.initial)


def test_a_part_is_taken_if_that_is_wanted_and_the_rest_is_named(tmp_path: Path) -> None:
    other = model_state(tiny.conv_net(seed=1))
    head = {"5.weight": torch.zeros(7, 16, dtype=torch.float64), "more": torch.ones(2)}
    kept = {key: value for key, value in other.items() if key != "5.bias"}
    path = saved({**kept, **head}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError) as refusal:
        initial("fedavg", path)
    assert str(refusal.value) == (
        f"'{path}' does not fit the model: '5.weight' has shape (7, 16), expected (3, 16); "
        "give a checkpoint of this model and number of classes, or --init-partial to take what fits"
    )
    for method in ("fedavg", "gn"):
        plan = tiny.plan(method, model=tiny.conv_net(seed=5), init=str(path), init_partial=True, **START)
        assert plan.prepared.notes[-1] == (
            f"started from '{path}': 7 of 9 entries fit; other shape: 5.weight 7x16 for 3x16; "
            "not in the file: 5.bias; not in the model: more"
        )
        assert torch.equal(plan.prepared.initial["0.weight"], other["0.weight"])
        assert torch.equal(plan.prepared.initial["1.weight"], other["1.weight"])
        assert torch.equal(plan.prepared.initial["5.weight"], model_state(tiny.conv_net(seed=5))["5.weight"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"0.bias": torch.zeros(4, dtype=torch.int64)},
            "'0.bias' holds int64 numbers, expected float64; give a file with the model's own numbers",
        ),
        (
            {"1.running_var": torch.full((4,), torch.nan, dtype=torch.float64)},
            "'1.running_var' holds numbers that are not finite; give another file",
        ),
        (
            {"1.running_var": torch.tensor([1.0, -0.25, 1.0, 1.0], dtype=torch.float64)},
            "'1.running_var' is a variance and holds -0.25; give another file",
        ),
        (
            {"1.num_batches_tracked": torch.tensor(5.5)},
            "'1.num_batches_tracked' holds float32 numbers, expected int64; give a file with the model's own numbers",
        ),
        (
            {"1.num_batches_tracked": torch.tensor(-1)},
            "'1.num_batches_tracked' is a counter and holds -1; give another file",
        ),
        (
            {"5.weight": torch.full((3, 16), torch.inf, dtype=torch.float64)},
            "'5.weight' holds numbers that are not finite; give another file",
        ),
    ],
)
@pytest.mark.parametrize("partial", [False, True])
def test_numbers_nobody_can_start_from_are_refused(change: Tree, said: str, partial: bool, tmp_path: Path) -> None:
    path = saved({**model_state(tiny.conv_net()), **change}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError) as refusal:
        initial("fedavg", path, init_partial=partial)
    assert str(refusal.value) == f"'{path}': {said}"


def test_a_file_with_nothing_of_the_model_is_refused(tmp_path: Path) -> None:
    path = saved({"other": torch.zeros(2)}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError) as refusal:
        initial("fedavg", path, init_partial=True)
    assert str(refusal.value) == f"nothing in '{path}' fits the model; give a file with tensors of it"
    with pytest.raises(ConfigError) as refusal:
        tiny.config(init_partial=True)
    assert str(refusal.value) == "init_partial says how to read a file, and none is given; give --init FILE"
