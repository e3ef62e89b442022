"""Counts how clients of a stack were trained: by programs, with or without the merge, or step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from fednorm.engines.stack.phase_program import PhaseProgram
from fednorm.engines.stack.ragged import RaggedProgram
from fednorm.engines.stack.stacked import StackTrainer

Used = Counter[str]


def count_training(put: Callable[[type, str, Any], object] = setattr) -> Used:
    """The counts, which go on from now; `put` sets an attribute of a class."""
    used: Used = Counter()

    def count(owner: type, name: str, what: str) -> None:
        whole = getattr(owner, name)

        def counted(self: object, *args: Any, **options: Any) -> Any:
            used[what] += 1
            return whole(self, *args, **options)

        put(owner, name, counted)

    count(PhaseProgram, "train", "programs")
    count(RaggedProgram, "train", "programs")
    count(PhaseProgram, "play", "merged there")
    count(PhaseProgram, "merge", "merged there")
    count(StackTrainer, "_train_stack", "step by step")
    return used
