"""Runs whose rounds never leave the device: the host sends one message an exchange and reads nothing back until asked.

Several runs of the same program share the client axis: client j of run r is row r * clients + j of every stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from fednorm.core.phases import PhaseId
from fednorm.core.probe import Probe
from fednorm.core.state import Entry, Policy, Tree, named, unnamed
from fednorm.data.batches import Batches
from fednorm.engines.base import MOST_AWAITED, stack_trees
from fednorm.engines.stack.attributes import ChangesItself
from fednorm.engines.stack.kernels.layers import filters_lie_channels_last
from fednorm.engines.stack.kernels.tiles import power_of_2
from fednorm.engines.stack.late_reports import LateReports
from fednorm.engines.stack.messages import Assignment, Member, Messages, message
from fednorm.engines.stack.phase_program import NotAProgram, PhaseProgram
from fednorm.engines.stack.ragged import OFTEN, RaggedProgram, Table
from fednorm.engines.stack.row_matrix import ALIGNMENT, RowMatrix, aligned
from fednorm.engines.stack.ways import Ways
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.schema import OWN
from fednorm.halves.site import Sites

AnyProgram = TypeVar("AnyProgram", bound=PhaseProgram)
DEVICES = {"cuda"}
"""Where rounds stay on the device; elsewhere there is little to gain."""
_MOST_SHAPES = 8
"""A shape of work other than a phase's first gets a program when it comes often, and only the first few shapes do."""
MOST_LOCAL_BYTES = 8 << 30
"""Clients' own states stay on the device up to this; beyond, they go the ordinary way through the run's store."""


class Work(NamedTuple):
    """The shape of a task."""

    phase: PhaseId
    clients: int
    steps: int | None
    """that all clients take, on batches of one size; None where their work is unequal"""
    size: int
    """of the batches of equal work"""


class DeviceStack:
    """The state of some runs on the device, and the programs that move it; `merges` says whether they merge it too."""

    def __init__(self, runs: Sequence[Sites], merges: bool = True) -> None:
        self.runs, self.sites = runs, runs[0]
        self.merges = merges
        channels_last = filters_lie_channels_last(self.sites.prepared.model)
        # What is trained lies together and comes first, entries of an odd size last: see `PhaseProgram`.
        servers = [sites.initial() for sites in runs]
        held = [entry for key, entry in entries_with(self.sites, *Policy).items() if key in servers[0]]
        held.sort(key=lambda entry: (not entry.trainable, entry.size % ALIGNMENT != 0))
        self._local = entries_with(self.sites, *OWN)
        self._layouts = {
            "server": RowMatrix({entry.key: entry for entry in held}, channels_last),
            "local": RowMatrix(self._local, channels_last),
        }
        self.refused: set[PhaseId] = set()
        """phases that could not be made a program; their runs go the ordinary way"""
        self.unseen: set[PhaseId] = set()
        """phases that probes cannot look into while they are programs"""
        self.unjudged: set[PhaseId] = set()
        """phases that are trained by programs, but cannot be judged and merged by some"""
        self.ways = Ways(self.sites.prepared.model)
        self.most_at_once = len(runs)
        """runs whose exchange is one program; fewer where all of them did not fit into memory"""
        self.holds_local = bool(self._local)
        self._batches, self._offsets = _joined_pools(runs)
        self._members = [Member(run, sites.batches, self._offsets[run]) for run, sites in enumerate(runs)]
        self._programs: dict[Any, Any] = {}
        self._waiting: WeakValueDictionary[tuple[PhaseProgram, int, int], LateReports] = WeakValueDictionary()
        """reports by their slot and row in a program's log, as long as somebody may look at them"""
        self._remembered = [frozenset[str]() for _ in runs]
        self._asked: Counter[Work] = Counter()
        self._messages: WeakKeyDictionary[PhaseProgram, dict[tuple[int, ...], Messages]] = WeakKeyDictionary()
        """of each program, by the runs that take part"""
        first = self._layouts["server"].pack(stack_trees(servers))
        self._state = {
            name: aligned(flat) for prefix in ("server", "initial") for name, flat in named(prefix, first).items()
        }
        self._state |= named("local", self._blank_clients())

    def _blank_clients(self) -> dict[str, torch.Tensor]:
        if not self._local:
            return {}
        each = [
            {
                key: sites.prepared.initial[key].to(sites.device)
                if key in sites.prepared.initial
                else torch.zeros(entry.shape, dtype=entry.dtype, device=sites.device)
                for key, entry in self._local.items()
            }
            for sites in self.runs
        ]
        rows = self._layouts["local"].pack(stack_trees(each))
        return {name: flat.repeat_interleave(self._members[0].num_rows, 0) for name, flat in rows.items()}

    def server(self, run: int) -> Tree:
        """The server's tree of a run, as views that follow every exchange."""
        tree = self._layouts["server"].unpack(unnamed("server", self._state))
        return {key: value[run] for key, value in tree.items()}

    def load_server(self, run: int, tree: Tree) -> None:
        """Put another tree in the place of a run's server."""
        place = self.server(run)
        torch._foreach_copy_(list(place.values()), [tree[key] for key in place])  # pyright: ignore[reportPrivateImportUsage]

    def memory(self, run: int) -> Tree:
        """What merges remember of a run."""
        return {key: self._state[f"memory:{key}"][run] for key in self._remembered[run]}

    def remembers(self, run: int) -> frozenset[str]:
        """The names of what merges remember of a run."""
        return self._remembered[run]

    def load_memory(self, run: int, tree: Tree) -> None:
        """Put other memories in the place of a run's."""
        self._remembered[run] = frozenset(tree)
        for key, value in tree.items():
            self._room_for(key, value)[run].copy_(value)

    def _room_for(self, key: str, like: torch.Tensor) -> torch.Tensor:
        name = f"memory:{key}"
        if name not in self._state:
            self._state[name] = like.new_zeros(len(self.runs), *like.shape, device=self.sites.device)
        return self._state[name]

    def clients(self, run: int, clients: Sequence[int]) -> list[Tree]:
        """The own states of some clients, copied to the host at once."""
        rows = self._rows_of(run, clients)
        flats = {name: flat.index_select(0, rows).cpu() for name, flat in unnamed("local", self._state).items()}
        trees = self._layouts["local"].unpack(flats)
        return [{key: value[row].contiguous() for key, value in trees.items()} for row in range(len(clients))]

    def states(self, run: int, clients: Sequence[int]) -> list[Tree]:
        """The own states of some clients where they lie."""
        trees = self._layouts["local"].unpack(unnamed("local", self._state))
        rows = map(self._members[run].row, clients)
        return [{key: value[row] for key, value in trees.items()} for row in rows]

    def load_states(self, run: int, trees: Mapping[int, Tree]) -> None:
        """Put states in the place of clients' own; an entry that a state does not have stays as it is."""
        by_keys: dict[frozenset[str], list[int]] = {}
        for client, tree in trees.items():
            by_keys.setdefault(frozenset(self._local.keys() & tree.keys()), []).append(client)
        places = self._layouts["local"].unpack(unnamed("local", self._state))
        for keys, clients in by_keys.items():
            rows = self._rows_of(run, clients)
            for key in keys:
                new = torch.stack([trees[client][key] for client in clients])
                places[key].index_copy_(0, rows, new.to(self.sites.device))

    def _rows_of(self, run: int, clients: Sequence[int]) -> torch.Tensor:
        return torch.tensor([self._members[run].row(client) for client in clients], device=self.sites.device)

    def pays(self, work: Work) -> bool:
        """Whether work of this shape is worth a program, which takes seconds to make.

        The first shape of a phase is; others must have come some times. So runs whose every round has another shape,
        such as one client a round with clients of all sizes, do not make programs for ever.
        """
        self._asked[work] += 1
        shapes = [shape for shape in self._asked if shape.phase == work.phase]
        return shapes[0] == work or (self._asked[work] > OFTEN and shapes.index(work) < _MOST_SHAPES)

    def has_another_way(self, phase: PreparedPhase, error: Exception) -> bool:
        """Leave the way by which a phase could not be a program; where there is no other, it is refused from now on."""
        if not isinstance(error, NotAProgram | ChangesItself) and self.ways.next(phase, error):
            return True
        self.refused.add(phase.id)
        return False

    def shapes(self) -> list[list[Any]]:
        """The first shapes of each phase, the only ones that count, and how often they came."""
        seen: Counter[PhaseId] = Counter()
        found: list[list[Any]] = []
        for work, times in self._asked.items():
            seen[work.phase] += 1
            if seen[work.phase] <= _MOST_SHAPES:
                found.append([str(work.phase), *work[1:], times])
        return found

    def load_shapes(self, shapes: Sequence[Sequence[Any]]) -> None:
        """Go on counting where `shapes` was; runs that share the stack have counted together."""
        for phase, clients, steps, size, times in shapes:
            work = Work(PhaseId.parse(phase), clients, steps, size)
            self._asked[work] = max(self._asked[work], times)

    def exchange(self, tasks: Mapping[int, Assignment], work: Work) -> dict[int, LateReports]:
        """One exchange of some runs with work of this shape."""
        return self._play(*self._ready(tasks, work), tasks)

    def train(self, run: int, task: Assignment, work: Work, probes: Sequence[Probe] = ()) -> PhaseProgram:
        """An exchange of one run without its merge; the program that played it has what clients end with."""
        key, program, flat = self._ready({run: task}, work)
        try:
            program.send(flat)
            program.train(probes)
        except BaseException:
            del self._programs[key]
            raise
        return program

    def judge(self, run: int, program: PhaseProgram, task: Assignment) -> LateReports:
        """What clients report of an exchange that `train` has played, before it is merged."""
        return LateReports(program, program.judge(), 0, task, self.runs[run])

    def merge(self, run: int, program: PhaseProgram) -> None:
        """Merge an exchange that `train` has played."""
        self._make_room(program)
        program.merge()
        self._remembered[run] = self._remembered[run].union(program.remembered)

    def _ready(self, tasks: Mapping[int, Assignment], work: Work) -> tuple[Any, PhaseProgram, torch.Tensor]:
        """The program of an exchange, its key among all, and the message it is to be sent."""
        runs = sorted(tasks)
        members = [self._members[run] for run in runs]
        if work.steps is None:
            (task,) = tasks.values()
            steps = power_of_2(max(task.counts))  # so that there are few numbers of steps
            own = list(zip(task.clients, task.firsts, task.counts, strict=True))
            table = Table.of(members[0].batches, own, steps)
            key, ragged = self._program(RaggedProgram, tasks, steps, table.rows.shape[-1])
            ragged.launches = table.launches()
            parts = message(members, [task], [(table.rows, table.keys, table.draws)])
            return key, ragged, ragged.flat({**parts, **table.message(ragged.launches)})[0]
        key, program = self._program(PhaseProgram, tasks, work.steps, work.size)
        by_runs = self._messages.setdefault(program, {})
        messages = by_runs.get(tuple(runs)) or by_runs.setdefault(tuple(runs), Messages())
        return key, program, messages.next(program, members, [tasks[run] for run in runs])

    def _program(
        self, kind: type[AnyProgram], tasks: Mapping[int, Assignment], steps: int, size: int
    ) -> tuple[Any, AnyProgram]:
        """The program of work of this shape, and its key among all."""
        run, task = min(tasks.items())
        memory, way = self._remembered[run] if self.merges else frozenset[str](), self.ways.of(task.phase)
        key = (kind, way, task.phase.id, len(tasks), len(task.clients), steps, size, memory)
        if key not in self._programs:
            self._programs[key] = kind(
                self.sites, self.sites.phase(task.phase.id), self._state, self._layouts, self._batches,
                numbers=list(task.exchange.numbers), runs=len(tasks), memory=memory, clients=len(task.clients),
                steps=steps, batch_size=size, log_rows=MOST_AWAITED, keep=task.exchange.keeps, way=way,
            )  # fmt: skip
        return key, self._programs[key]

    def _play(
        self, key: Any, program: PhaseProgram, flat: torch.Tensor, tasks: Mapping[int, Assignment]
    ) -> dict[int, LateReports]:
        runs = sorted(tasks)
        for row in range(len(runs)):  # the slot in the log is taken again
            if late := self._waiting.get((program, program.turn % MOST_AWAITED, row)):
                late.settle()
        try:
            program.send(flat)
            self._make_room(program)
            slot = program.play()
        except BaseException:
            del self._programs[key]  # whatever it holds may be what was in the way
            raise
        for run in runs:
            self._remembered[run] = self._remembered[run].union(program.remembered)
        reports = {}
        for row, run in enumerate(runs):
            reports[run] = LateReports(program, slot, row, tasks[run], self.runs[run])
            self._waiting[program, slot, row] = reports[run]
        return reports

    def _make_room(self, program: PhaseProgram) -> None:
        """Room for what a first merge begins to remember."""
        if program.turn == 0:
            program.remembered = program.remembers()
            for key, value in program.remembered.items():
                self._room_for(key, value[0])


def entries_with(sites: Sites, *policies: Policy) -> dict[str, Entry]:
    """The entries that have one of the policies in some phase, by key."""
    each = (found for phase in sites.phases for found in phase.schema.items())
    return {key: entry for key, (entry, policy) in each if policy in policies}


def _joined_pools(runs: Sequence[Sites]) -> tuple[Batches, list[int]]:
    """Batches that gather from the examples of all runs, and where those of each begin; equal data lie there once."""
    pools: list[tuple[torch.Tensor, torch.Tensor]] = []
    which: list[int] = []
    for sites in runs:
        own = sites.batches.pool.x, sites.batches.pool.y
        found = (index for index, pool in enumerate(pools) if all(map(_equal, pool, own)))
        which.append(next(found, len(pools)))
        if which[-1] == len(pools):
            pools.append(own)
    batches = runs[0].batches
    if len(pools) == 1:
        return batches, [0] * len(runs)
    x, y = (torch.cat(parts) for parts in zip(*pools, strict=True))
    begins = [sum(len(labels) for _, labels in pools[:index]) for index in which]
    return replace(batches, pool=replace(batches.pool, x=x, y=y)), begins


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or torch.equal(a, b)
