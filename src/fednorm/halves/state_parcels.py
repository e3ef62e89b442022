"""States of clients as bytes, for the way from one process to another."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fednorm.halves.state_bytes import from_record, layout_from_text, layout_of, layout_to_text, to_record
from fednorm.running.store import ClientState

_HEAD = 8
"""Bytes that say how long the list of contents is."""


def pack_states(states: Mapping[int, ClientState]) -> bytes:
    """Some clients' states: a list of contents, then the records end to end.

    >>> unpack_states(pack_states({3: ClientState(7)}))
    {3: ClientState(steps=7, tree={})}
    """
    layouts = {client: layout_of(state.tree) for client, state in states.items()}
    known = {layout: number for number, layout in enumerate(dict.fromkeys(layouts.values()))}
    records = [to_record(state.steps, state.tree, layouts[client]) for client, state in states.items()]
    contents = {
        "layouts": [layout_to_text(layout) for layout in known],
        "clients": [
            [client, known[layouts[client]], len(record)] for client, record in zip(states, records, strict=True)
        ],
    }
    text = json.dumps(contents).encode()
    return b"".join([len(text).to_bytes(_HEAD, "little"), text, *records])


def unpack_states(data: bytes) -> dict[int, ClientState]:
    """The states again, in the order they were packed."""
    start = _HEAD + int.from_bytes(data[:_HEAD], "little")
    contents = json.loads(data[_HEAD:start])
    layouts = [layout_from_text(text) for text in contents["layouts"]]
    states: dict[int, ClientState] = {}
    for client, layout, size in contents["clients"]:
        states[client] = ClientState(*from_record(layouts[layout], data[start : start + size]))
        start += size
    return states
