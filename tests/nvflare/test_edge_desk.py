"""The server of a run on devices: the simulator's bits, versions and staleness, refusals in one line, a restart."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

import torch
from edge_desk import Played, small

from fednorm.core.state import digest
from fednorm.errors import ConfigError, QuorumError
from fednorm.halves.messages import Update
from fednorm.nvflare.edge.packing import decode, encode
from fednorm.running.plan import make_plan
from fednorm.running.run import Run
from fednorm.running.store import Store

pytestmark = pytest.mark.nvflare


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "silobn", "fixbn", "fedadam+decoupled", "posthoc", "sync+fedbn"])
def test_devices_in_step_have_the_bits_of_the_simulator(tmp_path: Path, method: str) -> None:
    torch.set_num_threads(1)
    played = Played(tmp_path, method=method, num_versions=3)
    played.play()
    plain = method.removeprefix("sync+")
    config = small(**{"method": plain, "rounds": 3, "data.clients": 4, "engine.name": "sequential"})
    run = Run(make_plan(config), Store())
    rows = list(run.rounds())
    assert digest(played.desk.tree) == digest(run.server.tree)
    states = run.store.get_many(range(4))
    assert [digest(played.kept(number)) for number in range(4)] == [digest(states[n].tree) for n in range(4)]
    told = [json.loads(line) for line in (tmp_path / "records" / "metrics.jsonl").read_text().splitlines()]
    for row, ours in zip(told, rows, strict=True):
        for name in ("round", "stage", "lr", "clients", "bytes_up", "bytes_down", "train_loss", "train_loss_weighted"):
            assert row[name] == ours[name], name
        assert row.get("staleness", [0] * 4) == [0] * 4
    own, theirs = told[-1]["eval"]["own_client"], rows[-1]["eval"]["own_client"]
    assert own == json.loads(json.dumps(theirs))


def test_base_versions_and_staleness_are_those_of_what_a_device_was_sent(tmp_path: Path) -> None:
    played = Played(tmp_path, devices=3, method="fedbuff(b=1)+fedbn", num_versions=9)
    played.work()
    played.report()
    slow, quick = "site-1#0", "site-1#1"
    assert {played.job(device).sheet for device in played.devices} == {"train.0.0-1-1"}
    for _ in range(3):
        played.work(quick)
        played.report()
    assert played.job(slow).sheet == "train.0.0-1-1"
    before = played.desk.version
    played.work(slow)
    played.report()
    assert played.desk.version == before + 1
    assert [(row["cohort"], row["staleness"]) for row in played.rows] == [
        *[([1], [0])] * before,
        ([0], [before]),
    ]


def test_no_local_entry_is_in_what_the_server_is_sent_and_its_schema_stays_whole(tmp_path: Path) -> None:
    played = Played(tmp_path, method="fedbn", num_versions=2)
    whole = {key: (value.shape, value.dtype) for key, value in played.recipe.setup.network().state_dict().items()}
    local = set(whole)
    played.work()
    played.report()
    for device in played.devices:
        id, data = played.done(device) or (0, b"")
        sheet = played.desk.jobs.request(played.job(device))
        answer = decode(data, sheet.tree)
        assert isinstance(answer, Update)
        local -= answer.shared.keys() | sheet.tree.keys()
        assert not answer.reported
        played.leaf.hear({"said": {device: (id, data)}})
    assert len(local) == 10
    played.play()
    assert {key: (value.shape, value.dtype) for key, value in played.desk.tree.items()} == whole
    assert set(played.kept(0)) == local


def test_each_device_keeps_its_own_state_from_job_to_job(tmp_path: Path) -> None:
    played = Played(tmp_path, method="fedbn", num_versions=3)
    played.play()
    counters = [[v for k, v in played.kept(n).items() if v.dtype == torch.int64] for n in range(4)]
    assert [[int(each) for each in own] for own in counters] == [[6, 6]] * 4
    assert len({digest(played.kept(number)) for number in range(4)}) == 4


def altered(played: Played, device: str, **changes: object) -> tuple[int, bytes]:
    """A device's answer with other values, sealed again as a device that means harm could."""
    id, data = played.done(device) or (0, b"")
    base = played.desk.jobs.request(played.job(device)).tree
    answer = decode(data, base)
    assert isinstance(answer, Update)
    tree = {key: value.clone() for key, value in answer.shared.items()}
    key = next(iter(tree))
    if "value" in changes:
        tree[key].view(-1)[0] = changes["value"]
    if "more" in changes:
        tree[str(changes["more"])] = torch.zeros(1)
    return id, encode(Update(answer.report, tree, address=answer.address), base)


def test_what_cannot_be_used_is_refused_in_one_line_and_the_run_goes_on(tmp_path: Path) -> None:
    played = Played(tmp_path, method="fedbuff(b=2)+fedbn", num_versions=2)
    played.work()
    played.report()
    first, *_ = names = list(played.devices)
    bad = altered(played, first, value=float("nan"))
    foreign = altered(played, names[1], more="bn1.running_mean")
    _, sent = played.done(names[2]) or (0, b"")
    cut = (played.job(names[2]).id, sent[:-30])
    never = (77, sent)
    played.leaf.hear({"said": {first: bad, names[1]: foreign, names[2]: cut, names[3]: never}})
    del played.said[:]
    played.report()
    lines = [line for line in played.said if "version 1" in line or line.startswith("device")]
    assert lines[0].startswith("site 'device-000000', version 1: ")
    assert "finite" in lines[0]
    assert lines[1].startswith("site 'device-000001', version 1: client 1, exchange ")
    assert lines[1].endswith("entry 'bn1.running_mean': was not expected")
    assert lines[2] == "site 'device-000002', version 1: it was cut on the way"
    late = "it answers job 77, which is not open any more; its answer was ignored"
    assert lines[3] == f"device '{names[3]}': {late}"
    assert len(lines) == 4
    assert played.desk.version == 0
    played.play()
    assert played.desk.version == 2


def test_a_device_that_fails_again_and_again_is_asked_no_more(tmp_path: Path) -> None:
    played = Played(tmp_path, devices=2, method="fedbuff(b=1)+fedbn", num_versions=3)
    played.work()
    played.report()
    broken, other = list(played.devices)
    for _ in range(3):
        played.leaf.hear({"failed": {broken: (played.job(broken).id, "its disk is full")}})
        played.report()
    assert played.said[-3:] == ["site 'device-000000', version 1: its disk is full"] * 3
    assert played.leaf.open_job(broken) is None
    for _ in range(3):
        played.work(other)
        played.report()
    assert [row["cohort"] for row in played.rows[:2]] == [[1], [1]]
    assert played.desk.version == 3
    while not played.over:  # the last test asks everybody once more
        for device in (broken, other):
            if played.leaf.open_job(device):
                played.work(device)
        played.report()


def test_a_run_without_devices_ends_with_the_reason(tmp_path: Path) -> None:
    played = Played(tmp_path, devices=1, method="fedbuff(b=1)", num_versions=3)
    played.work()
    played.report()
    for _ in range(2):
        played.leaf.hear({"failed": {"site-1#0": (played.job("site-1#0").id, "no")}})
        played.report()
    played.leaf.hear({"failed": {"site-1#0": (played.job("site-1#0").id, "no")}})
    why = "0 of 1 sites left in site 'device-000000', version 1: no; engine.quorum=0.5 needs more"
    with pytest.raises(QuorumError, match=why):
        played.report()


def test_a_second_device_of_one_number_and_a_late_one_are_refused(tmp_path: Path) -> None:
    played = Played(tmp_path, devices=2, method="fedavg", num_versions=1)
    hello = played.done("site-1#0")
    played.leaf.hear({"said": {"site-1#0": hello, "other#0": hello}})
    played.report()
    assert played.said == [
        "device 'other#0': it calls itself 'device-000000', as 'site-1#0' does; give each its own number"
    ]
    played.work()
    played.report()
    third = Played(tmp_path / "third", devices=3).done("site-1#2")
    played.leaf.hear({"said": {"late#2": third}})
    played.report()
    line = "device 'late#2': 'device-000002' is not one of the 2 devices of this run, which has begun"
    assert played.said[-1] == line


def test_a_server_that_starts_again_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    whole = Played(tmp_path / "whole", method="fedbuff(b=2)+fedbn", num_versions=4)
    broken = Played(tmp_path / "broken", method="fedbuff(b=2)+fedbn", num_versions=4)
    whole.play()
    for _ in range(2):
        broken.work()
        broken.report()
    made = broken.desk.version
    assert 0 < made < 4
    broken.desk, broken.leaf = broken.new_desk(), type(broken.leaf)()
    broken.play()
    assert f"run 'run' goes on after version {made} of 4" in broken.said
    assert digest(broken.desk.tree) == digest(whole.desk.tree)
    assert [digest(broken.kept(n)) for n in range(4)] == [digest(whole.kept(n)) for n in range(4)]
    rounds = [
        json.loads(line)["round"] for line in (broken.folder / "records" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rounds == [1, 2, 3, 4]


def test_a_device_without_a_number_or_data_says_so(tmp_path: Path) -> None:
    played = Played(tmp_path, devices=2)
    for name, why in (
        ("phone", "device 'phone' has no number; call it NAME#NUMBER, such as phone#3"),
        (
            "phone#9",
            "device 9 has no part of 'fashion_mnist_small', which is dealt to 2 devices; number",
        ),
    ):
        device = played._device(name)
        result = device.process_task(type("Task", (), {"task_data": {"ask": "hello"}})())
        assert result["why"].startswith(why)


def test_what_devices_cannot_do_is_refused_before_a_job_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'fedtan.*' needs all clients of a round in lock-step"):
        Played(tmp_path, method="fedtan")
    with pytest.raises(ConfigError, match="1 leaves with 0 devices each are none; give some"):
        Played(tmp_path, devices=0)


def test_devices_that_are_threads_of_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = small(**{"model": "resnet20", "data.size": 16})
    played = Played(tmp_path, devices=8, config=config, method="fedbn", num_versions=1)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):  # hellos, then the first round
            answers = dict(zip(played.devices, pool.map(played.done, played.devices), strict=True))
            played.leaf.hear({"said": {device: answer for device, answer in answers.items() if answer}})
            played.report()
    assert played.desk.version == 0  # its test goes on
    assert {played.job(device).sheet for device in played.devices} == {"score.0.0-1-1"}
    alone = Played(tmp_path / "alone", devices=8, config=config, method="fedbn", num_versions=1)
    for _ in range(2):
        alone.work()
        alone.report()
    assert digest(played.desk.tree) == digest(alone.desk.tree)
