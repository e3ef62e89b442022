"""What a recipe writes: filters in their chains, digests that are no secrets, no job that would wait for ever."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.fuel.utils.secret_utils import PotentialSecretWarning
from nvflare.recipe.sim_env import SimEnv
from simulated import HERE, own_files, tiny

from command import fednorm
from fednorm.errors import ConfigError
from fednorm.files import read_json
from fednorm.nvflare import EdgeRecipe, Recipe
from fednorm.nvflare.setup import Setup, in_groups

pytestmark = pytest.mark.nvflare

FEDBN = HERE.parents[1] / "examples" / "nvflare" / "fedbn.toml"


def chains(recipe: Recipe, folder: Path, which: str) -> dict[str, list[str]]:
    """The filters that sites have for each task, in order."""
    recipe.export(str(folder))
    said = read_json(folder / recipe.name / "app" / "config" / "config_fed_client.json")[which]
    assert all(len(chain["tasks"]) == 1 for chain in said)
    return {chain["tasks"][0]: [each["path"].rpartition(".")[2] for each in chain["filters"]] for chain in said}


@pytest.mark.parametrize(
    ("tasks", "filtered"),
    [
        (None, ["train"]),
        ([], ["train"]),
        (["train"], ["train"]),
        (["*"], ["train", "fednorm_hello"]),
        (["train", "fednorm_hello"], ["train", "fednorm_hello"]),
    ],
    ids=str,
)
def test_a_users_filter_stands_before_ours_and_is_never_left_out(
    tasks: list[str] | None, filtered: list[str], tmp_path: Path
) -> None:
    """NVFlare itself takes `*` for the name of a task that never comes, and calls such a filter never."""
    both = ["PercentilePrivacy", "SharingFilter"]
    expected = {task: both if task in filtered else both[1:] for task in ("train", "fednorm_hello")}
    recipe = Recipe(config=tiny())
    recipe.add_client_output_filter(PercentilePrivacy(), tasks)
    recipe.add_client_input_filter(PercentilePrivacy(), tasks)
    assert chains(recipe, tmp_path / "out", "task_result_filters") == expected
    assert chains(recipe, tmp_path / "in", "task_data_filters") == expected  # written twice, guarded once


def test_filters_that_would_not_be_called_are_refused(tmp_path: Path) -> None:
    recipe = Recipe(config=tiny())
    with pytest.raises(ConfigError, match="task 'validate' is not known; known: fednorm_hello, train"):
        recipe.add_client_output_filter(PercentilePrivacy(), ["validate"])
    recipe.export(str(tmp_path))
    with pytest.raises(ConfigError, match="the job was written already, with fednorm's filter at the end; add filters"):
        recipe.add_client_output_filter(PercentilePrivacy())
    edge = EdgeRecipe(config=tiny(), devices_per_leaf=2)
    for add in (edge.add_client_input_filter, edge.add_client_output_filter):
        with pytest.raises(ConfigError, match="PercentilePrivacy would never be called: NVFlare's filters do not see"):
            add(PercentilePrivacy())


def test_the_digest_of_own_files_is_no_secret_to_nvflare(tmp_path: Path) -> None:
    """It warns of long rows of hex digits in a job, and prints that even where warnings are errors."""
    recipe = Recipe(method="fedbn", model="mlp_bn(width=16)", data=f"npz:{own_files(tmp_path)}", num_rounds=1)
    digest = recipe.setup.config.data.digest
    assert digest is not None
    assert len(digest) >= 32
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        recipe.export(str(tmp_path / "job"))
    assert [str(each.message) for each in told if issubclass(each.category, PotentialSecretWarning)] == []
    said = recipe.setup.to_json()
    assert said["config"]["data"]["digest"] == in_groups(digest)
    assert Setup.from_json(said) == recipe.setup


@pytest.mark.parametrize("make", [Recipe, EdgeRecipe])
def test_a_simulator_with_too_few_sites_is_refused_at_once(make: Any, tmp_path: Path) -> None:
    given = {"min_clients": 3} if make is Recipe else {"leaves": 3, "devices_per_leaf": 1}
    recipe = make(model="mlp_bn", data={"name": "fashion_mnist_small", "train_limit": 60}, **given)
    with pytest.raises(ConfigError) as caught:
        recipe.execute(SimEnv(num_clients=2, workspace_root=str(tmp_path)))
    assert str(caught.value) == "the simulator has num_clients=2, and the run waits for 3; give it as many"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("jobs", "--name", "a/b"), "error: name='a/b' must start with a letter or digit and may contain only letters"),
        (("jobs", "--sites", "a,a"), "error: sites= names 1 sites, the data are of 2 clients; name as many"),
        (("/proc/nowhere",), "error: '/proc/nowhere/fednorm' cannot be written: No such file or directory; choose"),
    ],
    ids=["name", "sites", "place"],
)
def test_what_cannot_be_exported_is_told_in_one_line(
    words: tuple[str, ...], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = fednorm("nvflare", "export", FEDBN, *words)
    assert (done.code, len(done.err.splitlines()), done.out) == (2, 1, "")
    assert done.err.startswith(error)
    assert list(tmp_path.iterdir()) == []
