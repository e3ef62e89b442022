"""Entries with their policies: what of a state goes where."""

from __future__ import annotations

from collections.abc import Mapping

from fednorm.core.state import Entry, Policy

Schema = Mapping[str, tuple[Entry, Policy]]
UP = (Policy.SHARED, Policy.REPORTED)
"""Policies of entries a client sends."""
DOWN = (Policy.SHARED, Policy.FROZEN)
"""Policies of entries a client is sent."""
OWN = (Policy.LOCAL, Policy.REPORTED)
"""Policies of entries a client keeps."""


def keys_with(schema: Schema, *policies: Policy) -> list[str]:
    """Keys of the entries that have one of the policies."""
    return [key for key, (_, policy) in schema.items() if policy in policies]
