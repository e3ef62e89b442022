"""Several runs over Collab in one start of NVFlare's simulator, which takes longer than all of them.

Every run has its own object at every site and its own folder. Some sites misbehave. Tests look at files.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.dxo import DXO
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.collab import CollabCallError, collab
from nvflare.job_config.api import FedJob
from simulated import LIMIT, own_files

from fednorm.core.state import digest
from fednorm.errors import FednormError
from fednorm.halves import wire
from fednorm.halves.messages import Hello, Message, Request, Update, Welcome
from fednorm.halves.wire_files import load, load_mine
from fednorm.nvflare import calls
from fednorm.nvflare.arrivals import ArrivalCourse
from fednorm.nvflare.calls import Calls
from fednorm.nvflare.collab import NormCollabController, NormCollabExecutor, NormSite, play
from fednorm.nvflare.course import Course
from fednorm.nvflare.keeping import server_file, site_file
from fednorm.nvflare.member import Member
from fednorm.nvflare.permission import Permission, permit_in
from fednorm.nvflare.recipe import Recipe
from fednorm.nvflare.setup import Setup
from fednorm.running.clock_run import ClockRun
from fednorm.running.plan import make_plan
from fednorm.running.run import Run
from fednorm.running.store import Store
from fednorm.running.tensor_files import load_tree

SITES = 3
HERE = Path(__file__).parent
TOLD = "told.json"
WAIT, SILENCE = 0.5, 20.0
"""of the calls of these runs; what a busy machine keeps a site from saying in time would be taken for its end"""


@dataclass(frozen=True)
class Case:
    """A run: its setup, and which of its sites do what they should not."""

    setup: Setup
    faults: tuple[str, ...] = ()
    """such as `site-2 raises in 2`: what it does with the second job that it is given; `waits`: see `OddSite._wait`"""


class Several(FLComponent):
    """Plays one run after the other."""

    def __init__(self, setups: dict[str, Any], folder: str) -> None:
        super().__init__()
        self.setups, self.folder = setups, folder

    @collab.main
    def run(self) -> None:
        calls.WAIT, calls.SILENCE = WAIT, SILENCE
        fl_ctx = collab.fl_ctx
        for name, setup in self.setups.items():
            said, folder = Setup.from_json(setup), Path(self.folder) / name
            told = Told(folder / TOLD)
            state = server_file(Path(str(said.state_dir)), str(said.run_id))
            proxies = {site.name: site.get_child(name) for site in collab.clients}
            try:
                kind = ArrivalCourse if said.strategy else Course
                course = kind(said, state, folder, str(said.run_id), told.append, permit=Permission(fl_ctx))
                play(course, Calls(proxies, collab.context.is_aborted), told.append)
            except FednormError as error:
                told.append(f"the end: {type(error).__name__}: {error}")


class Told(list[str]):
    """What the server said, and in a file, where sites can read it while the run goes on."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def append(self, line: str) -> None:
        super().append(line)
        self._path.write_text(json.dumps(self))


class OddSite(NormSite):
    """A site that writes down every message, and does what it was told to in some rounds."""

    def __init__(self, setup: dict[str, Any], folder: str, faults: list[str]) -> None:
        super().__init__(setup)
        self.folder, self.faults = folder, faults
        self._numbers: set[int] = set()

    @collab.publish
    def work(self, welcome: bytes, request: bytes, wait: float) -> bytes:
        asked = wire.decode(request)
        assert isinstance(asked, Request)
        with (Path(self.folder) / f"{self._joined().name}.jobs").open("a") as file:
            file.write(json.dumps([str(asked.phase), asked.address.number, asked.round - 1]) + "\n")
        if f"{self._joined().name} spies on site-2" in self.faults:
            self._spy(welcome, request)
        return self._kept(request, super().work(welcome, request, wait))

    def _spy(self, welcome: bytes, request: bytes) -> None:
        (other,) = (site for site in collab.clients if site.name == "site-2")
        try:
            said = other.get_child(Path(self.folder).name)(timeout=10).work(welcome, request, 1.0)
        except CollabCallError as error:
            said = str(error)
        (Path(self.folder) / "spied").write_text(str(said))

    @collab.publish
    def more(self, wait: float) -> bytes:
        return self._kept(super().more(wait))

    def _kept(self, *messages: bytes) -> bytes:
        with (Path(self.folder) / f"{self._joined().name}.messages").open("ab") as file:
            file.write(b"".join(messages))
        return messages[-1]

    def _joined(self) -> Member:
        is_new = self._member is None
        member = super()._joined()
        if is_new:
            member.answer = partial(self._odd_answer, member, member.answer)  # pyright: ignore[reportAttributeAccessIssue]
        return member

    def _odd_answer(self, member: Member, answer: Any, welcome: Welcome, request: Request) -> Message:
        found = answer(welcome, request)
        self._numbers.add(request.address.number)
        for fault in self.faults:
            site, what, _, which = fault.split()
            if (site, which) == (member.name, str(len(self._numbers))):
                if what == "waits":
                    self._wait()
                elif what in FAULTS:
                    return FAULTS[what](found)
        return found

    def _wait(self) -> None:
        """Hold an answer back until the server has told of a site: whose failure comes first is then no chance."""
        end, told = time.monotonic() + LIMIT, Path(self.folder) / TOLD
        while "site '" not in told.read_text() and time.monotonic() < end:
            time.sleep(0.05)


class Noting(DXOFilter):
    """Writes down the keys of what passes, and lets it pass."""

    def __init__(self, path: str) -> None:
        super().__init__(supported_data_kinds=None, data_kinds_to_filter=None)
        self.path = path

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        with Path(self.path).open("a") as file:
            file.write(json.dumps(sorted(dxo.data)) + "\n")
        return dxo


class Scaled(Noting):
    """Doubles what leaves, as a filter for privacy would change it."""

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        return DXO(dxo.data_kind, data={key: value * 2 for key, value in dxo.data.items()}, meta=dxo.meta)


def _raises(answer: Update) -> Message:
    raise ValueError("the graphics card melted\nand so did the table")


def _dies(answer: Update) -> Message:
    os._exit(3)


def _leaks(answer: Update) -> Message:
    return replace(answer, shared={**answer.shared, "layers.1.running_mean": torch.zeros(16)})


def _diverges(answer: Update) -> Message:
    return replace(answer, shared={key: value * float("nan") for key, value in answer.shared.items()})


def _chats(answer: Update) -> Message:
    return Hello(name="somebody else", num_examples=1, schema="")


FAULTS = {
    "raises": _raises,
    "dies": _dies,
    "leaks": _leaks,
    "diverges": _diverges,
    "chats": _chats,
}


def setup_of(folder: Path, method: str, rounds: int = 4, run_id: str = "", **settings: Any) -> Setup:
    """A small run of the sites of one start."""
    chosen = {"local_steps": 2, "batch_size": 8, "every": rounds, "device": "cpu", **settings}
    return Recipe(
        method=method,
        model="mlp_bn(width=16)",
        data=f"npz:{own_files(folder, SITES)}",
        num_rounds=rounds,
        transport="collab",
        run_id=run_id,
        state_dir=str(folder / "state"),
        **chosen,
    ).setup


def start(folder: Path, cases: dict[str, Case]) -> None:
    """Play all of them in one simulator."""
    job = FedJob(name="several", min_clients=SITES)
    job.set_app_packages(["fednorm", "collab_several"])
    setups = {name: case.setup.to_json() for name, case in cases.items()}
    server = job.to_server(Several(setups, str(folder)), id="several")
    job.to_server(NormCollabController(server_obj_id=server), id="controller")
    alone = job.to_clients(NormSite(next(iter(setups.values()))), id="nobody")
    ids = []
    for name, case in cases.items():
        (folder / name).mkdir(parents=True)
        site = OddSite(case.setup.to_json(), str(folder / name), list(case.faults))
        ids.append(job.to_clients(site, id=name))
    executor = NormCollabExecutor(client_obj_id=alone, collab_obj_ids=ids)
    job.to_clients(executor, id="executor", tasks=["*"])
    workspace = folder / "workspace"
    permit_in(workspace, ["collab_several."])
    with for_processes():
        job.simulator_run(str(workspace), n_clients=SITES, threads=SITES)


@contextmanager
def for_processes() -> Iterator[None]:
    """Let the sites' processes import this module."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), before])
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


# -- what they left --


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a run, as its records have them."""
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def told(folder: Path, name: str) -> list[str]:
    """What the server said, and why the run ended where it ended early."""
    return json.loads((folder / name / TOLD).read_text())


def left(folder: Path, name: str, run: str = "") -> dict[str, Any]:
    """What came out of a run at the server, and what its sites have on the disk, as digests."""
    return left_in(folder / name, folder / "state", run or name)


def left_in(records: Path, state: Path, run: str) -> dict[str, Any]:
    """The same of a run whose records and state lie elsewhere."""
    facts, trees = load(server_file(state, run))
    kept = [load_mine(site_file(state, run, f"site-{site + 1}")) for site in range(SITES)]
    states = [mine.as_of(facts["accepted"].get(str(client), 0)).accepted for client, mine in enumerate(kept)]
    return {
        "server": digest(load_tree(records / "model.safetensors")),
        "memory": digest(trees["memory"]),
        "clients": [(state.steps, digest(state.tree)) for state in states],
    }


def in_engine(setup: Setup) -> tuple[dict[str, Any], list[Any]]:
    """The same of the sequential engine, and its rows."""
    config = replace(setup.config, engine=replace(setup.config.engine, name="sequential"))
    plan, store = make_plan(config), Store()
    run = Run(plan, store) if plan.clock is None else ClockRun(plan, store)
    found = list(run.rounds())
    run.stop()
    states = store.get_many(range(SITES)).values()
    digests = {
        "server": digest(run.server.tree),
        "memory": digest(run.server.held.memory),
        "clients": [(state.steps, digest(state.tree)) for state in states],
    }
    return digests, found
