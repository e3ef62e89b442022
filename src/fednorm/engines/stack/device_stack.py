"""Runs whose rounds never leave the device: the host sends one message an exchange and reads nothing back until asked.

Several runs of the same program share the client axis: client j of run r is row r * clients + j of every stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch

from fednorm.core.method import Phase
from fednorm.core.report import Report
from fednorm.core.state import Entry, Policy, Tree
from fednorm.data.batches import Batches
from fednorm.engines.base import stack_trees, start_view
from fednorm.engines.stack.kernels.tiles import power_of_2
from fednorm.engines.stack.phase_program import LOSSES, LogCopy, PhaseProgram, named, unnamed
from fednorm.engines.stack.ragged import OFTEN, RaggedProgram, Table
from fednorm.engines.stack.row_matrix import ALIGNMENT, RowMatrix
from fednorm.running.plan import Plan

AnyProgram = TypeVar("AnyProgram", bound=PhaseProgram)
DEVICES = {"cuda"}
"""Where rounds stay on the device; elsewhere there is little to gain."""
LOG_ROWS = 64
"""Exchanges whose reports may wait on the device."""
_MOST_SHAPES = 8
"""A shape of work other than a phase's first gets a program when it comes often, and only the first few shapes do."""
_AHEAD = 64
"""Steps whose batches are drawn at once."""
MOST_LOCAL_BYTES = 8 << 30
"""Clients' own states stay on the device up to this; beyond, they go the ordinary way through the run's store."""


@dataclass(frozen=True)
class Task:
    """What the clients of one run do in an exchange: which they are, and the batches they go on with."""

    place: tuple[str, int, int]
    """where the method has this phase: stage or finish or query, and its number"""
    phase: Phase
    round: int
    clients: Sequence[int]
    firsts: Sequence[int]
    keep: bool = True
    """whether what clients keep changes; a test leaves it alone"""


class Work(NamedTuple):
    """The shape of a task."""

    place: tuple[str, int, int]
    clients: int
    steps: int | None
    """that all clients take, on batches of one size; None where their work is unequal"""
    size: int
    """of the batches of equal work"""
    keep: bool


class LateReports(Sequence[Report]):
    """Reports that are read from the device when somebody looks at them."""

    def __init__(self, exchange: PhaseProgram, slot: int, place: int, task: Task, plan: Plan) -> None:
        self._at = exchange, slot, place, plan
        self._log: LogCopy | None = None
        self._clients = task.clients
        self._ready: list[Report] | None = None
        self._healthy: list[bool] = []

    def send(self) -> None:
        """Let the reports come to the host, where they are read later."""
        self._log = self._log or self._at[0].log()

    def settle(self) -> list[Report]:
        """The reports, now."""
        if self._ready is None:
            exchange, slot, place, plan = self._at
            first = place * exchange.clients
            log = (self._log or exchange.log()).read()
            *numbers, healthy = log[slot, :, first : first + exchange.clients].tolist()
            self._ready = [
                Report(
                    client=client,
                    num_examples=plan.batches.num_examples(client),
                    losses=dict(zip(LOSSES, values, strict=False)),
                    scalars=dict(zip(exchange.phase.measures, values[len(LOSSES) :], strict=True)),
                )
                for client, values in zip(self._clients, zip(*numbers, strict=True), strict=True)
            ]
            self._healthy = [bool(each) for each in healthy]
        return self._ready

    def unhealthy(self) -> list[int]:
        """Clients with numbers that are not finite."""
        self.settle()
        return [client for client, fine in zip(self._clients, self._healthy, strict=True) if not fine]

    def __getitem__(self, place: Any) -> Any:
        return self.settle()[place]

    def __len__(self) -> int:
        return len(self._clients)

    def __iter__(self) -> Iterator[Report]:
        return iter(self.settle())


class Upcoming:
    """The batches of a run's next exchanges, drawn for several at once where everybody takes part in every round."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ahead = _AHEAD if plan.cohort_size == len(plan.federation.training_clients) else 1
        self._clients: Sequence[int] = ()
        self._firsts: list[int] = []
        self._table: list[torch.Tensor] = []

    def take(self, task: Task, steps: int) -> list[torch.Tensor]:
        """(rows, keys, draws) of a task's steps."""
        at = task.firsts[0] - self._firsts[0] if self._firsts else 0
        drawn = self._clients == task.clients and [first + at for first in self._firsts] == list(task.firsts)
        if not drawn or not 0 <= at <= len(self._table[0]) - steps:
            self._draw(task, steps)
            at = 0
        return [part[at : at + steps] for part in self._table]

    def _draw(self, task: Task, steps: int) -> None:
        batches = self._plan.batches
        each = [(batches.stream(client), first) for client, first in zip(task.clients, task.firsts, strict=True)]
        total = max(steps, min(_AHEAD, steps * self._ahead))
        if len(set().union(*(stream.sizes(first, total) for stream, first in each))) > 1:
            total = steps
        rows, keys = batches.span(task.clients, task.firsts, total)
        self._clients, self._firsts = task.clients, list(task.firsts)
        self._table = [rows, keys, batches.draws(keys, rows.shape[-1])]


class DeviceStack:
    """The state of some runs on the device, and the programs that move it."""

    def __init__(self, plans: Sequence[Plan], channels_last: bool) -> None:
        self.plans, self.plan = plans, plans[0]
        # What is trained lies together and comes first, entries of an odd size last: see `Exchange`.
        servers = [plan.initial() for plan in plans]
        held = [entry for key, entry in entries_with(self.plan, *Policy).items() if key in servers[0]]
        held.sort(key=lambda entry: (not entry.trainable, entry.size % ALIGNMENT != 0))
        self._local = entries_with(self.plan, Policy.LOCAL)
        self._layouts = {
            "server": RowMatrix({entry.key: entry for entry in held}, channels_last),
            "local": RowMatrix(self._local, channels_last),
        }
        self.refused: set[tuple[str, int, int]] = set()
        """places of phases that could not be made a program; their runs go the ordinary way"""
        self.most_at_once = len(plans)
        """runs whose exchange is one program; fewer where all of them did not fit into memory"""
        self.holds_local = bool(self._local)
        self.num_clients = len(self.plan.federation.clients)
        self._batches, self._offsets = _pooled(plans)
        self._exchanges: dict[Any, Any] = {}
        self._waiting: WeakValueDictionary[tuple[PhaseProgram, int, int], LateReports] = WeakValueDictionary()
        """reports by their place in an exchange's log, as long as somebody may look at them"""
        self._remembered = [frozenset[str]() for _ in plans]
        self._asked: Counter[Work] = Counter()
        self._upcoming = [Upcoming(plan) for plan in plans]
        self._state = named("server", self._layouts["server"].pack(stack_trees(servers)))
        self._state |= named("initial", {name: flat.clone() for name, flat in unnamed("server", self._state).items()})
        self._state |= named("local", self._blank_clients())

    def _blank_clients(self) -> dict[str, torch.Tensor]:
        if not self._local:
            return {}
        schema = {key: (entry, Policy.LOCAL) for key, entry in self._local.items()}
        rows = self._layouts["local"].pack(stack_trees([start_view(plan, schema, {}, {}) for plan in self.plans]))
        return {name: flat.repeat_interleave(self.num_clients, 0) for name, flat in rows.items()}

    def server(self, run: int) -> Tree:
        """The server's tree of a run, as views that follow every exchange."""
        tree = self._layouts["server"].unpack(unnamed("server", self._state))
        return {key: value[run] for key, value in tree.items()}

    def load_server(self, run: int, tree: Tree) -> None:
        """Put another tree in the place of a run's server."""
        for key, value in self.server(run).items():
            value.copy_(tree[key])

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
            self._state[name] = like.new_zeros(len(self.plans), *like.shape, device=self.plan.device)
        return self._state[name]

    def clients(self, run: int, clients: Sequence[int]) -> list[Tree]:
        """The own states of some clients, copied to the host at once."""
        rows = torch.tensor([run * self.num_clients + client for client in clients], device=self.plan.device)
        flats = {name: flat.index_select(0, rows).cpu() for name, flat in unnamed("local", self._state).items()}
        trees = self._layouts["local"].unpack(flats)
        return [{key: value[place].contiguous() for key, value in trees.items()} for place in range(len(clients))]

    def load_client(self, run: int, client: int, tree: Tree) -> None:
        """Put a state in the place of a client's own."""
        row = run * self.num_clients + client
        flats = {name: flat[row : row + 1] for name, flat in unnamed("local", self._state).items()}
        for key, value in self._layouts["local"].unpack(flats).items():
            if key in tree:
                value[0].copy_(tree[key])

    def pays(self, work: Work) -> bool:
        """Whether work of this shape is worth a program, which takes seconds to make.

        The first shape of a phase is; others must have come some times. So runs whose every round has another shape,
        such as one client a round with clients of all sizes, do not make programs for ever.
        """
        self._asked[work] += 1
        shapes = [shape for shape in self._asked if shape.place == work.place]
        return shapes[0] == work or (self._asked[work] > OFTEN and shapes.index(work) < _MOST_SHAPES)

    def exchange(self, tasks: Mapping[int, Task], steps: int, size: int) -> dict[int, LateReports]:
        """One exchange of some runs, whose clients all take so many steps on batches of this size."""
        place, exchange = self._exchange(PhaseProgram, tasks, steps, size)
        message = self._message(tasks, [self._upcoming[run].take(tasks[run], steps) for run in sorted(tasks)])
        return self._play(place, exchange, message, tasks)

    def exchange_ragged(self, run: int, task: Task) -> dict[int, LateReports]:
        """One exchange of a run whose clients have unequal work."""
        plan = self.plans[run]
        work = [(c, first, plan.num_steps(c, task.phase)) for c, first in zip(task.clients, task.firsts, strict=True)]
        steps = power_of_2(max(count for *_, count in work))  # so that there are few numbers of steps
        table = Table.of(plan.batches, work, steps)
        place, exchange = self._exchange(RaggedProgram, {run: task}, steps, table.rows.shape[-1])
        exchange.launches = table.launches()
        message = self._message({run: task}, [[table.rows, table.keys, table.draws]])
        return self._play(place, exchange, {**message, **table.message(exchange.launches)}, {run: task})

    def _exchange(
        self, kind: type[AnyProgram], tasks: Mapping[int, Task], steps: int, size: int
    ) -> tuple[Any, AnyProgram]:
        """The exchange of work of this shape, and its place among all."""
        run, task = min(tasks.items())
        memory = self._remembered[run]
        place = (kind, task.place, len(tasks), len(task.clients), steps, size, memory, task.keep)
        if place not in self._exchanges:
            self._exchanges[place] = kind(
                self.plan, task.phase, self._state, self._layouts, self._batches, runs=len(tasks), memory=memory,
                clients=len(task.clients), steps=steps, batch_size=size, log_rows=LOG_ROWS, keep=task.keep,
            )  # fmt: skip
        return place, self._exchanges[place]

    def _play(
        self, place: Any, exchange: PhaseProgram, message: Mapping[str, torch.Tensor], tasks: Mapping[int, Task]
    ) -> dict[int, LateReports]:
        runs = sorted(tasks)
        for row in range(len(runs)):  # the place in the log is taken again
            if late := self._waiting.get((exchange, exchange.turn % LOG_ROWS, row)):
                late.settle()
        try:
            exchange.send(message)
            self._make_room(exchange)
            slot = exchange.play()
        except BaseException:
            del self._exchanges[place]  # whatever it holds may be what was in the way
            raise
        for run in runs:
            self._remembered[run] = self._remembered[run].union(exchange.remembered)
        reports = {}
        for row, run in enumerate(runs):
            reports[run] = LateReports(exchange, slot, row, tasks[run], self.plans[run])
            self._waiting[exchange, slot, row] = reports[run]
        return reports

    def _make_room(self, exchange: PhaseProgram) -> None:
        """Places for what a first merge begins to remember."""
        if exchange.turn == 0:
            exchange.remembered = exchange.remembers()
            for key, value in exchange.remembered.items():
                self._room_for(key, value[0])

    def _message(self, tasks: Mapping[int, Task], batches: Sequence[Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What an exchange is sent; the batches of each run are (rows, keys, draws)."""
        rows, keys, drawn, numbers = [], [], [], []
        places, sizes, last = [], [], []
        for (run, task), (own_rows, own_keys, own_draws) in zip(sorted(tasks.items()), batches, strict=True):
            plan = self.plans[run]
            rows.append(own_rows + self._offsets[run])
            keys.append(own_keys)
            drawn.append(own_draws)
            row = torch.tensor(list(plan.numbers(task.phase, task.round).values()), dtype=torch.float64)
            numbers.append(row.unsqueeze(1).expand(-1, len(task.clients)))
            places += [run * self.num_clients + max(client, 0) for client in task.clients]
            sizes += [plan.batches.num_examples(client) for client in task.clients]
            last += [plan.batches.per_epoch(client) for client in task.clients]
        return {
            "batch_rows": torch.cat(rows, 1),
            "batch_keys": torch.cat(keys, 1),
            "batch_draws": torch.cat(drawn, 1),
            "numbers": torch.cat(numbers, 1).contiguous(),
            "places": torch.tensor(places),
            "num_examples": torch.tensor(sizes),
            "last_epoch": torch.tensor(last),
            "runs": torch.tensor(sorted(tasks)),
        }


def entries_with(plan: Plan, *policies: Policy) -> dict[str, Entry]:
    """The entries that have one of the policies in some phase, by key."""
    each = (found for phase in plan.phases for found in plan.schema(phase).items())
    return {key: entry for key, (entry, policy) in each if policy in policies}


def _pooled(plans: Sequence[Plan]) -> tuple[Batches, list[int]]:
    """Batches that gather from the examples of all runs, and where those of each begin; equal data lie there once."""
    pools: list[tuple[torch.Tensor, torch.Tensor]] = []
    which: list[int] = []
    for plan in plans:
        own = plan.federation.x, plan.federation.y
        found = (place for place, pool in enumerate(pools) if all(map(_equal, pool, own)))
        which.append(next(found, len(pools)))
        if which[-1] == len(pools):
            pools.append(own)
    batches = plans[0].batches
    if len(pools) == 1:
        return batches, [0] * len(plans)
    x, y = (torch.cat(parts) for parts in zip(*pools, strict=True))
    begins = [sum(len(labels) for _, labels in pools[:place]) for place in which]
    return replace(batches, federation=replace(batches.federation, x=x, y=y)), begins


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or torch.equal(a, b)
