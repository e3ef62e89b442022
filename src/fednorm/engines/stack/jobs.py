"""Jobs whose clients begin at states of their own, as on a clock: stacks of few sizes, each of them a program.

Which clients are trained together changes from one time to the next, and a program is made for one number of clients.
So some jobs are cut into parts whose numbers are powers of 2, and a few programs do for all of them. On a GPU they are
played on a stream of their own: who asked goes on, and what it asks the GPU for meanwhile does not wait for them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fednorm.core.probe import Probe
from fednorm.core.state import Tree, named, unnamed
from fednorm.engines.base import stack_trees
from fednorm.engines.stack.attributes import ChangesItself
from fednorm.engines.stack.device_stack import DEVICES
from fednorm.engines.stack.kernels.layers import filters_lie_channels_last
from fednorm.engines.stack.kernels.tiles import power_of_2
from fednorm.engines.stack.log_copy import LogCopy
from fednorm.engines.stack.messages import Drawn
from fednorm.engines.stack.phase_program import NotAProgram
from fednorm.engines.stack.program import Moves
from fednorm.engines.stack.ragged import RaggedProgram, Table
from fednorm.engines.stack.row_matrix import Flats, RowMatrix, aligned
from fednorm.engines.stack.timetable import Launch
from fednorm.engines.stack.ways import Ways
from fednorm.engines.tolerance import Train
from fednorm.errors import FednormError
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.site import Sites
from fednorm.halves.training import Job, Outcome, Together, outcome

MOST = 64
"""Clients of a stack; more at once are hardly quicker."""
WORTH = 16
"""Clients of a stack that is worth being begun while others wait to be merged; fewer are slower each."""


class JobProgram(RaggedProgram):
    """Local steps alone: each client begins where its job says, and nothing is merged."""

    def __init__(self, *args: Any, **named_args: Any) -> None:
        super().__init__(*args, **named_args)
        if self._pass.rule.losses:
            begun = unnamed("params", self._own)
            self._own |= named("anchor", {name: aligned(flat) for name, flat in begun.items()})

    def _start_flats(self, state: Tree) -> dict[str, Flats]:
        """Room for what clients begin with, which `begin` writes."""
        return {
            part: {name: self._room(keys) for name, keys in layout.keys.items()}
            for part, layout in self._stacks.items()
        }

    def _room(self, keys: Sequence[str]) -> Tensor:
        entries = [self.schema[key][0] for key in keys]
        width = sum(entry.size for entry in entries)
        return torch.zeros(self.rows, width, dtype=entries[0].dtype, device=self.sites.device)

    def _anchor(self, state: Tree, probes: Sequence[Probe] = ()) -> Flats | None:
        return unnamed("anchor", state) or None

    def _calls(self, name: str) -> int:
        """Nobody knows how often this many come, so torch's compiler, which takes a minute, is not asked."""
        return 0

    def begin(self, starts: Sequence[Tree]) -> Tree:
        """Write what clients begin with over what others ended with; it is returned as a stack."""
        stack = stack_trees(starts)
        for part, layout in self._stacks.items():
            for name, flat in layout.pack({key: stack[key] for key in layout.shapes}).items():
                self._own[f"{part}:{name}"].copy_(flat)
        for name, flat in unnamed("anchor", self._own).items():
            flat.copy_(self._own[f"params:{name}"])
        self._own["step"].zero_()
        return stack

    def _play(self) -> None:
        others_wrote = True  # as `begin` did
        for launch in self.launches:
            of_all = launch.width == self.rows and not launch.fill and launch.size == self.batch_size
            if of_all:
                self._run("step of everybody", self._everybody, anew=others_wrote)
            else:
                self._step_of(launch.width, launch.size, ())
            others_wrote = not of_all

    def _everybody(self, state: Tree) -> Moves:
        """A step of all clients in the order of the stack, so that nothing is taken out of it and put back."""
        at = state["entries"].index_select(0, state["step"] + torch.arange(self.rows, device=state["step"].device))
        batch = {
            name: state[name].flatten(0, 1).index_select(0, at) for name in ("batch_rows", "batch_keys", "batch_draws")
        }
        new, seen = self._moved(state, batch, state["numbers"], self._anchor(state))
        losses = state["losses"].flatten().index_copy(0, at, seen.loss).view_as(state["losses"])
        return {"step": state["step"] + self.rows, "losses": losses, **new}, {}


@dataclass(frozen=True)
class Begun:
    """A stack under way."""

    jobs: Sequence[Job]
    states: Together
    losses: LogCopy
    """(step, job); it is there when all is"""

    def trained(self) -> Iterator[tuple[Job, Tree, list[float]]]:
        """Each job with its end and its losses, waited for."""
        losses: list[list[float]] = self.losses.read().T.tolist()
        ended = self.states.ended
        rows = zip(*(value.unbind() for value in ended.values()), strict=True)
        for job, row, own in zip(self.jobs, rows, losses, strict=True):
            yield job, dict(zip(ended, row, strict=True)), own[: job.num_steps]


class JobStacks:
    """Trains clients of one run in stacks that are programs, where a phase can be one."""

    def __init__(self, sites: Sites) -> None:
        self.sites = sites
        self._ways = Ways(sites.prepared.model)
        self._most = MOST
        self._refused = set[Any]()
        """phases that could not be made a program"""
        self._programs: dict[Any, JobProgram] = {}
        on_gpu = sites.device.type == "cuda"
        self._stream = torch.cuda.Stream(sites.device) if on_gpu else None
        self._urgent = torch.cuda.Stream(sites.device, priority=-1) if on_gpu else None
        """for what is done beside: among the kernels of a stack its small ones would each wait for a large one"""

    def may_train(self, phase: PreparedPhase) -> bool:
        """Whether programs are for such work at all: one pass of steps that each client takes for itself, on a device.

        A restart finds the same, whatever was tried before it.
        """
        on_device = self.sites.device.type in DEVICES and self.sites.batches.pool.live is None
        return on_device and len(phase.passes) == 1 and not phase.phase.lockstep

    def can_train(self, phase: PreparedPhase) -> bool:
        """Whether a phase's work may be a program, and none of it has shown that it cannot."""
        return self.may_train(phase) and phase.id not in self._refused

    def train(self, phase: PreparedPhase, jobs: Sequence[Job], otherwise: Train) -> Iterator[Outcome]:
        """The outcomes of clients' work, which is under way when this returns; what cannot be a program is not."""
        begun: list[Begun] = []
        waiting = list(jobs)
        while waiting and self.can_train(phase):
            part = waiting[: min(self._most, power_of_2(len(waiting) + 1) // 2)]
            try:
                begun.append(self._begin(phase, part))
            except FednormError:
                raise
            except Exception as error:  # of tracing, compiling, capturing or the model, which then comes again
                self._give_up(phase, error, len(part))
                continue
            self._ways.works(phase)
            waiting = waiting[len(part) :]
        return self._outcomes(phase, begun, waiting, otherwise)

    def _outcomes(
        self,
        phase: PreparedPhase,
        begun: Sequence[Begun],
        waiting: Sequence[Job],
        otherwise: Train,
    ) -> Iterator[Outcome]:
        for stack in begun:
            for job, end, losses in stack.trained():
                yield outcome(self.sites, phase, job, end, losses, None, stack.states)
        if waiting:
            yield from otherwise(phase, waiting, False)

    @contextmanager
    def _aside(self) -> Generator[None]:
        """Work that begins behind all that was asked for, and that nothing asked for later waits for.

        So memory that it takes may have been given back by anybody before.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def urgent(self) -> Generator[None]:
        """In which what is asked of the GPU goes before the stacks under way."""
        if self._urgent is None:
            yield
            return
        outside = torch.cuda.current_stream()
        self._urgent.wait_stream(outside)
        try:
            with torch.cuda.stream(self._urgent):
                yield
        finally:
            outside.wait_stream(self._urgent)

    def _give_up(self, phase: PreparedPhase, error: Exception, count: int) -> None:
        """Try fewer clients, or the next way; where there is neither, leave the phase to others."""
        self._programs.clear()  # whatever they hold may be what was in the way
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            if count > 1:
                self._most = count // 2
                return
        if isinstance(error, NotAProgram | ChangesItself) or not self._ways.next(phase, error):
            self._refused.add(phase.id)

    def _begin(self, phase: PreparedPhase, jobs: Sequence[Job]) -> Begun:
        batches = self.sites.batches
        steps = power_of_2(max(job.num_steps for job in jobs))
        table = Table.of(batches, [(job.client, job.first_batch, job.num_steps) for job in jobs], steps)
        with self._aside():
            program = self._program(phase, list(jobs[0].numbers), len(jobs), steps, table.rows.shape[-1])
            program.launches = [_in_order(launch, len(jobs)) for launch in table.launches()]
            drawn: Drawn = (table.rows, table.keys, table.draws)
            program.send(program.flat({**_message(jobs, drawn), **table.message(program.launches)})[0])
            starts = program.begin([job.start for job in jobs])
            program.play()
            # Apart from where the next ones begin.
            ends = {key: value.clone(memory_format=torch.contiguous_format) for key, value in program.ends.items()}
            return Begun(jobs, Together([job.client for job in jobs], starts, ends), LogCopy(program.losses))

    def _program(self, phase: PreparedPhase, numbers: Sequence[str], clients: int, steps: int, size: int) -> JobProgram:
        way = self._ways.of(phase)
        key = (way, phase.id, clients, steps, size)
        if key not in self._programs:
            channels_last = filters_lie_channels_last(self.sites.prepared.model)
            server = RowMatrix({each: entry for each, (entry, _) in phase.schema.items()}, channels_last)
            self._programs[key] = JobProgram(
                self.sites, phase, {}, {"server": server}, self.sites.batches,
                numbers=numbers, runs=1, memory=frozenset[str](), clients=clients,
                steps=steps, batch_size=size, log_rows=1, keep=False, way=way,
            )  # fmt: skip
        return self._programs[key]


def _message(jobs: Sequence[Job], drawn: Drawn) -> dict[str, Tensor]:
    """What a program is told beside who steps when."""
    rows, keys, draws = drawn
    told = torch.tensor([[job.numbers[name] for job in jobs] for name in jobs[0].numbers], dtype=torch.float64)
    unused = torch.zeros(len(jobs), dtype=torch.int64)
    parts = {"batch_rows": rows, "batch_keys": keys, "batch_draws": draws, "numbers": told, "runs": unused[:1]}
    return {**parts, **dict.fromkeys(("client_rows", "num_examples", "last_epoch"), unused)}


def _in_order(launch: Launch, clients: int) -> Launch:
    """A step of everybody in the order of the stack."""
    if len(launch.steps) < clients:
        return launch
    return replace(launch, steps=sorted(launch.steps, key=lambda step: step[1]))
