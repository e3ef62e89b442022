"""Play many tiny runs with the fednorm that PYTHONPATH names, and write down bit for bit what each left in its folder.

`same_numbers.py` starts this once per commit and engine. It must work in commits whose modules lie elsewhere, so it
asks fednorm for its public names only and reads run folders by itself.

PYTHONPATH=CHECKOUT/src python tools/same_numbers_player.py ENGINE OUT.jsonl FOLDER [EXPRESSION ...]

With KEEP in the environment the run folders stay in FOLDER.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fednorm

try:  # `fixup` looks for residual blocks by this type; where it has gone elsewhere, both commits refuse alike
    from fednorm.models.blocks import ResidualBlock
except ImportError:
    ResidualBlock = nn.Module

NUM_CLASSES = 3
VARIANTS = (
    *("fixbn(at=window,window=2,tau=100.0)", "fixbn(at=1,affine=true)", "fedbs(eps=100.0,rounds=2)"),
    *("posthoc(mode=ema)", "sbn(query_mode=cumulative)"),
    # Parts that share what a merge remembers, or a switch.
    *("fedadam+fixbn", "fedavgm+fedbs", "fixbn+local-momentum", "fedbs+local-momentum", "fedadam+decoupled"),
    *("fedavgm+hbn", "fedprox+silobn", "fedbn+local-momentum", "fedavgm+global-momentum"),
    *("fedbn+gn", "gn+fedbn"),  # refused
)
# Workers start anew with every run, seconds each on a busy machine, and then run the sequential engine's code: these
# have all that is sent to them, as own state, momentum, layers that a method puts in, a query, a finish, lock-step.
FOR_WORKERS = (
    *("fedavg", "fedbn", "fedbs", "fedtan", "fedwon", "sbn", "posthoc", "brn", "fedavgm+hbn", "fedadam+fixbn"),
    *("fixbn+local-momentum", "fedavgm+global-momentum", "fedadam+decoupled", "standalone"),
)
SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "local_steps": 2,
    "batch_size": 4,
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "eval.every": 2,
    "device": "cpu",
    "threads": 1,
}
# Batches of one size and sums in float64; then batches that end an epoch with fewer examples, in float32.
PARTICIPATIONS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "all": ((8, 12, 16, 4, 8), {"dtype": "float64"}),
    "2 of 4": ((7, 14, 9, 5, 6), {"dtype": "float32", "clients_per_round": 2}),
}
ENGINES: dict[str, dict[str, Any]] = {
    "sequential": {"engine": "sequential"},
    "workers": {"engine": "workers", "workers": 2},
    "stacked": {"engine": "stacked"},
    "traced": {"engine": "stacked"},
    "ranks": {"engine": "sequential"},
}
FACTS = ("round", "switch", "reports", "finished")
TIMES = ("seconds", "version")
"""Fields of rows and results that may differ."""
SEALS = ("made_from", "sha256")
"""Fields of a result that tie it to files with times in them."""
SAFETENSORS = {"F64": "float64", "F32": "float32", "I64": "int64", "I32": "int32", "U8": "uint8", "BOOL": "bool"}
WIDTHS = {"float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "bool": 1, "uint8": 1, "int8": 1}

Found = dict[str, Any]
"""What a run left, by a name that says where: plain values, and tensors as [type, shape, bytes in base64]."""


class Block(ResidualBlock):  # pyright: ignore[reportGeneralTypeIssues]
    """A residual block with two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.downsample = nn.Identity()

    def main(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.main(x) + self.downsample(x))


def make_model() -> nn.Module:
    """One convolution and its norm, a residual block, a linear layer; affine values away from 1 and 0."""
    torch.manual_seed(0)
    stem = (nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    net = nn.Sequential(*stem, Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, NUM_CLASSES))
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    return net.double()


def make_federation(sizes: tuple[int, ...]) -> Any:
    """Clients whose features and labels differ; the last one never trains, for methods that treat newcomers."""

    def examples(count: int, shift: float, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64) * (1 + abs(shift)) + shift
        y = torch.randint(0, NUM_CLASSES, (count,), generator=generator)
        return x, torch.where(torch.arange(count) % 2 == 0, seed % NUM_CLASSES, y)

    train = [examples(size, client - 1.0, client + 1) for client, size in enumerate(sizes)]
    test = [examples(6, client - 1.0, client + 101) for client in range(len(sizes))]
    data = fednorm.from_clients(train, test, num_classes=NUM_CLASSES)
    return replace(data, unseen=frozenset({len(sizes) - 1}))


def stay_on_cpu() -> None:
    """Let the stack keep its rounds in traced programs on the CPU too.

    The set of devices has no public name; it is found wherever it is, since `fednorm.run` loads all it plays with.
    """
    found = [vars(module).get("DEVICES") for name, module in sys.modules.items() if name.startswith("fednorm.")]
    sets = [each for each in found if isinstance(each, set) and "cuda" in each]
    if not sets:
        sys.exit("no module of fednorm has a set DEVICES with 'cuda' in it: teach stay_on_cpu where it is now")
    for each in sets:
        each.add("cpu")


def is_first_rank() -> bool:
    """Whether this process writes; without torchrun there is no other."""
    return os.environ.get("RANK", "0") == "0"


def play(engine: str, expression: str, participation: str, folder: Path) -> Found:
    """What a run left, or how it ended, and what the engine said of itself."""
    sizes, changes = PARTICIPATIONS[participation]
    settings = {**SETTINGS, **ENGINES[engine], **changes}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            fednorm.run(
                method=expression, model=make_model(), federation=make_federation(sizes), out=folder, **settings
            )
    except Exception as error:  # a crash is an outcome to be compared too
        if getattr(error, "exit_code", 0) > 128:  # a signal: this process is to end, not only the run
            raise
        first = str(error).splitlines()[:1]
        found = {"refusal": f"{type(error).__name__}: {''.join(first)}"}
    else:
        found = read_folder(folder) if is_first_rank() else {}
    # An engine that falls back on another says so; one that is slow on a busy machine does too, which means nothing.
    engines = [line for line in said.getvalue().splitlines() if " engine: " in line]
    lines = [line for line in engines if not any(told in line for told in (" making ready: ", " made ready in "))]
    return {**found, **{f"line {number} on stderr": line for number, line in enumerate(lines)}}


def read_folder(folder: Path) -> Found:
    """All that a run left, but for times."""
    found: Found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.update(_leaves(f"round {row['round']}", row))
    found.update(_read_state(folder / "state.sqlite"))
    result = json.loads((folder / "result.json").read_text())
    found.update(_leaves("result.json", {key: value for key, value in result.items() if key not in SEALS}))
    found.update(_safetensors("model.safetensors", (folder / "model.safetensors").read_bytes()))
    return found


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in TIMES:
                yield from _leaves(f"{name} {key}", inner)
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for number, inner in enumerate(value):
            yield from _leaves(f"{name} {number}", inner)
    else:
        yield name, value


def _read_state(path: Path) -> Found:
    """Server trees, clients and facts, by the names of columns, so that added ones do no harm."""
    found: Found = {}
    with contextlib.closing(sqlite3.connect(path)) as state:
        for name, blob in state.execute("SELECT name, blob FROM server ORDER BY name"):
            found[f"server tree '{name}'"] = "there"
            found.update(_safetensors(f"server {name}", blob))
        query = "SELECT id, layouts.layout, record FROM clients JOIN layouts ON number = clients.layout ORDER BY id"
        for client, layout, record in state.execute(query):
            found[f"client {client} steps"] = int.from_bytes(record[:8], "little", signed=True)
            start = 8
            for key, dtype, shape in json.loads(layout):
                end = start + WIDTHS[dtype] * math.prod(shape)
                found[f"client {client} {key}"] = [dtype, shape, _text(record[start:end])]
                start = end
        for name, value in state.execute("SELECT name, value FROM facts ORDER BY name"):
            if name in FACTS:
                found[f"fact {name}"] = json.loads(value)
    return found


def _safetensors(name: str, blob: bytes) -> Iterator[tuple[str, Any]]:
    start = 8 + int.from_bytes(blob[:8], "little")
    for key, entry in sorted(json.loads(blob[8:start]).items()):
        if key != "__metadata__":
            first, end = entry["data_offsets"]
            dtype = SAFETENSORS.get(entry["dtype"], entry["dtype"])
            yield f"{name} {key}", [dtype, entry["shape"], _text(blob[start + first : start + end])]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def cases(engine: str, expressions: list[str]) -> Iterator[tuple[int, str, str]]:
    """(number, expression, participation) of every run; of workers, each expression in one participation, in turn."""
    everything = FOR_WORKERS if engine == "workers" else [*fednorm.known_methods(), *VARIANTS]
    for number, expression in enumerate(expressions or everything):
        turn = list(PARTICIPATIONS)[number % 2]
        for participation in [turn] if engine == "workers" else PARTICIPATIONS:
            yield number, expression, participation


def main(engine: str, out: Path, folder: Path, expressions: list[str]) -> None:
    """Play the expressions, or all, and write a line for each run."""
    torch.set_num_threads(1)
    if not Path(fednorm.__file__).is_relative_to(os.environ["PYTHONPATH"]):
        sys.exit(f"Error: PYTHONPATH has no fednorm, and {fednorm.__file__} is not the one to be played")
    getattr(fednorm, "run")  # noqa: B009 - loads what `stay_on_cpu` looks through
    if engine == "traced":
        stay_on_cpu()
    with out.open("w") if is_first_rank() else contextlib.nullcontext() as file:
        for number, expression, participation in cases(engine, expressions):
            place = folder / f"{number:02d}-{participation.replace(' ', '-')}"
            found = play(engine, expression, participation, place)
            if file:
                file.write(json.dumps({"run": [expression, participation], "found": found}) + "\n")
                file.flush()  # what was played before a crash can still be compared
                if "KEEP" not in os.environ:
                    shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    import same_numbers_player  # by its name, under which workers find the model's class again

    same_numbers_player.main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
