"""Which clients step together where their work is unequal.

A client's steps keep their order; clients need not keep pace with each other. So clients with much to do go first, and
a stack as wide as the work is long leaves few rows empty. Batches that are smaller than the others wait until there
are several of one size; those that end a client's work wait for all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from fednorm.engines.stack.kernels.tiles import power_of_2


@dataclass(frozen=True)
class Launch:
    """A step of some clients on batches of one size, each given as (number of its step, client)."""

    size: int
    steps: Sequence[tuple[int, int]]
    fill: Sequence[int] = ()
    """clients that are computed along and stay as they are"""

    @property
    def width(self) -> int:
        return len(self.steps) + len(self.fill)


def timetable(sizes: Sequence[Sequence[int]], full: int) -> list[Launch]:
    """The launches of clients whose batches have these sizes, `full` being the largest.

    There are at most twice as many rows in them as clients times steps of the longest.

    >>> [(launch.size, launch.steps) for launch in timetable([[4, 4, 2], [4]], 4)]
    [(4, [(0, 0), (0, 1)]), (4, [(1, 0)]), (2, [(2, 0)])]
    """
    width = min(len(sizes), stack_width([own.count(full) for own in sizes]))
    done = [0] * len(sizes)
    launches: list[Launch] = []

    def step(clients: Sequence[int], size: int, fill: Sequence[int] = ()) -> None:
        launches.append(Launch(size, [(done[client], client) for client in clients], fill))
        for client in clients:
            done[client] += 1

    def next_size(client: int) -> int:
        return sizes[client][done[client]]

    def small(clients: Sequence[int]) -> None:
        """The next steps of those whose next batch is a smaller one, all of one size at once."""
        waiting: dict[int, list[int]] = {}
        for client in clients:
            if next_size(client) != full:
                waiting.setdefault(next_size(client), []).append(client)
        for size, some in waiting.items():
            room = min(len(sizes), _round_up(len(some)))
            step(some, size, others(some, room))

    def others(clients: Sequence[int], room: int) -> list[int]:
        """Clients that are computed along with some, so that there are few widths."""
        among = set(clients)
        rest = (client for client in range(len(sizes)) if client not in among)
        return [next(rest) for _ in range(room - len(clients))]

    while left := [client for client, own in enumerate(sizes) if done[client] < len(own)]:
        # Nobody waits for a small batch that is a client's last.
        going = [client for client in left if next_size(client) == full or done[client] + 1 < len(sizes[client])]
        going.sort(key=lambda client: done[client] - len(sizes[client]))  # who has most to do first
        first = going[:width]
        if first and all(next_size(client) == full for client in first):
            step(first, full, others(first, width))
        else:
            small(going or left)
    return launches


def stack_width(counts: Sequence[int]) -> int:
    """How many clients to take at once, by how many steps each has: wider stacks would not be done sooner.

    A power of 2 or half as much again, so that there are few widths.

    >>> [stack_width(counts) for counts in ([5, 5, 5], [9, 1, 1], [10, 8, 7, 5, 5, 5])]
    [3, 2, 4]
    """
    return _round_up(max(1, ceil(sum(counts) / max(1, *counts))))


def _round_up(wanted: int) -> int:
    above = power_of_2(wanted)
    return above * 3 // 4 if above >= 4 and wanted <= above * 3 // 4 else above
