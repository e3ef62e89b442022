"""How named trees of tensors and a JSON header become bytes that can be trusted, and nothing else, on the other side.

Two levels. `seal` binds a header and its tensors by digests, for those who carry tensors themselves. `pack` lays both
end to end: a fixed head (magic, version, digest of all that follows, two lengths), the header as JSON, the tensors as
safetensors. Bytes from outside are never trusted: whatever is wrong with them ends in a `WireError`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import safetensors.torch
import torch
from torch import Tensor

from fednorm.core.state import Entry, Tree, digest
from fednorm.errors import ConfigError, WireError
from fednorm.halves.messages import PROTOCOL

MAGIC = b"fednorm\0"
VERSION = 1
"""of the bytes; what they say has a version of its own, `messages.PROTOCOL`"""
_START = struct.Struct("<8sI32s")
_LENGTHS = struct.Struct("<QQ")
HEAD = _START.size + _LENGTHS.size
"""Bytes before the JSON. The digest comes before the lengths, so that it covers them too."""

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, *_FLOAT8, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    )
}
"""All that safetensors both writes and reads, by name."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bytes from outside may cost at most; a message beyond is refused before it is read."""

    max_bytes: int = 1 << 30
    max_entries: int = 4096
    max_header: int = 1 << 20
    """bytes of the JSON header, and of safetensors' own"""


def limits_for(entries: Iterable[Entry], *, spare: int = 1 << 20) -> Limits:
    """Limits that every message about these entries keeps; `spare` bytes are for what no schema lists (sums of scores).

    >>> limits_for([]).max_entries
    64
    """
    listing = list(entries)
    names = sum(6 * len(entry.key.encode()) + 24 * len(entry.shape) + 256 for entry in listing)
    header = (1 << 16) + names
    size = sum(entry.bytes for entry in listing)
    return Limits(max_bytes=HEAD + 2 * header + size + spare, max_entries=len(listing) + 64, max_header=header)


class Where(NamedTuple):
    """Whose message it is and of which exchange, as far as its header could be read."""

    client: int | None = None
    exchange: int | None = None

    def error(self, text: str, entry: str | None = None) -> WireError:
        return WireError(text, client=self.client, exchange=self.exchange, entry=entry and entry[:200])


def short(value: object) -> str:
    """A value from outside for an error's one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a number of thousands of digits, or somebody's class
        text = f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else text[:77] + "..."


def as_object(value: Any) -> dict[str, Any] | None:
    """A JSON object, or None where it is something else."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: sorted, without spaces, without NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def seal(kind: str, fields: Mapping[str, Any], trees: Mapping[str, Tree]) -> tuple[dict[str, Any], Tree]:
    """A header and one flat tree, whose keys are `name/key`; the tensors are copies on the CPU."""
    tree = {
        f"{_escaped(name)}/{key}": _owned(tensor, key)
        for name in sorted(trees)
        for key, tensor in sorted(trees[name].items())
    }
    header = {"kind": kind, "protocol": PROTOCOL, "fields": dict(fields), "trees": sorted(trees)}
    return _stamped(header, tree), tree


def reseal(header: Mapping[str, Any], tree: Mapping[str, Tensor]) -> tuple[dict[str, Any], Tree]:
    """What `seal` gives for tensors that their own sender changed or left out since then, such as a filter for privacy.

    All else that the header says must be as it was; the tensors are copies on the CPU.
    """
    plain, _ = _intact(header)
    copies = {flat: _owned(tensor, _key(flat)) for flat, tensor in sorted(tree.items())}
    return _stamped({name: plain[name] for name in plain if name != "entries"}, copies), copies


def _stamped(header: Mapping[str, Any], tree: Tree) -> dict[str, Any]:
    """A header with what its entries are, and with its own digest."""
    entries = {
        flat: {"digest": digest({flat: tensor}), "dtype": _dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        for flat, tensor in tree.items()
    }
    whole = {**header, "entries": entries}
    return whole | {"digest": _seal_of(whole)}


def unseal(header: Mapping[str, Any], tree: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], dict[str, Tree], Where]:
    """Kind, fields and trees again, and where they are from; the tensors are copies on the CPU, sorted by key."""
    plain, where = _intact(header)
    kind, names = plain["kind"], plain["trees"]
    fields, entries = as_object(plain["fields"]), as_object(plain["entries"])
    if not isinstance(kind, str) or fields is None or entries is None or not isinstance(names, list):
        raise where.error("its header has fields of other types than a message has")
    trees: dict[str, Tree] = {name: {} for name in cast(list[Any], names) if isinstance(name, str)}
    if len(trees) != len(cast(list[Any], names)):
        raise where.error("its header names a tree twice, or by something that is no name")
    prefixes = {_escaped(name): name for name in trees}
    for flat in sorted(entries.keys() ^ tree.keys(), key=str):
        raise where.error("is missing" if flat in entries else "was not expected", _key(str(flat)))
    for flat in sorted(entries):
        prefix, slash, key = flat.partition("/")
        if not slash or prefix not in prefixes:
            raise where.error("belongs to no tree that the header names", flat)
        trees[prefixes[prefix]][key] = _checked(flat, entries[flat], tree[flat], where)
    return kind, fields, trees, where


def _intact(header: Mapping[str, Any]) -> tuple[dict[str, Any], Where]:
    """A header as JSON values, without its digest, and where it is from; refused where it is not as it was sealed."""
    try:
        plain: dict[str, Any] = json.loads(canonical(dict(header)))
    except (TypeError, ValueError, RecursionError):
        raise WireError("its header is no JSON object") from None
    where = _where(plain)
    if (spoken := plain.get("protocol")) != PROTOCOL:
        raise where.error(f"it speaks protocol {short(spoken)}, this side {PROTOCOL}; install the same fednorm on both")
    if plain.keys() != {"kind", "protocol", "fields", "trees", "entries", "digest"}:
        raise where.error("its header has other fields than a message has")
    if plain.pop("digest") != _seal_of(plain):
        raise where.error("its header was altered on the way (its digest differs)")
    return plain, where


def _checked(flat: str, spec: Any, tensor: object, where: Where) -> Tensor:
    """A copy of an entry that is what the header says of it."""
    key, said = _key(flat), as_object(spec)
    if said is None or said.keys() != {"digest", "dtype", "shape"}:
        raise where.error("is not described by digest, dtype and shape", key)
    if not isinstance(tensor, Tensor):
        raise where.error(f"is a {type(tensor).__name__}, expected a tensor", key)
    if list(tensor.shape) != said["shape"]:
        raise where.error(f"has shape {tuple(tensor.shape)}, its header says {short(said['shape'])}", key)
    if _dtype_name(tensor.dtype) != said["dtype"]:
        raise where.error(f"has type {tensor.dtype}, its header says {short(said['dtype'])}", key)
    try:
        copy = _owned(tensor, key)
    except ConfigError as error:
        raise where.error(str(error)) from None
    if digest({flat: copy}) != said["digest"]:
        raise where.error("was altered on the way (its digest differs)", key)
    return copy


def pack(header: Mapping[str, Any], tree: Tree) -> bytes:
    """What `seal` gave as bytes, the same for the same."""
    text, tensors = canonical(header), safetensors.torch.save(dict(sorted(tree.items())))
    rest = b"".join([_LENGTHS.pack(len(text), len(tensors)), text, tensors])
    return _START.pack(MAGIC, VERSION, hashlib.sha256(rest).digest()) + rest


def unpack(data: bytes | bytearray | memoryview, limits: Limits) -> tuple[dict[str, Any], Tree]:
    """What was packed, for `unseal`, which checks what is inside."""
    view = memoryview(data).cast("B")
    if len(view) > limits.max_bytes:
        raise WireError(f"it has {len(view)} bytes, at most {limits.max_bytes} are taken")
    if len(view) < HEAD:
        raise WireError(f"it has {len(view)} bytes, too few for a message; it was cut on the way")
    magic, version, said = _START.unpack_from(view)
    if magic != MAGIC:
        raise WireError("it is no message of fednorm's")
    if version != VERSION:
        raise WireError(f"it has format {version}, this side reads {VERSION}; install the same fednorm on both")
    length, size = _LENGTHS.unpack_from(view, _START.size)
    if HEAD + length + size != len(view):
        raise WireError(f"it has {len(view)} bytes, its head says {HEAD + length + size}; it was cut on the way")
    if length > limits.max_header:
        raise WireError(f"its header has {length} bytes, at most {limits.max_header} are taken")
    if hashlib.sha256(view[_START.size :]).digest() != said:
        raise WireError("it was altered on the way (its digest differs)")
    header = _header(bytes(view[HEAD : HEAD + length]))
    where, entries = _where(header), as_object(header.get("entries")) or {}
    if len(entries) > limits.max_entries:
        raise where.error(f"it has {len(entries)} entries, at most {limits.max_entries} are taken")
    tensors = bytes(view[HEAD + length :])
    if int.from_bytes(tensors[:8], "little") > limits.max_header:  # safetensors itself would read 100 MB
        raise where.error(f"its list of tensors is longer than {limits.max_header} bytes")
    try:
        return header, safetensors.torch.load(tensors)
    except Exception as error:  # the library says in many ways that it cannot read what others made
        raise where.error(f"its tensors cannot be read ({type(error).__name__})") from None


def _header(text: bytes) -> dict[str, Any]:
    """A JSON object, written as `canonical` writes it: so there are no keys twice, no NaN and no two ways to say it."""
    try:
        header = as_object(json.loads(text.decode()))
        if header is not None and canonical(header) == text:
            return header
    except (ValueError, RecursionError):
        pass
    raise WireError("its header is no JSON object as fednorm writes it")


def _seal_of(header: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(header)).hexdigest()


def _where(header: Mapping[str, Any]) -> Where:
    def at(*path: str) -> int | None:
        value: Any = header.get("fields")
        for name in path:
            value = (as_object(value) or {}).get(name)
        return value if type(value) is int else None

    client = at("client")
    return Where(at("report", "client") if client is None else client, at("address", "number"))


def _escaped(name: str) -> str:
    """A tree's name without a slash, which ends it in the key of an entry (as in a JSON pointer)."""
    return name.replace("~", "~0").replace("/", "~1")


def _key(flat: str) -> str:
    return flat.partition("/")[2] or flat


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _owned(tensor: Tensor, key: str) -> Tensor:
    """A dense copy on the CPU in storage of its own."""
    if _dtype_name(tensor.dtype) not in DTYPES or tensor.layout is not torch.strided:
        kind = tensor.dtype if tensor.layout is torch.strided else tensor.layout
        raise ConfigError(f"{short(key)} has type {kind}, which cannot be sent; use one of {', '.join(DTYPES)}")
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    return plain.clone(memory_format=torch.contiguous_format)
