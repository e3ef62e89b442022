"""One phase of a round as three programs over tensors on the device: start, local step, merge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import prod

import torch
from torch import Tensor
from torch.func import grad_and_value

from fednorm.core.optim import Joined, buffer_key
from fednorm.core.probe import Probe
from fednorm.core.reductions import merging
from fednorm.core.report import LOSSES, Reports
from fednorm.core.state import Policy, Tree, named, unnamed
from fednorm.core.step import Batch, Carry, Seen, Step, training_mode
from fednorm.data.batches import Batches
from fednorm.engines.stack.attributes import unchanged
from fednorm.engines.stack.gather import Gather
from fednorm.engines.stack.guard import NUM_MOVED, moved_norms
from fednorm.engines.stack.health import health, unsigned
from fednorm.engines.stack.kernels.joint import StackCohort, on_stack
from fednorm.engines.stack.log_copy import LogCopy
from fednorm.engines.stack.lost_writes import LostWritesRefused
from fednorm.engines.stack.making_ready import making_ready
from fednorm.engines.stack.program import GraphRoom, Moves, Program, Rows
from fednorm.engines.stack.row_matrix import ALIGNMENT, Flats, RowMatrix, aligned, aligned_rows
from fednorm.engines.stack.slow_operators import slow_operators_named
from fednorm.engines.stack.ways import Way
from fednorm.halves.merging import merge_stack
from fednorm.halves.prepared_phase import CARRIED, PreparedPhase, Source, source_of
from fednorm.halves.site import Sites

_BATCHES = ("batch_rows", "batch_keys", "batch_draws")
"""Parts of a message that are about batches, of which every exchange has its own."""
MOST_IN_ONE = 2
"""Up to this many steps a round is one program; more would only make it long."""


class NotAProgram(Exception):
    """A phase that is more than a function of tensors with a row each; it is played the ordinary way."""


class PhaseProgram:
    """The programs of a phase for some runs with as many clients each, all with as many steps on batches of one size.

    `common` is the state that all exchanges share: `server`, `initial` and what merges remember (a row a run), and
    `local` (a row a client). Which runs take part and which clients is in each message. Stacks have a row for each
    client of each run that takes part; `memory` names what merges remember of these runs.
    """

    def __init__(
        self, sites: Sites, phase: PreparedPhase, common: Tree, layouts: Mapping[str, RowMatrix], batches: Batches,
        *, numbers: Sequence[str], runs: int, clients: int, steps: int, batch_size: int, log_rows: int,
        memory: frozenset[str], keep: bool, way: Way = Way.FUSED,
    ) -> None:  # fmt: skip
        self.sites, self.phase = sites, phase
        (self._pass,) = phase.passes
        self.runs, self.clients, self.steps, self.log_rows = runs, clients, steps, log_rows
        self.batch_size = batch_size
        self.schema = phase.schema
        self.numbers = numbers
        self.turn = 0
        self.memory, self.keep, self.way = memory, keep, way
        self.remembered: Tree = {}
        self._copied: tuple[int, LogCopy] | None = None
        self._common, self._layouts = common, layouts
        rows = self.rows = runs * clients
        message = self._shapes(batches)
        sizes = [prod(shape) for shape in message.values()]
        self._inbox = torch.zeros(sum(sizes), dtype=torch.int64, device=sites.device)
        self._message = {
            name: (part.view(torch.float64) if name == "numbers" else part).view(shape)
            for (name, shape), part in zip(message.items(), self._inbox.split(sizes), strict=True)
        }
        width = len(LOSSES) + len(phase.phase.measures) + NUM_MOVED + 1
        self._own: Tree = {
            "step": torch.zeros(1, dtype=torch.int64, device=sites.device),
            "slot": torch.zeros(1, dtype=torch.int64, device=sites.device),
            "losses": torch.zeros(steps, rows, dtype=torch.float64, device=sites.device),
            "log": torch.zeros(log_rows, width, rows, dtype=torch.float64, device=sites.device),
        }
        self._stacks: dict[str, RowMatrix] = {}
        for part in CARRIED:
            self._stacks[part] = self._layout(part)
        for part, flats in self._start_flats(self._state).items():
            self._own |= named(part, {name: aligned(flat) for name, flat in flats.items()})
        self._own |= named("unsigned", unsigned(phase, self._stacks["state"], sites.device))
        self._gather = Gather(batches, layouts["server"].channels_last and way is Way.FUSED)
        self._programs: dict[str, Program] = {}
        self._graphs = GraphRoom() if sites.device.type == "cuda" else None

    def _shapes(self, batches: Batches) -> dict[str, tuple[int, ...]]:
        """What a message has."""
        steps, rows, size = self.steps, self.rows, self.batch_size
        return {
            "batch_rows": (steps, rows, size),
            "batch_keys": (steps, rows),
            "batch_draws": (steps, rows, *batches.draws_of_one(size)),
            "numbers": (len(self.numbers), rows),
            "client_rows": (rows,),
            "num_examples": (rows,),
            "last_epoch": (rows,),
            "runs": (self.runs,),
        }

    @property
    def _state(self) -> Tree:
        return {**self._common, **self._message, **self._own}

    @property
    def message_size(self) -> int:
        """How many numbers a message has."""
        return len(self._inbox)

    def flat(self, parts: Mapping[str, Tensor], count: int = 1) -> Tensor:
        """Some messages as rows that `send` takes; parts without batches are the same in all of them."""
        flat = torch.cat(
            [
                parts[name].view(torch.int64).reshape(count if name in _BATCHES else 1, own.numel()).expand(count, -1)
                for name, own in self._message.items()
            ],
            1,
        )
        return flat.pin_memory() if self._inbox.is_cuda else flat

    def part(self, flat: Tensor, name: str) -> Tensor:
        """One part of messages that `flat` made."""
        first = self._message[name].storage_offset()
        return flat[:, first : first + self._message[name].numel()]

    def send(self, message: Tensor) -> None:
        """Write the message of the next exchange, behind the work that is still under way."""
        self._inbox.copy_(message, non_blocking=True)

    def play(self) -> int:
        """Start, all local steps, merge; nothing here waits for the device. Returns where the reports will be."""
        self._play()
        self.turn += 1
        return (self.turn - 1) % self.log_rows

    def _play(self) -> None:
        if self.steps <= MOST_IN_ONE:
            self._run("round", self._round)
            return
        self.train()
        self._run("merge", self._merge)

    def merge(self) -> None:
        """Merge what `train` left; reports go to the log."""
        self._run("merge", self._merge)
        self.turn += 1

    def judge(self) -> int:
        """Let what the merge would report of clients be known before it. Returns where the reports will be."""
        self._run("judge", lambda state: ({}, {"log": self._merge(state)[1]["log"]}))
        self._copied = None
        return self.turn % self.log_rows

    def train(self, probes: Sequence[Probe] = ()) -> None:
        """Start and all local steps without the merge; probes look at each client's last step."""
        looks = [probe for probe in probes if probe.see is not None]
        self._run("start", self._start)
        for number in range(self.steps - bool(looks)):
            self._run("step", self._step, anew=number == 0)
        if looks:  # taken seldom, so it is captured as it is: tracing it would take longer
            self._run(*self._seen("step", self._step, looks), fused=False)

    def _seen(self, name: str, step: Callable[..., Moves], probes: Sequence[Probe]) -> tuple[str, Callable[..., Moves]]:
        """A step, given by name, as one that probes look at."""
        looked = partial(step, probes=tuple(probes))
        if any(f"probed:{probe.name}" not in self._own for probe in probes):
            found = named("probed", unnamed("probed", looked(self._state)[0]))
            # Programs of other probes write into what is there already.
            self._own = {**{key: torch.zeros_like(value) for key, value in found.items()}, **self._own}
        return f"{name} seen by {', '.join(probe.name for probe in probes)}", looked

    @property
    def ends(self) -> Tree:
        """What clients end with, a row each, in place: the next exchange writes over it."""
        return {key: v for part in CARRIED for key, v in self._stacks[part].unpack(unnamed(part, self._own)).items()}

    @property
    def losses(self) -> Tensor:
        """Of each step of each client, (step, client), as `ends` is."""
        return self._own["losses"]

    @property
    def probed(self) -> Tree:
        """What probes saw of each client's last step, as `ends` is."""
        return unnamed("probed", self._own)

    def log(self) -> LogCopy:
        """What clients reported up to now, on its way to the host."""
        if self._copied is None or self._copied[0] != self.turn:
            self._copied = self.turn, LogCopy(self._own["log"])
        return self._copied[1]

    def remembers(self) -> Tree:
        """What the merge will remember, with a row a run: found by trying it, since a first merge may begin to."""
        return unnamed("memory", {key: value for key, (_, value) in self._merge(self._state)[1].items()})

    def _run(self, name: str, function: Callable[[Tree], Moves], fused: bool = True, anew: bool = True) -> None:
        if name not in self._programs:
            fused = fused and self.way is not Way.PLAIN
            with making_ready(f"'{self.phase.phase.name}' {name}, {self.rows} clients, batches of {self.batch_size}"):
                self._programs[name] = Program(function, self._state, fused, self._graphs, self._calls(name))
        self._programs[name](anew)

    def _calls(self, name: str) -> int:
        """How often a program is called in a run."""
        return self.sites.work.rounds * (self.steps if name.startswith("step") else 1)

    def _round(self, state: Tree) -> Moves:
        """All of it as one program, in which what is only handed on costs nothing."""
        for function in (self._start, *[self._step] * self.steps):
            new, rows = function(state)
            state = {**state, **new, **{key: state[key].index_copy(0, *at) for key, at in rows.items()}}
        return self._merge(state)

    def _layout(self, part: str) -> RowMatrix:
        """A stack's layout: what the server sends lies together, then what clients keep, then what starts anew."""
        # Entries of an odd size come last, so that the others begin at addresses that kernels can read quickly.
        keys = [key for key, own in self._pass.parts.items() if own == part]
        keys.sort(key=lambda key: (self._source(key), self.schema[key][0].size % ALIGNMENT != 0))
        if part == "optimizer":
            # As the parameters they belong to, wherever either comes from, so that an update is one pass over both.
            names, trained = self.sites.optimizer.buffers, self._stacks["params"].shapes
            keys = [buffer for name in names for key in trained if (buffer := buffer_key(name, key)) in self.schema]
        entries = {key: self.schema[key][0] for key in keys}
        return RowMatrix(entries, self._layouts["server"].channels_last, by_part=part == "optimizer")

    def _source(self, key: str) -> Source:
        return source_of(key, self.schema[key][1], self._layouts["server"].shapes)

    def _start_flats(self, state: Tree) -> dict[str, Flats]:
        """What the clients start from: the server's entries, their own, or fresh ones, as the policies say."""
        used = {self._source(key) for key in self.schema}
        rows = {
            Source.SERVER: self._for_clients("server", state) if Source.SERVER in used else {},
            Source.OWN: self._of_clients(state) if Source.OWN in used else {},
            Source.INITIAL: self._for_clients("initial", state) if Source.INITIAL in used else {},
        }

        def join(keys: list[str]) -> Tensor:
            parts: list[Tensor] = []
            for source, group in groupby(keys, self._source):
                if source is Source.ZEROS:
                    blank = [self.schema[key][0] for key in group]
                    width = sum(entry.size for entry in blank)
                    parts.append(torch.zeros(self.rows, width, dtype=blank[0].dtype, device=self.sites.device))
                else:
                    parts.append(torch.cat([rows[source][key] for key in group], 1).expand(self.rows, -1))
            if len(parts) == 1:
                return parts[0]
            # Rows that begin at aligned addresses, as `aligned` makes them, for kernels that read them at once.
            width = sum(part.shape[1] for part in parts)
            parts.append(parts[0].new_zeros(self.rows, -width % ALIGNMENT))
            return torch.cat(parts, 1)[:, :width]

        return {part: {name: join(keys) for name, keys in layout.keys.items()} for part, layout in self._stacks.items()}

    def _of_runs(self, prefix: str, state: Tree) -> Tree:
        """The server's entries, or their initial values, of the runs that take part."""
        flats = unnamed(prefix, state)
        if any(len(flat) > 1 for flat in flats.values()):
            flats = {name: flat.index_select(0, state["runs"]) for name, flat in flats.items()}
        return self._layouts["server"].rows(flats)

    def _of_clients(self, state: Tree) -> Tree:
        """What the clients that take part keep of their own."""
        flats = {name: flat.index_select(0, state["client_rows"]) for name, flat in unnamed("local", state).items()}
        return self._layouts["local"].rows(flats)

    def _for_clients(self, prefix: str, state: Tree) -> Tree:
        """The same with a row for each client; of a single run its one row, which serves them all."""
        if self.runs == 1:
            return self._of_runs(prefix, state)
        # Rows that begin at any address would cost every kernel that reads them its wide words.
        own = state["runs"].unsqueeze(1).expand(-1, self.clients).reshape(-1)
        flats = {name: aligned_rows(flat, own) for name, flat in unnamed(prefix, state).items()}
        return self._layouts["server"].rows(flats)

    def _start(self, state: Tree) -> Moves:
        new: Tree = {"step": torch.zeros_like(state["step"])}
        for part, flats in self._start_flats(state).items():
            new |= named(part, flats)
        return new, {}

    def _step(self, state: Tree, probes: tuple[Probe, ...] = ()) -> Moves:
        at = state["step"]
        batch = {name: state[name].index_select(0, at)[0] for name in _BATCHES}
        new, seen = self._moved(state, batch, state["numbers"], self._anchor(state, probes), probes)
        return {"step": at + 1, **new, **named("probed", seen.probed)}, {"losses": (at, seen.loss.unsqueeze(0))}

    def _anchor(self, state: Tree, probes: Sequence[Probe]) -> Flats | None:
        """The parameters that clients were sent, where a penalty term or a probe may ask for them."""
        return self._start_flats(state)["params"] if self._pass.rule.losses or probes else None

    def _moved(
        self, state: Tree, batch: Tree, numbers: Tensor, anchor: Flats | None, probes: tuple[Probe, ...] = ()
    ) -> tuple[Tree, Seen]:
        """The stacks of some clients, as rows of `state`, after a step on their batches, and what it tells."""
        x, y = self._gather.gather(batch["batch_rows"], batch["batch_draws"])
        parts = {part: self._stacks[part].unpack(unnamed(part, state)) for part in CARRIED}
        # Layers move their statistics in place, here in copies that tracing takes out again.
        parts["state"] = {key: value.clone() for key, value in parts["state"].items()}
        begun = parts["params"] if anchor is None else self._stacks["params"].unpack(anchor)
        dtype = next(iter(parts["params"].values())).dtype
        own = dict(zip(self.numbers, numbers.to(dtype), strict=True))
        if self.way is Way.PLAIN:  # filters that lie otherwise would have torch lay out activations so too
            plain = torch.contiguous_format
            parts["params"] = {key: value.clone(memory_format=plain) for key, value in parts["params"].items()}
        model, hold = self.sites.prepared.model, self._pass.rule.hold
        layers, kept = self.way.layers(model), LostWritesRefused()
        with layers, training_mode(model, hold), unchanged(model), slow_operators_named(model), kept:
            step = self._mapped_step(probes)
            after, seen = step(Carry(**parts, anchor=begun), Batch(x, y, batch["batch_keys"]), own)
        new: Tree = {}
        for part in CARRIED:
            tree: Tree = getattr(after, part)
            if extra := tree.keys() - self._stacks[part].shapes.keys():
                raise NotAProgram(f"its steps make new state ({', '.join(sorted(extra))})")
            new |= named(part, self._stacks[part].pack(tree))
        return new, seen._replace(loss=seen.loss.to(torch.float64))

    def _mapped_step(self, probes: tuple[Probe, ...]) -> Step:
        """The phase's step over the stack, with each client's own numbers."""
        spec = replace(self.sites.step_spec(self._pass, mapped=True), probes=probes)
        chosen = self.sites.optimizer
        if chosen.elementwise:
            spec = replace(spec, optimizer=Joined(on_stack(chosen), self._layouts["server"].channels_last))
        spec = replace(spec, differentiate=lambda f: grad_and_value(f, has_aux=True))
        return torch.vmap(self._pass.step(spec))

    def _merge(self, state: Tree) -> Moves:
        flats = {part: unnamed(part, state) for part in CARRIED}
        end = {key: v for part in CARRIED for key, v in self._stacks[part].rows(flats[part]).items()}
        losses = self._loss_summary(state)
        scalars = self._measured(state, flats)
        # In the order they lie in, so that what is merged together need not be moved.
        shared = {key: value for key, value in end.items() if self.schema[key][1] is Policy.SHARED}
        each = (losses, scalars, shared)
        by_run = [{key: value.unflatten(0, (self.runs, self.clients)) for key, value in tree.items()} for tree in each]
        server = self._of_runs("server", state)
        memory = {key: state[f"memory:{key}"].index_select(0, state["runs"]) for key in self.memory}
        sizes = state["num_examples"].to(torch.float64).view(self.runs, self.clients)

        def merge_run(server: Tree, memory: Tree, sizes: Tensor, losses: Tree, scalars: Tree, shared: Tree):
            return merge_stack(self.phase.phase, server, shared, Reports(sizes, losses, scalars), self.schema, memory)

        with merging(StackCohort()):
            merged, remembered = torch.vmap(merge_run)(server, memory, sizes, *by_run)
        moved = moved_norms(flats, self._stacks, self.schema, server, self.runs)
        healthy = health(self.phase, flats, self._stacks, unnamed("unsigned", state))
        report = torch.stack([*losses.values(), *scalars.values(), *moved, healthy])
        changed = {**named("server", self._layouts["server"].join_rows(merged)), **named("memory", remembered)}
        rows: Rows = {key: (state["runs"], value) for key, value in changed.items()}
        rows["log"] = state["slot"], report.unsqueeze(0)
        return {"slot": (state["slot"] + 1) % self.log_rows}, {**rows, **self._kept_rows(state, end)}

    def _loss_summary(self, state: Tree) -> Tree:
        losses, last = state["losses"], state["last_epoch"].clamp(max=self.steps)
        if self.steps == 1:
            return dict.fromkeys(LOSSES, losses[0])
        age = torch.arange(self.steps, device=losses.device).unsqueeze(1)
        late = torch.where(age >= self.steps - last, losses, 0)
        return dict(zip(LOSSES, (losses.mean(0), late.sum(0) / last, losses[-1]), strict=True))

    def _measured(self, state: Tree, flats: dict[str, Flats]) -> Tree:
        if not self.phase.phase.measures:
            return {}
        begun = self._start_flats(state)
        end, start = ({k: v for p in CARRIED for k, v in self._stacks[p].unpack(f[p]).items()} for f in (flats, begun))
        facts = self.sites.prepared.facts
        return {
            name: torch.vmap(lambda end, start, measure=measure: measure(end, start, facts))(end, start).double()
            for name, measure in self.phase.phase.measures.items()
        }

    def _kept_rows(self, state: Tree, end: Tree) -> Rows:
        """What clients keep, as rows of the arena; entries that are not theirs in this phase stay."""
        held = unnamed("local", state)
        if not held or not self.keep:
            return {}
        kept = {key: end[key] for key in self.phase.kept}
        flats = self._layouts["local"].join_rows({**self._of_clients(state), **kept})
        return {f"local:{name}": (state["client_rows"], flat) for name, flat in flats.items()}
