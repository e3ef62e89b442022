"""Items that change from read to read are read anew, keyed: equal in every engine, and after a restart."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fednorm
import noisy
import tiny
from fednorm.data.client_facts import federation_facts, held
from fednorm.data.digest import data_digests
from fednorm.data.federation import Federation
from fednorm.data.given import from_clients, from_pool
from fednorm.errors import ConfigError, UserCodeError
from fednorm.running.plan import Plan
from fednorm.running.store import Store


def federation(
    kind: type[noisy.Plain] = noisy.Noisy, test: type[noisy.Plain] = noisy.Plain, **options: Any
) -> Federation:
    return from_clients(noisy.clients(kind), noisy.held_out(test), num_classes=tiny.NUM_CLASSES, **options)


def plan(method: str = "fedavg", *, data: Federation | None = None, **changes: Any) -> Plan:
    return tiny.plan(method, data=data or federation(), **{"engine__loaders": 0, **changes})


def played(method: str = "fedavg", **changes: Any) -> dict[str, Any]:
    return tiny.fingerprint(tiny.play(plan(method, **changes)))


def ended(*processes: BaseProcess) -> bool:
    """Whether processes have ended; one that was told to may need a core for that, and those may be taken."""
    for process in processes:
        process.join(60)
    return not any(process.is_alive() for process in processes)


# -- which way data are read --


def test_the_way_of_reading_is_found_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    once = federation(noisy.Plain)
    assert once.live is None
    assert once.notes == ("own data: training items are equal in every read, so they are read once into memory",)
    assert capsys.readouterr().err == f"{once.notes[0]}\n"
    anew = federation(noisy.Noisy)
    assert anew.live is not None
    assert anew.notes == ("own data: training items change from read to read, so they are read anew in every epoch",)


def test_the_way_of_reading_can_be_chosen() -> None:
    once, anew = federation(read="once"), federation(noisy.Plain, read="anew")
    assert once.live is None
    assert anew.live is not None
    assert once.notes[0] == "own data: training items are read once into memory, as asked"
    assert anew.notes[0] == "own data: training items are read anew in every epoch, as asked"


def test_data_larger_than_the_limit_stay_where_they_are() -> None:
    data = federation(noisy.Plain, memory_limit=2000)
    needed = "need 0.0 MB, more than the limit of 0.0 MB, so they are read anew in every epoch"
    assert data.notes == (f"own data: training items {needed}", f"own data: test items {needed}")
    assert (len(data.x), len(data.test_x), data.num_tests) == (0, 0, 18)


def test_items_that_no_seed_repeats_are_told_of() -> None:
    assert federation(noisy.Stateful).notes == (
        "own data: training items change from read to read, even with equal seeds, so that runs do not repeat "
        "(draw from torch's own generator), so they are read anew in every epoch",
    )


def test_reading_leaves_the_programs_own_random_numbers_alone() -> None:
    made = plan()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny.play(made)
    assert torch.equal(torch.rand(3), expected)


def test_labels_are_had_from_the_data_set_or_by_reading_once() -> None:
    listed = noisy.clients(noisy.Noisy)
    for each in listed:
        each.targets = each.y.tolist()  # type: ignore[attr-defined]
    reads = [each.reads for each in listed]
    test = noisy.held_out(noisy.Plain)
    labels = torch.cat([each.y for each in listed])
    assert torch.equal(from_clients(listed, test).y, labels)
    assert all(each.reads - before < 50 for each, before in zip(listed, reads, strict=True))
    found = from_clients(noisy.clients(noisy.Noisy), test)
    assert torch.equal(found.y, labels)
    assert found.notes[0].endswith("; they were read once to know their labels")
    assert len(from_clients(noisy.clients(noisy.Noisy), test, num_classes=3).y) == 0


# -- what is read --


def test_an_item_is_new_in_every_epoch_and_the_same_in_every_read() -> None:
    batches = plan(train__batch_size=8).batches
    first, again, later = batches.batch(0, 0), batches.batch(0, 0), batches.batch(0, 1)
    assert torch.equal(first[0], again[0])
    order = [batches.stream(0).batch(k).argsort() for k in (0, 1)]
    assert not torch.equal(first[0][order[0]], later[0][order[1]])
    assert torch.equal(first[1][order[0]], later[1][order[1]])


def test_equal_items_give_the_bits_of_data_in_memory() -> None:
    anew = played(data=federation(noisy.Plain, noisy.Plain, memory_limit=0), data__val_fraction=0.25)
    assert anew == played(data=tiny.federation(), data__val_fraction=0.25)


def test_augmentation_goes_on_top_of_what_was_read() -> None:
    anew = played(data=federation(noisy.Plain, memory_limit=0), train__augment="crop(1)+flip")
    assert anew == played(data=tiny.federation(), train__augment="crop(1)+flip")


def test_test_items_are_the_same_in_every_evaluation() -> None:
    data = federation(noisy.Plain, noisy.Noisy, memory_limit=0)
    assert data.live_test is not None

    def inputs() -> Tensor:
        return torch.cat([x for x, _ in data.live_test.parts(None, 4)])  # type: ignore[union-attr]

    assert torch.equal(inputs(), inputs())
    assert torch.equal(inputs(), federation(noisy.Plain, noisy.Noisy).test_x)


# -- the same everywhere --


@pytest.mark.parametrize("method", ["silobn", "fedtan", "centralized", "posthoc"])
def test_the_stack_and_reading_processes_change_nothing(method: str) -> None:
    changes = {"rounds": 2, "data__val_fraction": 0.25, "eval__probes": ("grad-norm",)}
    here = tiny.play(plan(method, **changes))
    assert played(method, engine__loaders=2, **changes) == tiny.fingerprint(here)
    stacked = tiny.play(plan(method, engine__name="stacked", engine__loaders=1, **changes))
    for key, value in stacked.server.tree.items():
        torch.testing.assert_close(value, here.server.tree[key], rtol=1e-9, atol=1e-11)
    assert ended(*multiprocessing.active_children())  # also while what was played is still there


@pytest.mark.slow
def test_workers_give_the_bits_of_the_sequential_engine() -> None:
    data = federation()
    workers = tiny.play(plan(data=data, engine__name="workers", engine__workers=2))
    assert not workers.engine.fell_back
    assert tiny.fingerprint(workers) == played(data=data)


def test_a_data_set_that_cannot_be_sent_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    clients = noisy.clients(noisy.Noisy)
    clients[0].transform = lambda x: x  # type: ignore[attr-defined]
    data = from_clients(clients, noisy.held_out(noisy.Plain), num_classes=tiny.NUM_CLASSES)
    capsys.readouterr()
    assert played(data=data, engine__name="workers", engine__workers=2) == played(data=data)
    said = capsys.readouterr().err
    assert said.startswith("workers engine: the data set cannot be sent to another process (")
    assert said.endswith(
        "): transforms must be functions or classes that a module defines, no lambdas; using sequential\n"
    )


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_run_goes_on_as_if_it_had_never_stopped(loaders: int) -> None:
    store = Store()
    tiny.play(plan("silobn", engine__loaders=loaders), store, rounds=2)
    assert tiny.fingerprint(tiny.play(plan("silobn", engine__loaders=loaders), store)) == played("silobn")


def test_newcomers_take_statistics_from_data_that_are_read() -> None:
    anew = federation(noisy.Plain, memory_limit=0, unseen=1)
    assert played("fedbn+adabn", data=anew) == played("fedbn+adabn", data=federation(noisy.Plain, unseen=1))


def test_one_data_set_is_dealt_and_read_anew() -> None:
    whole = noisy.Noisy(*tiny.examples(40, 0.0, 1))
    data = from_pool(whole, tiny.examples(9, 0.0, 2), partition="dir_class(alpha=1)", num_clients=3, seed=1)
    assert data.live is not None
    assert sum(data.sizes.tolist()) == 40
    assert played(data=data) == played(data=data, engine__loaders=2)


def test_digests_of_what_is_read_show_other_data() -> None:
    other = noisy.clients(noisy.Noisy)
    other[1].x[3] += 1
    before = data_digests(federation())
    after = data_digests(from_clients(other, noisy.held_out(noisy.Plain), num_classes=tiny.NUM_CLASSES))
    assert before == data_digests(federation())
    assert [name for name in before if before[name] != after[name]] == ["training inputs"]


def test_a_result_says_how_its_data_were_read() -> None:
    data = federation()
    result = fednorm.run(
        federation=data, model=tiny.conv_net(), rounds=1, local_steps=1, dtype="float64", device="cpu", loaders=0
    )
    assert result.runs[0]["notes"] == list(data.notes)


# -- when something goes wrong --


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (
            "regression",
            "own data is read anew in every epoch, with targets for classification; "
            "for regression give from_clients(..., task='regression')",
        ),
        (
            "classification(weights=balanced)",
            "task 'classification(weights=balanced)': own data is read anew in every epoch and does not list its "
            "labels, which weights by class need; leave num_classes to be found, or give the weights themselves",
        ),
    ],
)
def test_a_task_that_needs_more_than_can_be_read_is_refused(task: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(task=task)
    assert str(refused.value) == text


def test_data_that_are_read_cannot_be_looked_at_as_a_whole() -> None:
    with pytest.raises(ConfigError) as refused:
        federation_facts(federation())
    assert str(refused.value) == (
        "own data is not kept in memory, which a look at what clients hold needs; read it with read='once'"
    )
    assert [entry["size"] for entry in held(federation())] == [8, 12, 9]


@pytest.mark.parametrize("loaders", [0, 1])
def test_an_item_that_cannot_be_read_is_named(loaders: int) -> None:
    data = federation(noisy.Broken, read="anew")
    with pytest.raises(UserCodeError) as refused:
        tiny.play(plan(data=data, engine__loaders=loaders))
    assert str(refused.value) in {
        f"client {client}, item 5: reading it failed with OSError: no such file: image_5.png" for client in range(3)
    }


def test_labels_and_numbers_are_looked_at_when_they_are_read() -> None:
    data = federation(noisy.Plain, read="anew")
    data.live.sources[0].dataset.y[:] = 7  # type: ignore[union-attr]
    with pytest.raises(ConfigError) as refused:
        tiny.play(plan(data=data))
    assert str(refused.value).endswith(": label 7 is not one of the 3 classes; number them 0 to 2")
    data.live.sources[0].dataset.x[:] = float("nan")  # type: ignore[union-attr]
    with pytest.raises(ConfigError) as refused:
        tiny.play(plan(data=data))
    text = ": the input has numbers that are not finite; replace or leave out what is missing"
    assert str(refused.value).endswith(text)


def test_a_reading_process_that_is_killed_is_not_missed(capsys: pytest.CaptureFixture[str]) -> None:
    data = federation()
    rows = data.live.with_loaders(1)  # type: ignore[union-attr]
    batches = [(torch.arange(4), torch.tensor(key)) for key in range(8)]
    expected = [x for x, _ in data.live.each(batches)]  # type: ignore[union-attr]
    found: list[Tensor] = []
    for number, (x, _) in enumerate(rows.each(batches)):
        found.append(x)
        if number == 1:
            (reader,) = rows._queue._loader._iterator._workers  # type: ignore[union-attr]
            os.kill(reader.pid, signal.SIGKILL)
            reader.join()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert "; reading goes on in this one\n" in capsys.readouterr().err


def test_reading_processes_end_with_their_data() -> None:
    data = federation()
    rows = data.live.with_loaders(1)  # type: ignore[union-attr]
    list(rows.parts(None, 4))
    (reader,) = rows._queue._loader._iterator._workers  # type: ignore[union-attr]
    rows.cycle = rows  # type: ignore[attr-defined]
    del rows, data
    gc.collect()
    assert ended(reader)


@pytest.mark.slow
def test_memory_stays_bounded_for_a_set_that_is_larger(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import resource, torch, fednorm
        from torch.utils.data import Dataset

        class Large(Dataset):
            def __len__(self): return 300
            def __getitem__(self, index): return torch.full((256, 1024), float(index % 2)), index % 2

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.out = torch.nn.Linear(1, 2)
            def forward(self, x): return self.out(x.mean((1, 2))[:, None])

        data = fednorm.from_clients([Large(), Large()], Large(), num_classes=2, memory_limit=10**8)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = fednorm.run(model=Net(), federation=data, rounds=1, local_steps=10, device="cpu", batch_size=10,
                             engine="sequential", **{"eval.chunk": 50, "engine.loaders": 0})
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        """
    )
    (tmp_path / "large.py").write_text(script)
    done = subprocess.run([sys.executable, "large.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    # One MB an example: 900 MB in all, 50 examples at a time, of which some copies are made on the way.
    assert int(done.stdout.splitlines()[-1]) < 300 << 10
