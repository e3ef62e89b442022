"""Settings for all tests: one thread, since tiny tensors lose time with more and bits may depend on their number."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fednorm", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("fednorm")


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """What commands print into a pipe has no width, unless whoever runs the tests has given one."""
    monkeypatch.delenv("COLUMNS", raising=False)
