"""Limits on bytes from outside: what is just within them passes, what is one beyond does not."""

from __future__ import annotations

import pytest
import torch

from fednorm.core.state import entries
from fednorm.errors import WireError
from fednorm.halves.wire_format import HEAD, Limits, limits_for, pack, unpack


def test_the_list_of_tensors_may_be_as_long_as_the_limit() -> None:
    message = pack({"kind": "x"}, {"a long name" * 20: torch.zeros(1)})
    length = int.from_bytes(message[HEAD + len(b'{"kind":"x"}') :][:8], "little")
    header, tree = unpack(message, Limits(max_header=length))
    assert (header, len(tree)) == ({"kind": "x"}, 1)
    with pytest.raises(WireError) as refusal:
        unpack(message, Limits(max_header=length - 1))
    assert str(refusal.value) == f"its list of tensors is longer than {length - 1} bytes"


def test_limits_for_a_model_by_hand() -> None:
    """A linear layer of 6 and 2 floats: 32 bytes of numbers, and 6 * 6 + 24 * 2 + 256, 6 * 4 + 24 + 256 for names."""
    header = (1 << 16) + (36 + 48 + 256) + (24 + 24 + 256)
    found = limits_for(entries(torch.nn.Linear(3, 2)), spare=1000)
    assert found == Limits(max_bytes=HEAD + 2 * header + 32 + 1000, max_entries=2 + 64, max_header=header)
    assert limits_for([]).max_bytes == HEAD + 2 * (1 << 16) + (1 << 20)
