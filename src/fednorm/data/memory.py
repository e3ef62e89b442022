"""How much memory there is for data."""

from __future__ import annotations

import os
from pathlib import Path

SHARE = 0.5
"""Of the memory at hand, what data may take by themselves."""
_GROUPS = {
    "/sys/fs/cgroup/memory.max": "/sys/fs/cgroup/memory.current",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "/sys/fs/cgroup/memory/memory.usage_in_bytes",
}
"""What a container may use, and uses."""


def memory_limit() -> int:
    """Bytes that data may take where nobody says how many."""
    return int(memory_at_hand() * SHARE)


def memory_at_hand() -> int:
    """Bytes that are free for this process, in the machine or in its container."""
    free = [_machine()]
    for most, used in _GROUPS.items():
        limit, taken = _number(most), _number(used)
        if limit is not None and taken is not None:
            free.append(max(0, limit - taken))
    return min(free)


def _machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):  # not Linux: all there is, since what is free is not told
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None


def in_words(count: int) -> str:
    """A number of bytes for people.

    >>> in_words(1_500_000), in_words(12_300_000_000)
    ('1.5 MB', '12.3 GB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
