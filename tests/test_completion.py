"""Shell completion, asked as a shell asks: by environment variables, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fednorm import models
from fednorm.cli.complete import names_of
from fednorm.data.partition import PARTITIONS
from fednorm.data.registry import DATASETS
from fednorm.engines.clock.schedule import SCHEDULES
from fednorm.methods import known_methods
from fednorm.strategies import known_strategies


def completed(line: str) -> list[str]:
    """What bash would offer for the last word of a line."""
    asked = {"_FEDNORM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    command = [sys.executable, "-m", "fednorm"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fednorm run --method fixbn(at=0.5)+glo", ["fixbn(at=0.5)+global-momentum"]),
        ("fednorm run --data fashion", ["fashion_mnist", "fashion_mnist_small"]),
        ("fednorm run --partition dir", ["dir_class", "dir_client"]),
        ("fednorm run --set train.lr", ["train.lr="]),
        ("fednorm run --track w", ["wandb"]),
        ("fednorm run --async fedb", ["fedbuff"]),
        ("fednorm run --times shi", ["shifted"]),
        ("fednorm compare fedavg silo", ["silobn"]),
        ("fednorm inspect resnet1", ["resnet18"]),
        ("fednorm data info usp", ["usps"]),
        ("fednorm comp", ["compare"]),
    ],
)
def test_a_shell_is_offered_names(line: str, offered: list[str]) -> None:
    assert completed(line) == offered


def test_names_are_those_of_the_registries() -> None:
    """They are read from the sources, so that nobody keeps a second list."""
    built_in = {name for name, info in known_methods().items() if info.make.__module__.startswith("fednorm.")}
    assert set(names_of("methods")) == built_in
    assert set(names_of("models")) == set(models.MODELS)
    assert set(names_of("data sets")) == set(DATASETS)
    assert set(names_of("partitions")) == set(PARTITIONS)
    assert set(names_of("strategies")) == set(known_strategies())
    assert set(names_of("schedules")) == set(SCHEDULES.names)


def test_completion_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from fednorm.cli import complete; "
        "names = complete.methods('fedb'), complete.models('resnet1'), complete.datasets('us'), complete.engines('w'); "
        "print(names, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(['fedbn', 'fedbs', 'fedbuff'], ['resnet18'], ['usps'], ['workers']) False\n"


def test_the_script_for_a_shell_can_be_shown() -> None:
    command = [sys.executable, "-m", "fednorm", "--show-completion", "bash"]
    # Which shell the tests run in, if any, is not to matter.
    told = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = subprocess.run(command, env=told, capture_output=True, text=True, check=True).stdout
    assert "_FEDNORM_COMPLETE=complete_bash" in shown
