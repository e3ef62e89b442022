"""One run over several processes (`torchrun --nproc_per_node=2 -m fednorm run ...`), one GPU or one CPU share each.

Every rank plays the same run. It owns a range of client ids: it trains those of the cohort that are in it and keeps
their local state. What clients report is told to all as JSON, so all decide the same. A merge joins clients by two
reductions, a float64 sum and a maximum, and these cross the ranks. Rank 0 alone writes the folder, scores and prints:
before it does, the other ranks send it what their clients keep.

Tensors go as raw bytes, everything else as JSON; nothing is pickled.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from importlib import import_module
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import safetensors.torch
import torch
from torch import Tensor, distributed

from fednorm.core.method import Method
from fednorm.core.reductions import Cohort, fold, merging
from fednorm.core.state import Tree, digest
from fednorm.data.batches import UNION
from fednorm.engines.machine import find_device, world_size
from fednorm.errors import ConfigError, FednormError
from fednorm.halves.mine import ClientState
from fednorm.halves.state_bytes import encode, pack_states, unpack_states

T = TypeVar("T")


class SharedStore(Protocol):
    """A run's store, as far as ranks fill and empty it for each other."""

    def facts(self) -> dict[str, Any]: ...
    def tree(self, name: str) -> Tree: ...
    def seen(self) -> list[int]: ...
    def get_many(self, clients: Sequence[int]) -> dict[int, ClientState]: ...
    def put(self, client: int, state: ClientState) -> None: ...
    def changed(self) -> dict[int, ClientState]: ...
    def commit(self, round: int, trees: dict[str, Tree], facts: dict[str, Any], rows: list[dict[str, Any]]) -> None: ...


TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for another, which may be training, scoring or writing; one that died is noticed at once."""
_AT_ONCE = 500
"""Clients whose states travel together."""


class Alone:
    """The one process of an ordinary run: it owns all clients, and there is nobody to tell."""

    first = True
    """Whether this process writes, scores and prints."""

    def check(self, method: Method) -> None:
        """Refuse a method that cannot be played like this."""

    def engine(self, device: torch.device) -> str | None:
        """The engine that `auto` stands for, where it is not to be found out."""

    def own(self, population: Sequence[int], clients: Sequence[int]) -> list[int]:
        """Those of some clients of a population, ascending, that this process owns."""
        return list(clients)

    def tell_all(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives in every process, in their order: JSON values. If it fails in one, it fails in all."""
        return [work()]

    def tell_first(self, work: Callable[[], T]) -> T:
        """What `work` gives in the first process, in all of them."""
        return work()

    def merge(self, counts: Sequence[int]) -> AbstractContextManager[None]:
        """The context for merging a cohort of which each process has this many clients."""
        return nullcontext()

    def confirm(self, what: str, server: Tree) -> None:
        """Make sure that all processes have the same server state."""

    def hand_out(self, population: Sequence[int], store: SharedStore) -> None:
        """Fill the stores of all processes from that of the first."""

    def collect(self, store: SharedStore) -> None:
        """Bring what clients keep into the first process's store."""


class Ranks(Alone):
    """One process of several."""

    def __init__(self) -> None:
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.first = self.rank == 0
        self._confirmed: set[str] = set()

    def check(self, method: Method) -> None:
        if "lockstep" in method.needs:
            why = "needs all clients in lock-step, which cannot be split over ranks"
        elif method.data == "union":
            why = "trains one model on everybody's data, which leaves other ranks nothing to do"
        else:
            return
        raise ConfigError(f"'{method.name}' {why}; run it in one process, without torchrun")

    def engine(self, device: torch.device) -> str | None:
        # All must take the same, and what one rank measures while others do too says little.
        return "stacked" if device.type == "cuda" else "sequential"

    def own(self, population: Sequence[int], clients: Sequence[int]) -> list[int]:
        mine = owned(population, self.rank, self.world)
        return [client for client in clients if (self.first if client == UNION else client in mine)]

    def tell_all(self, work: Callable[[], T]) -> list[T]:
        try:
            told: dict[str, Any] = {"value": work()}
        except Exception as error:
            with _answered():
                self._gather(json.dumps({"failed": str(error), "code": getattr(error, "exit_code", 1)}).encode())
            raise
        with _answered():
            everybody = [json.loads(each) for each in self._gather(json.dumps(told).encode())]
        for rank, each in enumerate(everybody):
            if "failed" in each:
                failure = FednormError(each["failed"] or f"rank {rank} failed")
                failure.exit_code = each["code"]
                raise failure
        return [each["value"] for each in everybody]

    def tell_first(self, work: Callable[[], T]) -> T:
        return self.tell_all(lambda: work() if self.first else None)[0]  # pyright: ignore[reportReturnType]

    def merge(self, counts: Sequence[int]) -> AbstractContextManager[None]:
        return merging(SpreadCohort(self.rank, counts))

    def confirm(self, what: str, server: Tree) -> None:
        if what in self._confirmed:
            return
        self._confirmed.add(what)
        if len(set(self.tell_all(lambda: digest(server)))) > 1:
            raise ConfigError(
                f"{what} is merged by a rule that joins clients in its own way, which differs by rank; "
                "write it with `weighted_sum` and `largest`, or run it in one process"
            )

    def hand_out(self, population: Sequence[int], store: SharedStore) -> None:
        facts = self.tell_first(store.facts)
        if not facts:
            return
        seen = self.tell_first(store.seen)
        for start in range(0, len(seen), _AT_ONCE):
            part = seen[start : start + _AT_ONCE]
            packed = self._bytes(lambda part=part: pack_states(store.get_many(part)))
            if not self.first:
                states, mine = unpack_states(packed), self.own(population, part)
                for client in mine:
                    store.put(client, states[client])
                _flush(store)
        trees = {name: self._tree(lambda name=name: store.tree(name)) for name in ("model", "memory")}
        if not self.first:
            store.commit(facts.pop("round"), trees, facts, [])

    def collect(self, store: SharedStore) -> None:
        with _answered():
            packed = b"" if self.first else pack_states(store.changed())
            sizes = [int(size) for size in self._gather_row(torch.tensor([len(packed)]))]
            if not self.first:
                distributed.send(_as_tensor(packed), 0)
                _flush(store)
                return
            for rank in range(1, self.world):
                data = torch.empty(sizes[rank], dtype=torch.uint8)
                distributed.recv(data, rank)
                for client, state in unpack_states(data.numpy().tobytes()).items():
                    store.put(client, state)

    def _tree(self, make: Callable[[], Tree]) -> Tree:
        return safetensors.torch.load(self._bytes(lambda: encode(make())))

    def _bytes(self, make: Callable[[], bytes]) -> bytes:
        """The first rank's bytes, on all."""
        with _answered():
            data = make() if self.first else b""
            size = torch.tensor([len(data)])
            distributed.broadcast(size, 0)
            tensor = _as_tensor(data) if self.first else torch.empty(int(size), dtype=torch.uint8)
            distributed.broadcast(tensor, 0)
            return tensor.numpy().tobytes()

    def _gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, on all."""
        sizes = [int(size) for size in self._gather_row(torch.tensor([len(data)]))]
        padded = self._gather_row(_as_tensor(data.ljust(max(sizes), b"\0")))
        return [row[:size].numpy().tobytes() for row, size in zip(padded, sizes, strict=True)]

    def _gather_row(self, row: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(row) for _ in range(self.world)]
        distributed.all_gather(rows, row)
        return rows


def owned(population: Sequence[int], rank: int, world: int) -> range:
    """The ids that a rank owns, of clients in ascending order: ranges, so that a cohort falls into parts in order.

    >>> [owned((0, 1, 4, 5, 9), rank, 2) for rank in (0, 1)]
    [range(0, 2), range(4, 10)]
    """
    start, stop = (len(population) * edge // world for edge in (rank, rank + 1))
    return range(population[start], population[stop - 1] + 1) if start < stop else range(0)


class SpreadCohort(Cohort):
    """A cohort, ascending by client id, of which each rank has a part; `counts` says how many clients."""

    def __init__(self, rank: int, counts: Sequence[int]) -> None:
        self._rank = rank
        self._counts = counts
        self._busy = [rank for rank, count in enumerate(counts) if count]
        ends = list(accumulate(counts))
        self._part = slice(ends[rank] - counts[rank], ends[rank])

    def own(self, weights: Tensor) -> Tensor:
        return weights[self._part]

    def weighted_sum(self, stack: Tensor, weights: Tensor) -> Tensor:
        """On the host a chain: each rank folds its clients onto what it is passed, so the bits are one process's.

        On GPUs an all-reduce of the ranks' sums, whose order is the library's.
        """
        total = torch.zeros(stack.shape[1:], dtype=torch.float64, device=weights.device)
        if total.is_cuda:
            total = fold(stack, weights) if len(stack) else total
            with _answered():
                distributed.all_reduce(total)
            return total
        if self._rank in self._busy:
            turn = self._busy.index(self._rank)
            if turn:
                with _answered():
                    distributed.recv(total, self._busy[turn - 1])
            total = fold(stack, weights, onto=total if turn else None)
            if turn + 1 < len(self._busy):
                with _answered():
                    distributed.send(total, self._busy[turn + 1])
        with _answered():
            distributed.broadcast(total, self._busy[-1])
        return total

    def largest(self, stack: Tensor) -> Tensor:
        kind = torch.finfo if stack.is_floating_point() else torch.iinfo
        top = stack.amax(0) if len(stack) else stack.new_full(stack.shape[1:], kind(stack.dtype).min)
        with _answered():
            distributed.all_reduce(top, distributed.ReduceOp.MAX)
        return top

    def gathered(self, stack: Tensor) -> Tensor:
        most = max(self._counts)
        padded = torch.cat([stack, stack.new_zeros(most - len(stack), *stack.shape[1:])])
        parts = [torch.empty_like(padded) for _ in self._counts]
        with _answered():
            distributed.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, self._counts, strict=True)])


_ALONE = Alone()
_joined: list[Ranks] = []


def join(device: str) -> Alone:
    """The processes that torchrun started, joined at the first call; without torchrun this one, alone."""
    if _joined:
        return _joined[0]
    if world_size() == 1:
        return _ALONE
    on_gpu = find_device(device).type == "cuda"
    if on_gpu:
        _take_gpu(device)
    # Tracing imports it, and its functions keep the group of that moment for ever: gloo's threads would outlive Python,
    # which ends the process with SIGABRT, and with it the other ranks. Before there is a group they keep none.
    import_module("torch.distributed.nn.functional")
    try:
        distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the ranks cannot reach each other ({' '.join(str(error).split())}); start them with torchrun"
        ) from None
    atexit.register(distributed.destroy_process_group)
    _joined.append(Ranks())
    return _joined[0]


def _take_gpu(device: str) -> None:
    local, here = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if torch.device(device if device != "auto" else "cuda").index is not None:
        raise ConfigError(f"engine.device={device} names one GPU for all ranks; give cuda, and each takes its own")
    if local >= here:
        raise ConfigError(f"rank {local} of this host finds {here} GPUs; give --nproc_per_node={here}, or --device cpu")
    torch.cuda.set_device(local)


def _flush(store: SharedStore) -> None:
    """Let a store that holds clients alone write them, so that memory does not."""
    store.commit(0, {}, {}, [])


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@contextmanager
def _answered() -> Iterator[None]:
    """Say in words that another rank is gone; what it died of, it says itself."""
    try:
        yield
    except RuntimeError as error:
        minutes = TIMEOUT.seconds // 60
        raise FednormError(
            f"another rank ended or did not answer for {minutes} minutes; its own output says why, `resume` goes on"
        ) from error
