"""The one address of a phase: where a method has it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Purpose(StrEnum):
    """Why clients are asked for something."""

    TRAIN = "train"
    FINISH = "finish"
    """exchanges with all clients after the last round"""
    QUERY = "query"
    """statistics for a test, which training never sees: what clients keep stays as it is"""
    SCORE = "score"
    """sums of a test on the client's own data; nothing is merged"""


class PhaseId(NamedTuple):
    """Phase `number` of a purpose, in training of stage number `stage`.

    >>> str(PhaseId(Purpose.TRAIN, 1, 0)), PhaseId.parse("query.0.0").purpose
    ('train.1.0', <Purpose.QUERY: 'query'>)
    """

    purpose: Purpose
    stage: int = 0
    number: int = 0

    def __str__(self) -> str:
        return f"{self.purpose}.{self.stage}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> PhaseId:
        """The id that has this text; a ValueError where none has."""
        purpose, stage, number = text.split(".")
        found = cls(Purpose(purpose), int(stage), int(number))
        if str(found) != text or min(found.stage, found.number) < 0:
            raise ValueError(f"{text!r} is no phase's address; write it like train.0.0")
        return found
