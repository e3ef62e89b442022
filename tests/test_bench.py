"""`fednorm bench`: tiny real runs, the names of its numbers, what it refuses, and what an interrupt leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import accumulate, cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from command import fednorm, start
from fednorm.bench import arrivals, floors, gpu, long_runs, machine, models, peers, timing
from fednorm.bench.cases import TABLE, Case, labels_of, read_cases
from fednorm.bench.cpu_rounds import bare_round, federation, our_round, overhead_seconds, plain_round
from fednorm.bench.long_runs import LongRun
from fednorm.bench.options import Options, find_sections
from fednorm.bench.peers import find_peers
from fednorm.bench.pools import cifar10, random_images
from fednorm.bench.report import Measured, Progress, Report, Section, measured
from fednorm.bench.timing import Effort, Race, Rounds, Timing, repeated, steady_seconds
from fednorm.errors import ConfigError, FednormError
from fednorm.running import environment

CPU = torch.device("cpu")
GPU_ON_CPU = ("gpu", "--device", "cpu", "--model", "mlp_bn", "--clients", "2", "--local-steps", "1")
QUICK = ("--repeats", "2", "--seconds", "0.01")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def options(**changes: object) -> Options:
    given = {"sections": ("gpu",), "device": CPU, "effort": Effort(1, 0.01), **changes}
    return Options(**given)  # type: ignore[arg-type]


# -- the command --


def test_one_run_gives_one_table_and_one_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNORM_COMMIT", "0123abc")
    monkeypatch.setattr(sys, "argv", ["fednorm", "bench", *GPU_ON_CPU])
    file = tmp_path / "sub" / "found.json"
    done = fednorm("bench", *GPU_ON_CPU, *QUICK, "--out", file)
    assert done.code == 0
    assert done.err == "gpu: mlp_bn, batch 20, 2 clients\n"
    table = done.out.splitlines()
    assert table[0].split() == ["benchmark", "variant", "median", "spread", "ratio", "note"]
    assert table[-1].startswith("ratio.plain/stacked: 2: fp32 ")
    found = json.loads(file.read_text())
    assert (found["commit"], found["interrupted"]) == ("0123abc", False)
    assert found["command"] == "fednorm bench gpu --device cpu --model mlp_bn --clients 2 --local-steps 1"
    assert found.keys() >= {"hardware", "versions", "ratio.plain/stacked"}
    lines = found["sections"]["gpu"]["measurements"]
    assert [line["variant"] for line in lines] == ["plain fp32", "sequential fp32", "stacked fp32", "central eager"]
    medians = {line["variant"]: line["median"] for line in lines}
    assert all(line["low"] <= line["median"] <= line["high"] and line["timings"] == 2 for line in lines)
    ratio = medians["plain fp32"] / medians["stacked fp32"]
    assert found["ratio.plain/stacked"] == {"2": {"fp32": pytest.approx(ratio, abs=1e-4)}}


def test_json_is_all_there_is_on_stdout() -> None:
    done = fednorm("bench", *GPU_ON_CPU, *QUICK, "--repeats", "1", "--json", "--quiet")
    assert done.err == ""
    assert list(done.json["sections"]) == ["gpu"]


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    clients = ("--clients", "2,200", "--repeats", "1", "--seconds", "0.01")  # 200 are busy until the signal comes
    process = start("bench", *GPU_ON_CPU, *clients, "--model", "lenet_cnn", "--out", file, cwd=tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if line == "gpu: lenet_cnn, batch 20, 200 clients\n":  # two clients are done, the others have begun
            before = json.loads(file.read_text())["sections"]["gpu"]["measurements"]
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (130, f"stopped; what was measured is in {file}\n")
    assert "central eager" in out
    found = json.loads(file.read_text())
    assert found["interrupted"] is True
    assert found["sections"]["gpu"]["measurements"] == before, "stored when the next workload began"
    assert {line["workload"] for line in found["sections"]["gpu"]["measurements"]} == {"lenet_cnn, batch 20, 2 clients"}


REFUSED = {
    "bench zoom": "benchmark 'zoom' is not known; known: all, async, cpu, gpu, models, pfl, rounds.",
    "bench models --device cpu --models resnet20:": "--models resnet20: cannot be read; give names such as resnet20+gn",
    "bench models --device cpu --models ,": "--models ',' names no model; give names such as resnet20,vit_tiny",
    "bench models --device cpu --models mlp_bn:1": "--models mlp_bn:1 is out of range; give 2 clients or more",
    "bench --device cpu --models resnet81": "model 'resnet81' is not known; did you mean 'resnet18'?",
    "bench cpu --repeats 0": "--repeats 0 is out of range; give 1 or more",
    "bench cpu --seconds 0": "--seconds 0.0 is out of range; give 0.01 or more",
    "bench cpu --steps 1,x": "--steps 1,x cannot be read; give whole numbers, such as 1,10",
    "bench cpu --steps 0": "--steps 0 is out of range; give 1 or more",
    "bench gpu --device cpu --clients 1": "--clients 1 is out of range; give 2 or more",
    "bench gpu --device cpu --model resnet81": "model 'resnet81' is not known; did you mean 'resnet18'?",
    "bench rounds --rounds 0": "--rounds 0 is out of range; give 1 or more",
    "bench rounds --precision fp64": "precision 'fp64' is not known; did you mean 'fp32'?",
    "bench pfl --data-dir /no/where --rounds 1": "cifar10 was not found in /no/where; expected ",
    "bench cpu --peers /no/where": "--peers /no/where is no folder; give the one with the peers' scripts",
    "bench cpu --device tpu": "device 'tpu' is not known; give auto, cpu, cuda, cuda:1 or mps",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_gets_one_line_and_exit_code_2(line: str) -> None:
    done = fednorm(*line.split())
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"error: {REFUSED[line]}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_sections_follow_the_machine() -> None:
    assert find_sections([], "auto") == (("cpu",), CPU)
    assert find_sections(["all"], "auto") == (("rounds", "pfl", "cpu", "async"), CPU)
    assert find_sections(["cpu", "pfl"], "auto")[0] == ("pfl", "cpu")
    with pytest.raises(ConfigError, match=r"^benchmark 'gpu' needs a CUDA device and this machine has none; give --de"):
        find_sections(["gpu"], "auto")


@pytest.mark.slow
def test_the_cpu_section_measures_all_engines_and_the_overhead() -> None:
    done = fednorm("bench", "cpu", "--steps", "1", *QUICK, "--repeats", "1", "--json", "--quiet")
    found = done.json
    variants = {line["variant"]: line for line in found["sections"]["cpu"]["measurements"]}
    assert variants.keys() >= {"plain, 1 thread", "bare steps, 1 thread", "sequential, 1 thread", "auto"}
    assert variants["auto"]["note"].split()[0].strip(":") in ("sequential", "workers", "stacked")
    assert found.keys() >= {"ratio.ours/plain", "overhead_ms"}
    assert found["ratio.ours/plain"].keys() == found["overhead_ms"].keys() == {"E=1"}


def test_models_are_timed_beside_what_they_cannot_beat() -> None:
    given = ("--device", "cpu", "--models", "mlp_bn(width=8)+gn:2,mlp_bn(width=8)", "--clients", "3")
    done = fednorm("bench", *given, "--local-steps", "1", *QUICK, "--json")
    assert [line for line in done.err.splitlines() if line.startswith("models: ")] == [
        "models: mlp_bn(width=8)+gn, batch 20, 2 clients",
        "models: mlp_bn(width=8), batch 20, 3 clients",
    ]
    found = done.json
    lines = {
        (line["workload"].split(",")[0], line["variant"]): line for line in found["sections"]["models"]["measurements"]
    }
    assert [variant for _, variant in lines] == [
        *("stacked fp32", "central eager", "stacked fp32, mlp_bn(width=8)", "reference", "floor"),
        *("stacked fp32", "central eager", "reference", "floor"),
    ]
    ours, central, reference = (
        lines["mlp_bn(width=8)", variant]["median"] for variant in ("stacked fp32", "central eager", "reference")
    )
    assert reference == central, "the traffic of a tiny network is nothing"
    ratios = {name: found[f"ratio.stacked_fp32/{name}"] for name in ("central_eager", "reference", "floor")}
    assert ratios["reference"]["mlp_bn(width=8)"] == {"3": pytest.approx(ours / central, abs=1e-4)}
    assert all(list(each) == ["mlp_bn(width=8)+gn", "mlp_bn(width=8)"] for each in ratios.values())
    assert found["ratio.stacked_fp32/mlp_bn(width=8)"].keys() == {"mlp_bn(width=8)+gn"}
    assert found["seconds_to_first_row"]["mlp_bn(width=8)"]["3"] > 0


def test_a_model_that_fails_is_left_out_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("CUDA out of memory\nand more")

    monkeypatch.setattr(models, "_central", fails)
    wanted = options(cases=(Case("mlp_bn", clients=(2,)),))
    section, said = models.section(wanted), list[str]()
    progress = Progress(quiet=False)
    monkeypatch.setattr(progress, "line", said.append)
    models.measure(wanted, section, progress)
    assert said[-1] == "mlp_bn with 2 clients left out: CUDA out of memory"
    assert section.measurements == []


# -- what the numbers are --


def test_the_floor_of_a_network_is_counted_by_hand() -> None:
    """3 x 32 x 32 numbers to 8, BN, ReLU, 8 to 10: parameters, products and what a step must move."""
    counted = floors.count(Case("mlp_bn(width=8)"))
    net = Case("mlp_bn(width=8)").build()
    layers = [module for module in net.modules() if isinstance(module, torch.nn.Linear)]
    assert counted.parameters == sum(parameter.numel() for parameter in net.parameters())
    assert counted.products == 3 * sum(2 * layer.in_features * layer.out_features for layer in layers)
    exact = floors.Count(parameters=1_000_000, kept=300_000, products=10**10)
    assert exact.traffic(16) == pytest.approx(1e-4)
    assert exact.memory(16, 20) == pytest.approx(1e-4 + 8e-5)
    assert exact.arithmetic(16, 20) == pytest.approx(3.2e12 / 989e12)
    assert exact.floor(16, 20, launches=100) == pytest.approx(3.2e12 / 989e12 + 3e-4)


def test_the_published_models_can_be_read() -> None:
    cases = read_cases(TABLE, (7,))
    assert {case.name: case.clients for case in cases}["resnet20"] == (5, 20, 100)
    assert [case.name for case in cases if case.pixels != 32] == ["alexnet_bn@96", "deeplabv3plus@192"]
    assert [case.method for case in cases if case.parts] == ["fedavg+gn"]
    assert [labels_of(case) for case in cases if case.pixels != 32] == [(), (192, 192)]


def test_ratios_have_the_names_that_readers_look_for() -> None:
    times = {"plain bf16": 50.0, "plain tf32": 40.0, "stacked bf16": 2.0, "stacked tf32": 4.0, "central compiled": 1.6}
    section = Section("gpu", {}, [Measured("5", name, "ms", (value,)) for name, value in times.items()])
    gpu._note_ratios(section, "5", "5")
    found = Report({}, [section]).to_json()
    assert found["ratio.stacked_bf16/central_compiled"] == {"5": 1.25}
    assert found["ratio.plain/stacked"] == {"5": {"tf32": 10.0, "bf16": 25.0}}


@given(
    st.floats(1e-4, 10.0),
    st.lists(st.integers(1, 60), min_size=5, max_size=30),
    st.floats(0.0, 100.0),
)
def test_bursts_do_not_change_the_time_of_a_round(seconds: float, sizes: list[int], started: float) -> None:
    ends = list(accumulate(sizes))
    at = [started + seconds * end for size, end in zip(sizes, ends, strict=True) for _ in range(size)]
    assert steady_seconds(started, at) == pytest.approx(seconds, rel=1e-6)


class Course:
    """Rounds of 2 s each on a device with a clock of its own; the first two take longer, as those that compile.

    As in a run, rows come in bursts whose reports were sent behind all that was asked for: with `ahead`, what was asked
    for since the last burst stays in flight. Rows tell `claimed` seconds.
    """

    def __init__(self, sizes: tuple[int, ...], ahead: bool, claimed: float = 2.0) -> None:
        self.now, self.done_at = 0.0, 0.0
        self.round = 0
        self.unsettled: list[int] = []
        self._sizes, self._ahead, self._claimed = cycle(sizes), ahead, claimed

    def settle(self, count: int) -> list[int]:
        settled, self.unsettled = self.unsettled[:count], self.unsettled[count:]
        if settled:
            self.now = max(self.now, self.done_at)
        return settled

    def rounds(self) -> Iterator[dict[str, float]]:
        bursts = 0
        while True:
            size = next(self._sizes)
            for _ in range(size):
                begun = max(self.now, self.done_at)
                self.done_at = begun + 2.0 + {0: 100.0, 1: 40.0}.get(self.round, 0.0)
                self.round += 1
                self.unsettled.append(self.round)
            bursts += 1
            for number in self.settle(len(self.unsettled) - (size if self._ahead else 0)):
                yield {"round": number, "seconds": self._claimed + 1e-9 * bursts}


@pytest.mark.parametrize("ahead", [False, True], ids=["one after the other", "told while the next are played"])
@pytest.mark.parametrize("sizes", [(1,), (7,), (5, 1, 30), (1, 32)])
def test_a_course_counts_what_was_done_while_it_was_timed(
    sizes: tuple[int, ...], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Course(sizes, ahead)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: run.now))
    play = Rounds(run, CPU)
    assert play(0.0) == 2.0, "it is warm when two looks agree"
    for seconds in (0.1, 50.0, 500.0):
        run.now += 1000.0  # others are timed; the device finishes what it had
        assert play(seconds) == 2.0
    assert play.whole == [2.0] * 3
    assert play.disagree() == ""


def test_two_clocks_that_disagree_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Course((5, 1, 30), ahead=True, claimed=64.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: run.now))
    steps = gpu.engine("mlp_bn", random_images(2, 40), "stacked", "fp32", 1, CPU)
    steps.rounds = Rounds(run, CPU)
    steps(0.0)
    assert steps(500.0) == 2.0
    race, said = Race(), list[str]()
    told = "two clocks disagree: rows tell 6.4e+04 ms a round, timed as a whole it takes 2e+03"
    gpu.note_clocks({"stacked fp32": steps, "plain": repeated(list, CPU)}, race, SimpleNamespace(line=said.append))
    assert race.notes == {"stacked fp32": told}
    assert said == [f"stacked fp32: {told}"]


def test_too_few_rows_say_nothing() -> None:
    assert steady_seconds(0.0, [1.0, 2.0, 3.0]) is None


def test_a_race_gives_every_variant_its_turns_and_slow_ones_two() -> None:
    race, counts = Race(), {"quick": 0, "slow": 0}

    def variant(name: str) -> float:
        counts[name] += 1
        if name == "slow" and counts[name] > 1:
            time.sleep(0.1)
        return 1.0

    plays = {name: lambda seconds, name=name: variant(name) for name in counts}
    race.run(plays, Effort(turns=4, seconds=0.01), lambda text: None)
    assert {name: len(turns) for name, turns in race.times.items()} == {"quick": 4, "slow": 2}
    assert counts == {"quick": 5, "slow": 3}  # once to warm up


def test_quiet_timings_count_where_there_are_enough() -> None:
    turns = [Timing(1.0), Timing(2.0), Timing(3.0), Timing(99.0, foreign=0.5)]
    (three,) = measured("w", "s", {"a": turns}, {})
    (all_of_them,) = measured("w", "s", {"a": turns[1:]}, {"a": "busy"}, factor=10)
    assert (three.values, three.median, three.quiet) == ((1.0, 2.0, 3.0), 2.0, 3)
    assert (all_of_them.values, all_of_them.quiet, all_of_them.note) == ((20.0, 30.0, 990.0), 2, "busy")


def test_a_function_is_repeated_until_the_time_is_over() -> None:
    calls: list[int] = []
    play = repeated(lambda: calls.append(1), CPU)
    assert play(0.0) >= 0
    assert len(calls) == 1
    play(0.01)
    assert len(calls) > 2


def test_rounds_on_the_cpu_can_be_played_again_and_again() -> None:
    data = federation()
    rounds = [plain_round(data, 1, 1), bare_round(data, 1), our_round(data, 1, 1, "sequential")]
    for play in rounds:
        play()
        play()
    assert len(overhead_seconds(data, 1, 2)) == 2


# -- long runs --

TINY = LongRun(
    name="rounds",
    title="a tiny run",
    rounds=6,
    on_cpu=6,
    precision="fp32",
    settings={
        "model": "mlp_bn(width=8)",
        "train.local_steps": 1,
        "train.batch_size": 4,
        "eval.every": long_runs.FOREVER,
    },
    data=lambda folder: random_images(2, 8),
)


@pytest.mark.parametrize(("rounds", "variants"), [(None, ["all 6 rounds"]), (4, ["4 rounds", "all 6 rounds, extr"])])
def test_a_long_run_is_timed_and_a_shortened_one_says_so(rounds: int | None, variants: list[str]) -> None:
    wanted = options(rounds=rounds)
    section = long_runs.section(TINY, wanted)
    long_runs.measure(TINY, wanted, section, Progress(quiet=True))
    names = [each.variant for each in section.measurements]
    assert all(name.startswith(start) for name, start in zip(names, variants, strict=False))
    assert names[-1] == "until the first rows came"
    assert section.settings["rounds played"] == (rounds or 6)
    assert section.settings["data"] == "random images"
    assert 0 <= section.settings["accuracy"] <= 100
    if rounds:
        played, whole = section.measurements[:2]
        assert whole.values[0] > played.values[0]
        assert whole.note == "computed from 4 rounds: not played"


def test_the_published_workloads_are_what_they_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDNORM_DATA", raising=False)
    data = cifar10(1000, None)
    assert (data.name, len(data.clients), len(data.clients[0]), len(data.test_y)) == ("random images", 1000, 50, 10_000)
    pfl, steps = long_runs.PFL, long_runs.EVERY_STEP
    assert (pfl.rounds, pfl.settings["clients_per_round"], pfl.settings["train.batch_size"]) == (1500, 50, 10)
    assert steps.rounds == 128 * 50_000 // (5 * steps.settings["train.batch_size"])


# -- peers --

SCRIPT = """
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
seconds = [9.0] * 3 + [0.5] * (int(given["--rounds"]) - 3)
print("noise")
print(json.dumps({"peer": "toy", "version": "1.2", "how": given["--cores"] + " cores", "seconds": seconds}))
"""


def test_peers_are_found_asked_and_left_out_if_they_fail(tmp_path: Path) -> None:
    for name, text in (("toy", SCRIPT), ("broken", "raise SystemExit('no such thing')"), ("absent", SCRIPT)):
        (tmp_path / f"run_{name}.py").write_text(text)
        if name != "absent":
            place = tmp_path / "envs" / name / "bin"
            place.mkdir(parents=True)
            (place / "python").symlink_to(sys.executable)
    said: list[str] = []
    (toy,) = find_peers(tmp_path, said.append)
    assert said[0].startswith("left out: peer: broken failed (no such thing); run it alone: ")
    assert said[1] == "peer: toy 1.2"
    notes: dict[str, str] = {}
    play = toy.player(steps=1, cores=2, notes=notes)
    play(0.0)
    assert notes == {}
    assert (play(0.5), notes) == (0.5, {"peer: toy": "1.2, 2 cores"})


def test_a_peer_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LIMIT_SECONDS", 0.5)
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    (tmp_path / "run_endless.py").write_text(child)
    endless = peers.Peer(tmp_path / "run_endless.py", Path(sys.executable))
    with pytest.raises(FednormError, match=r"^peer: endless failed \(it took more than 0.5 s\); run it alone: "):
        endless.ask()
    notes: dict[str, str] = {}
    failed = Timing(endless.player(1, 1, notes)(0.5))
    assert notes == {endless.name: "peer: endless failed (it took more than 0.5 s)"}
    assert measured("w", "s", {endless.name: [failed]}, notes) == []


def test_no_peers_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    assert find_peers(tmp_path, said.append) == []
    assert said == [f"no peer is installed below {tmp_path / 'envs'}; its README says how"]


# -- the machine --


def test_the_commit_is_named_found_or_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDNORM_COMMIT", raising=False)
    (tmp_path / "fednorm" / "running").mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "fednorm" / "running" / "environment.py"))
    assert environment.commit() == "unknown"
    monkeypatch.setenv("PATH", "")
    assert environment.commit() == "unknown"
    monkeypatch.setenv("FEDNORM_COMMIT", "cafe")
    assert environment.commit() == "cafe"
    facts = machine.describe_machine(CPU, ["fednorm", "bench", "--out", "a b"])
    assert facts["command"] == "fednorm bench --out 'a b'"
    assert facts["hardware"]["gpu"] is None


def test_a_look_at_the_commit_leaves_the_checkout_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that is killed, or whose disk is full, leaves no lock in its user's repository."""
    monkeypatch.delenv("FEDNORM_COMMIT", raising=False)
    file = tmp_path / "fednorm" / "__init__.py"
    file.parent.mkdir()
    file.write_text("")
    me = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (("init", "-q"), ("add", "."), (*me, "commit", "-q", "-m", "first")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    os.utime(file, (0, 0))  # git would note that the file is the same although its time is another
    index = (tmp_path / ".git" / "index").read_bytes()
    monkeypatch.setattr(environment, "__file__", str(file.parent / "running" / "environment.py"))
    assert re.fullmatch(r"[0-9a-f]{40}", environment.commit())
    assert (tmp_path / ".git" / "index").read_bytes() == index


def test_the_async_section_sets_arrivals_beside_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "CLIENTS", 6)
    monkeypatch.setattr(arrivals, "AT_A_TIME", {"cpu": 2})
    monkeypatch.setattr(arrivals, "STEPS", 1)
    small = "fedrevive(width=4,latent=4,batch=2,kd_batch=2,kd_steps=1,steps=1,teachers=2,pool=8)"
    monkeypatch.setattr(arrivals, "REVIVED", small)
    monkeypatch.setattr(arrivals, "BUFFERED", "fedbuff(b=2)")
    done = fednorm("bench", "async", *QUICK, "--repeats", "1", "--json", "--quiet")
    assert done.code == 0, done.err
    found = done.json
    lines = found["sections"]["async"]["measurements"]
    assert [line["variant"] for line in lines] == ["rounds", "sync", "fedbuff(b=2)"] * 2
    medians = {line["variant"]: line["median"] for line in lines[:3]}
    ratio = medians["rounds"] / medians["fedbuff(b=2)"]
    assert found["ratio.fedbuff(b=2)/rounds"]["sequential"] == pytest.approx(ratio, abs=1e-4)
    assert found["revive.server_ms"]["small_resnet"].keys() == {"teacher", "synthesis", "distillation"}
    assert 0 < found["revive.server_share"]["small_resnet"] < 1
