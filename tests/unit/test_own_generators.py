"""Reading data leaves the program's own random numbers alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from fednorm.data.source import own_generators, seed_generators


def next_numbers() -> tuple[float, float, float]:
    """What each of the three generators draws next."""
    return random.random(), float(np.random.rand()), torch.rand(()).item()  # noqa: S311


def test_whatever_is_seeded_and_drawn_in_between_the_program_draws_what_it_would_have() -> None:
    seed_generators(5)
    expected = next_numbers()
    seed_generators(5)
    with own_generators():
        seed_generators(2**40 + 1)
        other = next_numbers()
    assert next_numbers() == expected
    assert all(mine != theirs for mine, theirs in zip(expected, other, strict=True))
    seed_generators(5)
    with pytest.raises(ZeroDivisionError), own_generators():
        _ = 1 / (next_numbers()[0] * 0)
    assert next_numbers() == expected
