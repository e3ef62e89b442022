"""Clients by name or by number, wherever a user names one."""

from __future__ import annotations

from fednorm.data.federation import Federation
from fednorm.errors import ConfigError, unknown


def client_number(federation: Federation, client: int | str) -> int:
    """The number of a client given by number or by name; a name goes before a number that reads the same."""
    names, count = federation.client_names, len(federation.clients)
    if isinstance(client, str) and client in names:
        return names.index(client)
    number = int(client) if isinstance(client, int) or client.lstrip("-").isdecimal() else None
    if number is None and names:
        raise unknown("client", client, names)
    if number is None or not 0 <= number < count:
        raise ConfigError(f"client {client} does not exist; the run has clients 0 to {count - 1}")
    return number
