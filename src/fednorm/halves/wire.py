"""Messages on their way: as (header, tree) for frameworks that carry tensors, as bytes for sockets and files.

`to_parts` and `from_parts` are the first level, `encode` and `decode` the second, `send` and `receive` put the bytes on
a stream; `save` and `load` keep what must survive a restart. The `check_` functions compare what arrived with what was
agreed. All refuse messages with a `WireError`, which names client, exchange and entry as far as they are known, and
never with anything else. Values are judged elsewhere (`guard.flaws`): a client whose training diverged can say so,
and is refused by name.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from torch import Tensor

from fednorm.core.phases import PhaseId
from fednorm.core.state import Entry, Tree
from fednorm.errors import WireError
from fednorm.halves.guard import flaw_of_tree
from fednorm.halves.messages import (
    PROTOCOL,
    Address,
    Hello,
    Message,
    Refusal,
    Request,
    Scores,
    Terms,
    Update,
    Welcome,
)
from fednorm.halves.mine import Mine
from fednorm.halves.wire_files import load, load_mine, save, save_mine
from fednorm.halves.wire_format import Limits, Where, as_object, limits_for, pack, seal, short, unpack, unseal

__all__ = [
    "Limits",
    "Mine",
    "Refusal",
    "check_answer",
    "check_hello",
    "check_request",
    "check_terms",
    "check_update",
    "decode",
    "encode",
    "from_parts",
    "limits_for",
    "load",
    "load_mine",
    "receive",
    "save",
    "save_mine",
    "send",
    "to_parts",
]

_KINDS: dict[str, type[Message]] = {
    each.__name__.lower(): each for each in (Hello, Welcome, Refusal, Request, Update, Scores)
}
_TREES: dict[type[Message], tuple[str, ...]] = {Request: ("tree",), Update: ("shared", "reported")}
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""How JSON, which has no such numbers, carries them."""


def to_parts(message: Message) -> tuple[dict[str, Any], Tree]:
    """A header of JSON values and a flat tree of copies on the CPU, bound to each other by digests.

    The tree's keys are `shared/conv.weight`, `reported/...`, `tree/...`, and for scores `own_client/count`.
    """
    kind = type(message)
    if isinstance(message, Scores):
        trees: dict[str, Tree] = {name: dict(sums) for name, sums in message.sums.items()}
    else:
        trees = {name: getattr(message, name) for name in _TREES.get(kind, ())}
    return seal(kind.__name__.lower(), {name: _plain(getattr(message, name)) for name in _scalars(kind)}, trees)


def from_parts(header: Mapping[str, Any], tree: Mapping[str, Tensor]) -> Message:
    """The message again; nothing of it was altered, renamed, lost or added on the way."""
    kind, said, trees, where = unseal(header, tree)
    if kind not in _KINDS:
        raise where.error(f"it is of kind {short(kind)}; known: {', '.join(_KINDS)}")
    cls = _KINDS[kind]
    held: Mapping[str, Any] = {"sums": trees} if cls is Scores else trees
    if cls is not Scores and trees.keys() != set(_TREES.get(cls, ())):
        raise where.error(f"a message of kind '{kind}' does not have the trees {short(sorted(trees))}")
    try:
        scalars = _read_fields(said, {name: _hints(cls)[name] for name in _scalars(cls)}, kind)
    except ValueError as error:
        raise where.error(str(error)) from None
    return cast(type[Any], cls)(**scalars, **held)


def encode(message: Message) -> bytes:
    """A message as bytes: the same for the same message, wherever and whenever."""
    return pack(*to_parts(message))


def decode(data: bytes | bytearray | memoryview, *, limits: Limits = Limits()) -> Message:  # noqa: B008 (frozen)
    """The message that has these bytes; they are read no further than the first thing that is wrong with them."""
    return from_parts(*unpack(data, limits))


_LENGTH = struct.Struct("<Q")
_AT_ONCE = 1 << 20
"""Bytes asked for at a time: what a stranger claims to send is not reserved before it comes."""


def send(sock: socket.socket, message: Message | bytes) -> None:
    """Put a message, or what `encode` made of one, on a stream: its length, then its bytes."""
    data = message if isinstance(message, bytes) else encode(message)
    sock.sendall(_LENGTH.pack(len(data)))
    sock.sendall(data)


def receive(sock: socket.socket, limits: Limits = Limits()) -> bytes | None:  # noqa: B008 (frozen)
    """The next message's bytes, for `decode`; None where the stream ended after the last. A timeout stays one."""
    start = _take(sock, _LENGTH.size)
    if not start:
        return None
    length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
    if length > limits.max_bytes:
        raise WireError(f"a message of {length} bytes was announced, at most {limits.max_bytes} are taken")
    data = _take(sock, length)
    if len(start) < _LENGTH.size or len(data) < length:
        raise WireError("the stream ended in the middle of a message")
    return data


def _take(sock: socket.socket, length: int) -> bytes:
    """This many bytes of a stream, or fewer where it ends before."""
    data = bytearray()
    while len(data) < length:
        try:
            some = sock.recv(min(length - len(data), _AT_ONCE))
        except ConnectionError as error:
            raise WireError(f"the stream broke ({type(error).__name__})") from None
        if not some:
            break
        data += some
    return bytes(data)


def check_hello(hello: Hello, schema: str) -> None:
    """Refuse a client that cannot take part: of another version, with another model or method, or without data."""
    _check_agreement(f"client {short(hello.name)}", hello.protocol, hello.schema, schema)
    if hello.num_examples < 1:
        raise WireError(f"client {short(hello.name)} has {hello.num_examples} examples; it needs one at least")


def check_terms(terms: Terms, schema: str) -> None:
    """Refuse a server whose terms are not those of this client's version, model and method."""
    _check_agreement("the server", terms.protocol, terms.schema, schema)


def _check_agreement(who: str, protocol: int, schema: str, expected: str) -> None:
    if protocol != PROTOCOL:
        raise WireError(f"{who} speaks protocol {protocol}, this side {PROTOCOL}; install the same fednorm on both")
    if schema != expected:
        raise WireError(
            f"{who} has schema {short(schema[:8])}, this side {short(expected[:8])}; "
            "give both the same model, method and settings"
        )


def check_request(request: Request, terms: str, expected: Mapping[str, Entry]) -> None:
    """Refuse a request of another run, or with other entries than those that were agreed on (shared or frozen)."""
    where = Where(request.client, request.address.number)
    _check_terms_digest(request.address, terms, where)
    _check_entries(request.tree, expected, where)


def check_answer(answer: Update | Scores, address: Address, *, sender: int | None = None) -> None:
    """Refuse an answer to another request than the open one, or in another client's name than its sender's."""
    where = Where(answer.client, answer.address.number if answer.address else None)
    if sender is not None and answer.client != sender:
        raise where.error(f"it was sent by client {sender}; a client answers for itself only")
    if answer.address is None:
        raise where.error("it does not say which request it answers; give it the request's address")
    _check_terms_digest(answer.address, address.terms, where)
    found, wanted = (answer.address.number, answer.address.attempt), (address.number, address.attempt)
    if found != wanted:
        why = "it is late" if found < wanted else "it was never asked for"
        raise where.error(
            f"it answers attempt {found[1]} of exchange {found[0]}, open is attempt {wanted[1]} of exchange "
            f"{wanted[0]}; {why}"
        )


def check_update(
    update: Update,
    address: Address,
    shared: Mapping[str, Entry],
    reported: Mapping[str, Entry],
    *,
    sender: int | None = None,
) -> None:
    """`check_answer`, and refuse other entries than the phase's shared and reported ones."""
    check_answer(update, address, sender=sender)
    where = Where(update.client, address.number)
    _check_entries(update.shared, shared, where)
    _check_entries(update.reported, reported, where)


def _check_terms_digest(address: Address, terms: str, where: Where) -> None:
    if address.terms != terms:
        raise where.error(
            f"it is of a run with terms {short(address.terms[:8])}, this one has {short(terms[:8])}; join this run anew"
        )


def _check_entries(tree: Tree, expected: Mapping[str, Entry], where: Where) -> None:
    if flaw := flaw_of_tree(tree, expected):
        raise where.error(flaw.why, flaw.entry or None)


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _scalars(cls: type[Any]) -> tuple[str, ...]:
    """Fields of a message that go into its header: all but the tensors."""
    return tuple(each.name for each in fields(cls) if each.name not in (*_TREES.get(cls, ()), "sums"))


def _plain(value: Any) -> Any:
    """A field as JSON values; what it may hold is said by the messages' types, and read by them again in `_read`."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, PhaseId):
        return str(value)
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in cast(Mapping[str, Any], value).items()}
    raise TypeError(f"a message holds {short(value)}, which is no JSON value")


def _read(hint: Any, value: Any, name: str) -> Any:
    """A value of the hinted type out of JSON; a ValueError that names the field where it is none."""
    if is_dataclass(hint):
        cls = cast(type[Any], hint)
        return cls(**_read_fields(value, {each.name: _hints(cls)[each.name] for each in fields(cls)}, name))
    origin, choices = get_origin(hint), get_args(hint)
    if origin is UnionType:  # only ever with None
        return None if value is None else _read(choices[0], value, name)
    if origin is Literal and value in choices:
        return value
    if origin is Mapping and (found := as_object(value)) is not None:
        return {key: _read(choices[1], found[key], f"{name}.{key}") for key in sorted(found)}
    if hint is PhaseId and (phase := _phase(value)) is not None:
        return phase
    if hint is float and isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    # A whole number stays one where a float is expected too: the terms' digest is made of its text.
    whole = type(value) is int and abs(value) < 1 << 63
    if (whole and hint in (int, float)) or (type(value) is hint and hint is not int):
        return value
    raise ValueError(f"its field {short(name)} is {short(value)}, which it cannot be")


def _read_fields(value: Any, hints: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = as_object(value)
    if found is None:
        raise ValueError(f"its field {short(name)} is {short(value)}, expected {', '.join(hints)}")
    for field in sorted(found.keys() ^ hints.keys()):
        state = "missing" if field in hints else "not known"
        raise ValueError(f"its field {short(f'{name}.{field}')} is {state}")
    return {field: _read(hint, found[field], f"{name}.{field}") for field, hint in hints.items()}


def _phase(value: Any) -> PhaseId | None:
    """The phase that has this text, in the one way to write it."""
    try:
        return PhaseId.parse(value) if isinstance(value, str) else None
    except ValueError:
        return None
