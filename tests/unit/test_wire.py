"""The wire: what goes in comes out to the bit, and whatever is wrong with bytes from outside is one type of error."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednorm.core.phases import PhaseId, Purpose
from fednorm.core.report import Report
from fednorm.core.state import Entry, Kind, Tree, digest
from fednorm.errors import ConfigError, WireError
from fednorm.halves.messages import (
    PROTOCOL,
    Address,
    Hello,
    LocalWork,
    Message,
    Refusal,
    Request,
    Scores,
    Terms,
    Update,
    Welcome,
)
from fednorm.halves.wire import (
    Limits,
    check_answer,
    check_hello,
    check_request,
    check_terms,
    check_update,
    decode,
    encode,
    from_parts,
    limits_for,
    receive,
    send,
    to_parts,
)
from fednorm.halves.wire_format import DTYPES, HEAD, canonical, pack, reseal

TERMS = Terms(
    run="r1", method="fedbn", weights="size", model="cnn", schema="5c" * 32, initial="1n" * 32, work=LocalWork(lr=1)
)
ADDRESS = Address(terms=TERMS.digest, number=7, attempt=2)
TREE = {"bn.weight": torch.tensor([1.0, -0.0]), "bn.num_batches_tracked": torch.tensor(3)}
REPORT = Report(3, 40, {"all": 0.1, "last_batch": math.nan}, {"norm": math.inf, "low": -math.inf, "n": 2})
UPDATE = Update(REPORT, TREE, {"bn.weight": torch.zeros(1)}, {"bn|grad": 1e-300}, ADDRESS)
REQUEST = Request(
    client=3,
    address=ADDRESS,
    round=2,
    phase=PhaseId(Purpose.TRAIN, 1, 0),
    numbers={"lr": 0.1, "momentum": 0.9},
    accepted=5,
    tree=TREE,
)
SUMS = {"own_client": {"count": torch.tensor(9.0, dtype=torch.float64)}, "a/b~1": {"x/y": torch.ones(2)}, "none": {}}
MESSAGES: dict[str, Message] = {
    "hello": Hello(name="Klinik Süd", num_examples=40, schema="5c" * 32, versions={"torch": "2.13.0"}),
    "welcome": Welcome(client=3, terms=TERMS),
    "refusal": Refusal("no such run"),
    "request": REQUEST,
    "update": UPDATE,
    "update without address": Update(Report(0, 1), {}),
    "scores": Scores(client=3, address=ADDRESS, sums=SUMS),
}
every_message = pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    def tensor() -> torch.Tensor:
        dtype = draw(st.sampled_from(list(DTYPES.values())))
        shape = draw(st.lists(st.integers(0, 3), max_size=5))
        bits = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        return (bits % 2 if dtype is torch.bool else bits).view(dtype).reshape(shape)  # NaN payloads too

    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.just("__metadata__")
    return {key: tensor() for key in draw(st.lists(names, unique=True, max_size=4))}


NUMBERS = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), st.floats(), max_size=3)


def same(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return {key: repr(value) for key, value in one.items()} == {key: repr(value) for key, value in other.items()}


@given(trees(), trees(), NUMBERS, NUMBERS)
def test_an_update_comes_back_to_the_bit(shared: Tree, reported: Tree, losses: Any, probed: Any) -> None:
    update = Update(Report(1, 2, losses), shared, reported, probed, ADDRESS)
    data = encode(update)
    again = decode(data, limits=Limits())
    assert isinstance(again, Update)
    assert (digest(again.shared), digest(again.reported)) == (digest(shared), digest(reported))
    assert same(again.report.losses, losses)
    assert same(again.probed, probed)
    assert again.address == ADDRESS
    assert encode(again) == data


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), trees(), max_size=3))
def test_scores_of_any_protocol_come_back(sums: dict[str, Tree]) -> None:
    again = decode(encode(Scores(client=1, address=ADDRESS, sums=sums)))
    assert isinstance(again, Scores)
    assert {name: digest(dict(tree)) for name, tree in again.sums.items()} == {n: digest(t) for n, t in sums.items()}


@every_message
def test_every_message_comes_back_with_the_same_bytes(message: Message) -> None:
    data = encode(message)
    assert encode(message) == data
    again = decode(bytearray(data))
    assert type(again) is type(message)
    assert encode(again) == data
    header, tree = to_parts(message)
    assert json.loads(json.dumps(header)) == header
    assert encode(from_parts(header, tree)) == data


def test_messages_without_tensors_are_equal() -> None:
    for message in (MESSAGES["hello"], MESSAGES["welcome"], MESSAGES["refusal"]):
        assert decode(encode(message)) == message
    welcome = decode(encode(MESSAGES["welcome"]))
    assert isinstance(welcome, Welcome)
    assert welcome.terms.digest == TERMS.digest  # a whole number stays one: the digest is made of the text


def test_the_order_of_a_tree_changes_no_byte() -> None:
    turned = Update(REPORT, dict(reversed(TREE.items())), UPDATE.reported, UPDATE.probed, ADDRESS)
    assert encode(turned) == encode(UPDATE)


def test_the_report_of_a_diverged_client_is_delivered() -> None:
    again = decode(encode(UPDATE))
    assert isinstance(again, Update)
    assert math.isnan(again.report.losses["last_batch"])
    assert again.report.scalars == {"norm": math.inf, "low": -math.inf, "n": 2}


def test_tensors_come_back_in_storage_of_their_own() -> None:
    base = torch.arange(12.0, requires_grad=True)
    tree = {"a": base, "b": base, "c": base[2:4], "d": base.view(3, 4).t(), "e": base[:1].expand(3)}
    tree["f"] = torch.complex(base[:2], base[2:4]).conj()
    request = replace(REQUEST, tree=tree)
    for again in (decode(encode(request)), from_parts(*to_parts(request))):
        assert isinstance(again, Request)
        assert {key: value.tolist() for key, value in again.tree.items()} == {k: v.tolist() for k, v in tree.items()}
        assert all(value.is_contiguous() and not value.requires_grad for value in again.tree.values())
        sizes = [value.untyped_storage().nbytes() for value in again.tree.values()]
        assert sizes == [value.numel() * value.element_size() for value in again.tree.values()]
        assert len({value.untyped_storage().data_ptr() for value in again.tree.values()}) == len(tree)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^'a' has type torch.complex128, which cannot be sent; use one of float64,"):
        encode(replace(REQUEST, tree={"a": torch.zeros(2, dtype=torch.complex128)}))
    with pytest.raises(ConfigError, match=r"^'a' has type torch.sparse_coo, which cannot be sent"):
        encode(replace(REQUEST, tree={"a": torch.eye(2).to_sparse()}))
    with pytest.raises(TypeError, match=r"^a message holds tensor\(1.\), which is no JSON value"):
        encode(replace(REQUEST, numbers={"lr": torch.ones(())}))  # type: ignore[dict-item]


# What is wrong with a message that a framework carried as (header, tree).


def altered(tree: Tree) -> None:
    tree["shared/bn.weight"][1] = 0.0  # it was -0.0


def renamed(tree: Tree) -> None:
    tree["shared/bn.bias"] = tree.pop("shared/bn.weight")


def exchanged(tree: Tree) -> None:
    tree["shared/bn.weight"] = tree["shared/bn.weight"].flip(0)


PARTS: dict[str, tuple[Callable[[Tree], object], str, str]] = {
    "altered": (altered, "bn.weight", "was altered on the way (its digest differs)"),
    "exchanged": (exchanged, "bn.weight", "was altered on the way (its digest differs)"),
    "renamed": (renamed, "bn.bias", "was not expected"),
    "missing": (lambda tree: tree.pop("reported/bn.weight"), "bn.weight", "is missing"),
    "added": (lambda tree: tree.update(x=torch.ones(1)), "x", "was not expected"),
    "dtype": (
        lambda tree: tree.update({"shared/bn.weight": tree["shared/bn.weight"].double()}),
        "bn.weight",
        "has type torch.float64, its header says 'float32'",
    ),
    "shape": (
        lambda tree: tree.update({"shared/bn.weight": tree["shared/bn.weight"].view(2, 1)}),
        "bn.weight",
        "has shape (2, 1), its header says [2]",
    ),
    "no tensor": (
        lambda tree: tree.update({"shared/bn.weight": 3}),  # type: ignore[dict-item]
        "bn.weight",
        "is a int, expected a tensor",
    ),
    "no name": (lambda tree: tree.update({7: torch.ones(1)}), "7", "was not expected"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("fault", PARTS)
def test_an_entry_changed_on_the_way_is_named(fault: str) -> None:
    change, entry, text = PARTS[fault]
    header, tree = to_parts(UPDATE)
    change(tree)
    with pytest.raises(WireError) as refusal:
        from_parts(header, tree)
    assert str(refusal.value) == f"client 3, exchange 7, entry {entry!r}: {text}"
    assert (refusal.value.client, refusal.value.exchange, refusal.value.entry) == (3, 7, entry)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inside for place in places(each, (*path, key)))]


JUNK: list[Any] = [None, True, -1, 3, 1.5, 10**400, "", "nan", "x" * 300, [], {}, [[]], {"a": 1}, math.nan, "\ud800"]


def with_change(header: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(header)
    at: Any = changed
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return changed


@every_message
def test_any_change_of_a_header_is_noticed(message: Message) -> None:
    header, tree = to_parts(message)
    for path in places(header)[1:]:
        for junk in JUNK:
            if junk != (here := get(header, path)) or type(junk) is not type(here):
                with pytest.raises(WireError):
                    from_parts(with_change(header, path, junk), tree)
    with pytest.raises(WireError, match=r"its header was altered on the way|no JSON|other fields"):
        from_parts({**header, "more": 1}, tree)


def get(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def outcome(read: Callable[[], Message]) -> Message | str:
    """A message, or the text of the one error there may be."""
    try:
        return read()
    except WireError as error:
        return str(error)


def sealed(header: dict[str, Any]) -> dict[str, Any]:
    """With a right digest, as a stranger could make it."""
    rest = {name: value for name, value in header.items() if name != "digest"}
    return rest | {"digest": hashlib.sha256(canonical(rest)).hexdigest()}


@every_message
def test_a_header_made_by_a_stranger_ends_in_a_message_or_the_one_error(message: Message) -> None:
    header, tree = to_parts(message)
    for path in places(header)[1:]:
        for junk in JUNK:
            try:
                forged = sealed(with_change(header, path, junk))
            except (ValueError, TypeError):
                continue
            found = outcome(lambda forged=forged: from_parts(forged, tree))
            if isinstance(found, str):
                assert "\n" not in found
                assert len(found) < 700
            else:
                assert type(found) is type(message)
                encode(found)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("kind",), "parcel", "it is of kind 'parcel'; known: hello, welcome, refusal, request, update, scores"),
        (("protocol",), 99, f"it speaks protocol 99, this side {PROTOCOL}; install the same fednorm on both"),
        (("fields", "more"), 1, "its field 'update.more' is not known"),
        (("fields", "probed", "a\nb"), [], "its field 'update.probed.a\\nb' is [], which it cannot be"),
        (("fields", "report", "num_examples"), True, "its field 'update.report.num_examples' is True, "),
        (("fields", "report", "num_examples"), "9", "its field 'update.report.num_examples' is '9', "),
        (("fields", "report", "num_examples"), 1e30, "its field 'update.report.num_examples' is 1e+30, "),
        (("fields", "report", "num_examples"), 1 << 63, "its field 'update.report.num_examples' is 9223372036"),
        (("fields", "report", "losses", "all"), "NaN", "its field 'update.report.losses.all' is 'NaN', "),
        (("fields", "report"), {}, "its field 'update.report.client' is missing"),
        (("fields", "probed"), [], "its field 'update.probed' is [], which it cannot be"),
        (("fields", "address"), 3, "its field 'update.address' is 3, expected terms, number, attempt"),
        (("trees",), ["shared", "reported", "local"], "a message of kind 'update' does not have the trees "),
        (("trees",), ["shared", "shared"], "its header names a tree twice, or by something that is no name"),
        (("entries", "shared/bn.weight"), "00", "is not described by digest, dtype and shape"),
    ],
)
def test_what_a_header_may_not_say(path: tuple[str, ...], value: Any, text: str) -> None:
    header, tree = to_parts(UPDATE)
    with pytest.raises(WireError) as refusal:
        from_parts(sealed(with_change(header, path, value)), tree)
    assert text in str(refusal.value)


@pytest.mark.parametrize("phase", ["train.1", "train.1.0.0", "train. 1.0", "train.01.0", "rest.1.0", "", 3, None])
def test_a_phase_has_one_text(phase: Any) -> None:
    header, tree = to_parts(REQUEST)
    with pytest.raises(WireError, match=r"^client 3, exchange 7: its field 'request.phase' is "):
        from_parts(sealed(with_change(header, ("fields", "phase"), phase)), tree)


# Bytes.

SMALL = encode(Update(Report(3, 4, {"all": math.nan}), {"w": torch.tensor([1.0, 2.0])}, address=ADDRESS))


def bytes_with(text: bytes, tensors: bytes) -> bytes:
    """Bytes with a right head, as a stranger could make them."""
    rest = struct.pack("<QQ", len(text), len(tensors)) + text + tensors
    return struct.pack("<8sI32s", b"fednorm\0", 1, hashlib.sha256(rest).digest()) + rest


def split(data: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(data[HEAD - 16 : HEAD - 8], "little")
    return data[HEAD : HEAD + length], data[HEAD + length :]


def test_the_bytes_are_laid_out_as_written() -> None:
    text, tensors = split(SMALL)
    assert bytes_with(text, tensors) == SMALL
    assert json.loads(text)["kind"] == "update"
    assert safetensors.torch.load(tensors)["shared/w"].tolist() == [1.0, 2.0]


def test_every_cut_is_noticed() -> None:
    for length in range(len(SMALL)):
        with pytest.raises(WireError):
            decode(SMALL[:length])
    for more in (b"\0", b" ", SMALL):
        with pytest.raises(WireError, match="it was cut on the way"):
            decode(SMALL + more)


def test_every_flipped_bit_is_noticed() -> None:
    for bit in range(len(SMALL) * 8):
        data = bytearray(SMALL)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode(data)


def mutated(data: bytes, draws: random.Random) -> bytes:
    """Some bytes changed, lost, doubled or moved."""
    found = bytearray(data)
    for _ in range(draws.randint(1, 4)):
        at, length = draws.randrange(len(found) + 1), draws.randint(1, 16)
        kind = draws.randrange(4)
        if kind == 0 and at < len(found):
            found[at] = draws.randrange(256)
        elif kind == 1:
            del found[at : at + length]
        elif kind == 2:
            found[at:at] = found[draws.randrange(len(found) + 1) :][:length]
        else:
            found[at : at + length] = draws.randbytes(length)
    return bytes(found)


@pytest.mark.parametrize("part", ["all", "text", "tensors"])
def test_mutations_never_end_in_another_message_or_error(part: str) -> None:
    """With a right head and digest too: then the header's own digest, and those of the entries, must notice."""
    draws = random.Random(part)  # noqa: S311
    text, tensors = split(SMALL)
    forge: dict[str, Callable[[], bytes]] = {
        "all": lambda: mutated(SMALL, draws),
        "text": lambda: bytes_with(mutated(text, draws), tensors),
        "tensors": lambda: bytes_with(text, mutated(tensors, draws)),
    }
    for _ in range(12_000):
        data = forge[part]()
        found = outcome(lambda data=data: decode(data))
        assert "\n" not in found if isinstance(found, str) else encode(found) == SMALL


def test_random_bytes_are_no_message() -> None:
    draws = random.Random(0)  # noqa: S311
    for length in range(0, 600, 3):
        for data in (draws.randbytes(length), SMALL[:HEAD] + draws.randbytes(length)):
            with pytest.raises(WireError):
                decode(data)
        with pytest.raises(WireError):
            decode(bytes_with(draws.randbytes(length), draws.randbytes(length)))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1,"a":1}',
        b'{ "a":1}',
        b'{"b":1,"a":1}',
        b'{"a":"\\ud800"}',
        b'{"a":\xff}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\xef\xbb\xbf{}",
    ],
)
def test_only_strict_json_is_read(text: bytes) -> None:
    with pytest.raises(WireError, match=r"^its header is no JSON object as fednorm writes it$"):
        decode(bytes_with(text, b""))


def tensor_list(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.fault(row=26)
@pytest.mark.parametrize(
    "tensors",
    [
        b"",
        b"\xff" * 8,
        (1 << 62).to_bytes(8, "little"),
        (1 << 21).to_bytes(8, "little") + b" " * (1 << 21),
        tensor_list(w={"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}),
        tensor_list(w={"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}),
        tensor_list(w={"dtype": "F4", "shape": [0], "data_offsets": [0, 0]}),
        tensor_list(w={"dtype": "F8_E8M0", "shape": [0], "data_offsets": [0, 0]}),
        tensor_list(w={"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}) + b"1234",
    ],
)
def test_bombs_are_refused(tensors: bytes) -> None:
    with pytest.raises(WireError, match=r"^client 3, exchange 7: its (tensors cannot be read|list of tensors)"):
        decode(bytes_with(split(SMALL)[0], tensors))


@pytest.mark.fault(row=26)
def test_limits_are_kept() -> None:
    size, header = len(SMALL), len(split(SMALL)[0])
    decode(SMALL, limits=Limits(max_bytes=size, max_header=header, max_entries=1))
    for limits, text in [
        (Limits(max_bytes=size - 1), f"it has {size} bytes, at most {size - 1} are taken"),
        (Limits(max_header=header - 1), f"its header has {header} bytes, at most {header - 1} are taken"),
        (Limits(max_entries=0), "client 3, exchange 7: it has 1 entries, at most 0 are taken"),
    ]:
        with pytest.raises(WireError) as refusal:
            decode(SMALL, limits=limits)
        assert str(refusal.value) == text


def test_the_heads_faults_have_texts() -> None:
    for data, text in [
        (b"", "it has 0 bytes, too few for a message; it was cut on the way"),
        (b"PK\x03\x04" + SMALL[4:], "it is no message of fednorm's"),
        (SMALL[:8] + b"\x02" + SMALL[9:], "it has format 2, this side reads 1; install the same fednorm on both"),
        (SMALL[:-1], f"it has {len(SMALL) - 1} bytes, its head says {len(SMALL)}; it was cut on the way"),
        (SMALL[:-1] + b"\x01", "it was altered on the way (its digest differs)"),
    ]:
        with pytest.raises(WireError) as refusal:
            decode(data)
        assert str(refusal.value) == text


def entry(key: str, tensor: torch.Tensor) -> Entry:
    return Entry(key, Kind.WEIGHT, "", key, True, tuple(tensor.shape), tensor.dtype)


@given(trees())
@settings(max_examples=20)
def test_limits_of_a_schema_hold_its_messages(tree: Tree) -> None:
    limits = limits_for(entry(key, tensor) for key, tensor in tree.items())
    for message in (replace(UPDATE, shared=tree, reported={}), replace(REQUEST, tree=tree), MESSAGES["scores"]):
        decode(encode(message), limits=limits)


def test_limits_of_a_schema_are_near_its_size() -> None:
    big = torch.zeros(1000, 1000)
    limits = limits_for([entry("w", big)], spare=0)
    assert 4_000_000 < limits.max_bytes < 4_200_000
    with pytest.raises(WireError, match="are taken"):
        decode(encode(replace(REQUEST, tree={"w": big.double()})), limits=limits)


# Streams.


@pytest.fixture
def ends() -> Any:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(20)
        there.settimeout(20)
        yield here, there


def test_messages_come_one_after_the_other_until_the_end(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    for message in MESSAGES.values():
        send(here, message)
    send(here, SMALL)
    here.close()
    found = [receive(there) for _ in range(len(MESSAGES) + 2)]
    assert found == [*map(encode, MESSAGES.values()), SMALL, None]


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 8 + len(SMALL) - 1])
def test_a_stream_cut_in_a_message_is_noticed(ends: tuple[socket.socket, socket.socket], cut: int) -> None:
    here, there = ends
    here.sendall((len(SMALL).to_bytes(8, "little") + SMALL)[:cut])
    here.close()
    with pytest.raises(WireError) as refusal:
        receive(there)
    assert str(refusal.value) == "the stream ended in the middle of a message"


@pytest.mark.fault(row=26)
def test_too_long_a_message_is_not_read(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    here.sendall(b"\xff" * 8)
    with pytest.raises(WireError) as refusal:
        receive(there, Limits(max_bytes=100))
    assert str(refusal.value) == f"a message of {2**64 - 1} bytes was announced, at most 100 are taken"


def test_a_stream_that_breaks_is_noticed_and_a_timeout_stays_one() -> None:
    class Broken:
        def __init__(self, error: OSError) -> None:
            self.error = error

        def recv(self, size: int) -> bytes:
            raise self.error

    with pytest.raises(WireError) as refusal:
        receive(Broken(ConnectionResetError()))  # type: ignore[arg-type]
    assert str(refusal.value) == "the stream broke (ConnectionResetError)"
    with pytest.raises(TimeoutError):
        receive(Broken(TimeoutError()))  # type: ignore[arg-type]


# What was agreed.

EXPECTED = {key: entry(key, tensor) for key, tensor in TREE.items()}
REPORTED = {key: entry(key, tensor) for key, tensor in UPDATE.reported.items()}
OTHER = replace(TERMS, method="fedavg")


def test_what_was_agreed_passes() -> None:
    check_hello(MESSAGES["hello"], TERMS.schema)  # type: ignore[arg-type]
    check_terms(TERMS, TERMS.schema)
    check_request(REQUEST, TERMS.digest, EXPECTED)
    check_update(UPDATE, ADDRESS, EXPECTED, REPORTED, sender=3)
    check_answer(MESSAGES["scores"], ADDRESS, sender=3)  # type: ignore[arg-type]


HELLO = Hello(name="süd", num_examples=1, schema=TERMS.schema)
HERE = "client 3, exchange 7"
FOREIGN = f"it is of a run with terms '{OTHER.digest[:8]}', this one has '{TERMS.digest[:8]}'; join this run anew"


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (
            lambda: check_hello(replace(HELLO, protocol=9), TERMS.schema),
            f"client 'süd' speaks protocol 9, this side {PROTOCOL}; install the same fednorm on both",
        ),
        (
            lambda: check_hello(replace(HELLO, schema="ab" * 32), TERMS.schema),
            "client 'süd' has schema 'abababab', this side '5c5c5c5c'; give both the same model, method and settings",
        ),
        (
            lambda: check_hello(replace(HELLO, num_examples=0), TERMS.schema),
            "client 'süd' has 0 examples; it needs one at least",
        ),
        (
            lambda: check_terms(replace(TERMS, schema="ab" * 32), TERMS.schema),
            "the server has schema 'abababab', this side '5c5c5c5c'; give both the same model, method and settings",
        ),
        (lambda: check_request(REQUEST, OTHER.digest, EXPECTED), None),
        (
            lambda: check_request(replace(REQUEST, address=replace(ADDRESS, terms=OTHER.digest)), TERMS.digest, {}),
            f"{HERE}: {FOREIGN}",
        ),
        (
            lambda: check_request(REQUEST, TERMS.digest, {}),
            f"{HERE}, entry 'bn.num_batches_tracked': was not expected",
        ),
        (
            lambda: check_request(replace(REQUEST, tree={}), TERMS.digest, EXPECTED),
            f"{HERE}, entry 'bn.num_batches_tracked': is missing",
        ),
        (
            lambda: check_answer(replace(UPDATE, address=None), ADDRESS),
            "client 3: it does not say which request it answers; give it the request's address",
        ),
        (
            lambda: check_answer(UPDATE, ADDRESS, sender=4),
            f"{HERE}: it was sent by client 4; a client answers for itself only",
        ),
        (
            lambda: check_answer(UPDATE, replace(ADDRESS, number=8, attempt=1)),
            f"{HERE}: it answers attempt 2 of exchange 7, open is attempt 1 of exchange 8; it is late",
        ),
        (
            lambda: check_answer(UPDATE, replace(ADDRESS, attempt=3)),
            f"{HERE}: it answers attempt 2 of exchange 7, open is attempt 3 of exchange 7; it is late",
        ),
        (
            lambda: check_answer(UPDATE, replace(ADDRESS, number=6)),
            f"{HERE}: it answers attempt 2 of exchange 7, open is attempt 2 of exchange 6; it was never asked for",
        ),
        (
            lambda: check_update(UPDATE, replace(ADDRESS, terms="x"), EXPECTED, REPORTED),
            f"{HERE}: it is of a run with terms '{TERMS.digest[:8]}', this one has 'x'; join this run anew",
        ),
        (
            lambda: check_update(replace(UPDATE, shared=TREE | {"bn.weight": torch.ones(3)}), ADDRESS, EXPECTED, {}),
            f"{HERE}, entry 'bn.weight': has shape (3,), expected (2,)",
        ),
        (
            lambda: check_update(
                replace(UPDATE, shared=TREE | {"bn.weight": TREE["bn.weight"].half()}), ADDRESS, EXPECTED, {}
            ),
            f"{HERE}, entry 'bn.weight': has type torch.float16, expected torch.float32",
        ),
        (
            lambda: check_update(UPDATE, ADDRESS, EXPECTED, {}),
            f"{HERE}, entry 'bn.weight': was not expected",
        ),
    ],
)
def test_what_was_not_agreed_is_refused(check: Callable[[], None], text: str | None) -> None:
    with pytest.raises(WireError) as refusal:
        check()
    assert text is None or str(refusal.value) == text


def test_a_saved_state_is_no_message() -> None:
    from fednorm.halves.wire_format import seal

    with pytest.raises(WireError, match=r"^it is of kind 'file'; known: hello,"):
        decode(pack(*seal("file", {"header": "{}"}, {})))


def test_a_sender_may_change_and_leave_out_entries_of_its_own() -> None:
    update = Update(Report(4, 10, {"all": 0.5}), dict(TREE), address=ADDRESS)
    header, tree = to_parts(update)
    tree["shared/bn.weight"] = tree["shared/bn.weight"] + 1
    with pytest.raises(WireError, match=r"client 4, exchange 7, entry 'bn\.weight': was altered on the way"):
        from_parts(header, tree)
    del tree["shared/bn.num_batches_tracked"]
    wanted = to_parts(replace(update, shared={"bn.weight": TREE["bn.weight"] + 1}))
    found = reseal(header, tree)
    assert found[0] == wanted[0]
    assert pack(*found) == pack(*wanted)


def test_a_seal_is_made_anew_for_entries_only() -> None:
    header, tree = to_parts(Update(Report(4, 10, {"all": 0.5}), dict(TREE), address=ADDRESS))
    header["fields"]["report"]["num_examples"] = 9000
    with pytest.raises(WireError, match="its header was altered on the way"):
        reseal(header, tree)
