"""Runs over two real processes that talk through gloo: the bits of one process, and no rank waits for a dead one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ranks_script
from command import ONE_THREAD, TINY, fednorm
from fednorm.core.state import digest
from fednorm.engines.ranks import owned
from fednorm.halves.mine import ClientState
from fednorm.halves.state_bytes import pack_states, unpack_states
from fednorm.running.folder import RunFolder
from fednorm.running.store import Store
from test_cli_signals import EVERY_OTHER, PATIENCE, committed, wait_for_rounds

TESTS = Path(__file__).parent
LONG = (*TINY, *EVERY_OTHER, "--rounds", "60", "--set", "eval.every=60", "--method", "fedbn+local-momentum")


@contextlib.contextmanager
def torchrun(*arguments: object, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Two ranks at work, which do not outlive the test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    path = os.pathsep.join([str(TESTS), *sys.path])
    process = subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=cwd,
        env={**ONE_THREAD, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks; killed, it could not
        process.communicate(timeout=PATIENCE)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def contents(folder: Path) -> dict[str, Any]:
    """All that a run leaves, but for times and for how it ran."""
    store = Store(RunFolder(folder).state)
    try:
        return {
            "model": digest(store.tree("model")),
            "memory": digest(store.tree("memory")),
            "clients": {c: (state.steps, digest(state.tree)) for c, state in store.get_many(store.seen()).items()},
            "rows": [{key: value for key, value in row.items() if key != "seconds"} for row in store.rows()],
            "facts": {name: value for name, value in store.facts().items() if name != "ran"},
        }
    finally:
        store.close()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks played all runs of the script."""
    root = tmp_path_factory.mktemp("ranks")
    with torchrun(TESTS / "ranks_script.py", root, cwd=root) as process:
        code, _, err = ended(process)
    assert code == 0, err
    return root


@pytest.mark.parametrize("name", ranks_script.RUNS)
def test_two_ranks_leave_what_one_process_leaves(name: str, played: Path, tmp_path: Path) -> None:
    ranks_script.play(name, tmp_path / name)
    expected, found = contents(tmp_path / name), contents(played / name)
    for what, value in expected.items():
        assert found[what] == value, what
    if name == "without-one":
        assert all("1" in row["refused"] for row in found["rows"])


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=1e-10, atol=1e-10), key


@pytest.mark.parametrize("name", ranks_script.STACKED)
def test_ranks_train_by_programs_and_merge_over_each_other(name: str, played: Path, tmp_path: Path) -> None:
    """As on GPUs, up to the capture; the reference is one process without any stack."""
    ranks_script.play(name, tmp_path / name, engine__name="sequential")
    reference, found = (Store(RunFolder(root / name).state) for root in (tmp_path, played))
    try:
        for tree in ("model", "memory"):
            assert_close(found.tree(tree), reference.tree(tree))
        assert found.seen() == reference.seen()
        for client, state in reference.get_many(reference.seen()).items():
            assert found.get(client).steps == state.steps
            assert_close(found.get(client).tree, state.tree)
        for row, wanted in zip(found.rows(), reference.rows(), strict=True):
            assert row.get("refused") == wanted.get("refused")
            assert row["train_loss"] == pytest.approx(wanted["train_loss"], rel=1e-9)
            for client, seen in wanted.get("probes", {}).get("train", {}).items():
                assert row["probes"]["train"][client] == pytest.approx(seen, rel=1e-8)
    finally:
        reference.close()
        found.close()
    for rank in (0, 1):
        trained = json.loads((played / f"rank{rank}.json").read_text())["trained"][name]
        # Cohorts that are drawn fall unevenly on the ranks: some are of shapes that come too seldom.
        assert trained["programs"] if name == "stacked-sampled" else trained == {"programs": 4}


MESSAGES = {
    "lock-step": (
        2,
        "'fedtan' needs all clients in lock-step, which cannot be split over ranks; "
        "run it in one process, without torchrun",
    ),
    "union": (
        2,
        "'centralized' trains one model on everybody's data, which leaves other ranks nothing to do; "
        "run it in one process, without torchrun",
    ),
    "own-merge": (
        2,
        "phase 'train' of 'mine' is merged by a rule that joins clients in its own way, which differs by rank; "
        "write it with `weighted_sum` and `largest`, or run it in one process",
    ),
    "diverged": (
        3,
        "diverged in round 1, client 4: 'conv1.weight' is not finite; "
        "lower train.lr, or set engine.quorum to go on without the client",
    ),
    "one-rank-fails": (1, "a ruler broke"),
}


@pytest.mark.parametrize("name", ranks_script.FAILING)
def test_all_ranks_fail_with_the_same_words(name: str, played: Path) -> None:
    ends = [json.loads((played / f"rank{rank}.json").read_text())[name] for rank in (0, 1)]
    assert ends[0] == ends[1]
    assert tuple(ends[0]) == MESSAGES[name]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sums_cross_gpus(tmp_path: Path) -> None:
    with torchrun(TESTS / "ranks_script.py", tmp_path, "gpu", cwd=tmp_path) as process:
        code, _, err = ended(process)
    assert code == 0, err
    for rank in (0, 1):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert told["equal"] == [True, True]
        assert told["far"] < 1e-15


def test_states_of_clients_survive_the_way() -> None:
    states = {
        4: ClientState(3, {"a": torch.randn(2, 3), "n": torch.tensor(5)}),
        7: ClientState(9),
        2: ClientState(1, {"a": torch.randn(2, 3).double()}),
    }
    there = unpack_states(pack_states(states))
    assert [(c, s.steps, digest(s.tree)) for c, s in there.items()] == [
        (c, s.steps, digest(s.tree)) for c, s in states.items()
    ]


@given(st.integers(1, 40), st.integers(1, 9))
def test_every_client_has_one_owner_and_parts_are_even(clients: int, world: int) -> None:
    population = [3 * place for place in range(clients)]
    parts = [[c for c in population if c in owned(population, rank, world)] for rank in range(world)]
    assert [client for part in parts for client in part] == population
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the run that one process plays and nobody stops."""
    done = fednorm("run", *LONG, "--out", tmp_path_factory.mktemp("whole") / "run", "--json", "--quiet")
    assert done.code == 0, done.err
    return done.json["runs"][0]["digest"]


def test_ranks_go_on_after_a_kill_to_the_same_bits(tmp_path: Path, whole: str) -> None:
    with torchrun("-m", "fednorm", "run", *LONG, "--out", "run", cwd=tmp_path) as process:
        wait_for_rounds(process, tmp_path / "run", 3)
        os.kill(int((tmp_path / "run" / ".lock").read_text()), signal.SIGKILL)
        code, _, _ = ended(process)
    assert code != 0
    assert not (tmp_path / "run" / "result.json").exists()
    assert 2 <= committed(tmp_path / "run") < 60
    with torchrun("-m", "fednorm", "resume", "run", "--json", "--quiet", cwd=tmp_path) as process:
        code, out, err = ended(process)
    assert code == 0, err
    assert json.loads(out)["runs"][0]["digest"] == whole


def test_a_stop_is_orderly_and_one_process_can_go_on(tmp_path: Path, whole: str) -> None:
    with torchrun("-m", "fednorm", "run", *LONG, "--out", "run", cwd=tmp_path) as process:
        wait_for_rounds(process, tmp_path / "run", 3)
        process.terminate()
        _, _, err = ended(process)
    rounds = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
    assert 3 <= committed(tmp_path / "run") == rounds < 60
    assert err.count(f"stopped after round {rounds}; continue with: fednorm resume run\n") == 1
    done = fednorm("resume", tmp_path / "run", "--json", "--quiet")
    assert done.json["runs"][0]["digest"] == whole


def test_an_error_is_said_once(tmp_path: Path) -> None:
    with torchrun("-m", "fednorm", "compare", "fedavg", "fedbn", *TINY, cwd=tmp_path) as process:
        code, out, err = ended(process)
    assert (code, out) == (1, "")
    assert err.count("error: a comparison cannot be split over 2 ranks; give torchrun one run at a time\n") == 1
