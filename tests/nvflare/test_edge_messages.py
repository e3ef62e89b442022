"""What goes between devices and the server: differences that lose no bit, and nodes that lose no answer."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
import torch

pytest.importorskip("nvflare")

from fednorm.core.phases import PhaseId
from fednorm.core.report import LOSSES, Report
from fednorm.errors import WireError
from fednorm.halves.messages import Address, Hello, Request, Update
from fednorm.halves.wire_format import Limits
from fednorm.nvflare.edge.packing import decode, encode, from_text, to_text
from fednorm.nvflare.edge.post import Job, Node, to_sheet

pytestmark = pytest.mark.nvflare

BASE = {
    "a": torch.randn(7, 5, generator=torch.Generator().manual_seed(0)),
    "steps": torch.tensor(41),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "none": torch.empty(0, 4),
}


def an_update() -> Update:
    report = Report(client=3, num_examples=12, losses=dict.fromkeys(LOSSES, 0.5))
    shared = {
        "a": BASE["a"] * 1.0001,
        "steps": torch.tensor(49),
        "half": BASE["half"] + 1,
        "none": BASE["none"],
        "wider": torch.ones(2, 2, dtype=torch.float64),
    }
    return Update(report, shared, {"own": torch.tensor([1.0, float("nan")])}, address=Address(terms="t", number=9))


def test_an_answer_is_the_same_to_the_bit_after_the_way() -> None:
    sent = an_update()
    got = decode(encode(sent, BASE), BASE)
    assert isinstance(got, Update)
    assert (got.report, got.address) == (sent.report, sent.address)
    for tree, other in ((sent.shared, got.shared), (sent.reported, got.reported)):
        assert sorted(tree) == sorted(other)
        for key, value in tree.items():
            assert value.dtype == other[key].dtype
            assert value.shape == other[key].shape
            assert value.reshape(-1).view(torch.uint8).tolist() == other[key].reshape(-1).view(torch.uint8).tolist()


def test_a_difference_is_smaller_than_what_it_is_of() -> None:
    near = replace(an_update(), shared={"w": BASE["a"].repeat(40, 40) * 1.0001}, reported={})
    base = {"w": BASE["a"].repeat(40, 40)}
    plain = near.shared["w"].numel() * 4
    assert len(encode(near, base)) < 0.8 * plain
    assert len(encode(near, base)) < len(encode(near))


def test_another_base_than_the_devices_is_noticed() -> None:
    data = encode(an_update(), BASE)
    with pytest.raises(WireError, match=r"client 3, exchange 9, entry 'a': was altered on the way"):
        decode(data, {**BASE, "a": BASE["a"] + 1})
    with pytest.raises(WireError, match=r"entry 'a': was altered on the way"):
        decode(data)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data[:-20], "it was cut on the way"),
        (lambda data: b"no such thing", "it is no answer of a device's; it was cut or altered on the way"),
        (lambda data: zlib.compress(zlib.decompress(data)[:-1]), "it was cut on the way"),
        (lambda data: zlib.compress(zlib.decompress(data)[:-1] + b"\1"), "it was altered on the way"),
        (lambda data: zlib.compress(bytes(1 << 22)), "it becomes more than 1048576 bytes"),
    ],
)
def test_spoilt_bytes_are_refused(spoil, why: str) -> None:
    with pytest.raises(WireError, match=why):
        decode(spoil(encode(an_update(), BASE)), BASE, limits=Limits(max_bytes=1 << 20))


def test_text_of_a_device_is_read_strictly() -> None:
    assert from_text(to_text(b"\0\1fednorm")) == b"\0\1fednorm"
    for text in ("no base64!", "YQ", "ü"):
        with pytest.raises(WireError, match="its text is no base64; it was cut or altered on the way"):
            from_text(text)
    with pytest.raises(WireError, match="a list came where base64 text was expected"):
        from_text([1.0, 2.0])
    with pytest.raises(WireError, match="its text has 400 characters, which no message of this run has"):
        from_text("A" * 400, Limits(max_bytes=9))


def test_a_device_gets_its_own_request_out_of_what_all_share() -> None:
    request = Request(
        client=3,
        address=Address(terms="t", number=17),
        round=5,
        phase=PhaseId.parse("train.0.0"),
        numbers={"lr": 0.1},
        accepted=11,
        tree=BASE,
    )
    sheet = to_sheet(request)
    assert (sheet.client, sheet.accepted, sheet.address.number) == (0, 0, 0)
    assert Job(id=1, client=3, number=17, accepted=11, sheet="s").request(sheet) == request


def a_job(id: int, sheet: str = "v0") -> Job:
    return Job(id=id, client=0, number=id, accepted=0, sheet=sheet)


def passed(child: Node, name: str, parent: Node) -> None:
    """A report and its answer."""
    report = child.report()
    parent.hear(report, name)
    child.answered(parent.reply(name, report["sheets"]))


def test_jobs_and_their_sheets_reach_the_leaf_of_their_device_only() -> None:
    server, relay, leaf, other = Node(), Node(), Node(), Node()
    leaf.hear({"said": {"a#0": (0, b"hello")}})
    other.hear({"said": {"b#0": (0, b"hello")}})
    passed(leaf, "leaf", relay)
    passed(other, "other", relay)
    passed(relay, "relay", server)
    server.terms, server.sheets = b"terms", {"v0": b"model 0", "v1": b"model 1"}
    server.jobs = {"a#0": a_job(1), "b#0": a_job(2, "v1")}
    passed(relay, "relay", server)
    passed(leaf, "leaf", relay)
    passed(other, "other", relay)
    assert relay.sheets == server.sheets
    assert (leaf.terms, leaf.jobs, leaf.sheets) == (b"terms", {"a#0": a_job(1)}, {"v0": b"model 0"})
    assert (other.jobs, other.sheets) == ({"b#0": a_job(2, "v1")}, {"v1": b"model 1"})
    assert leaf.report()["sheets"] == ["v0"]
    assert relay.reply("leaf", ["v0"])["sheets"] == {}


def test_an_answer_is_reported_until_it_was_heard_and_its_job_is_not_done_twice() -> None:
    server, leaf = Node(), Node()
    leaf.hear({"said": {"a#0": (0, b"hello")}})
    passed(leaf, "leaf", server)
    server.jobs, server.sheets = {"a#0": a_job(1)}, {"v0": b"model"}
    passed(leaf, "leaf", server)
    assert leaf.open_job("a#0") == a_job(1)
    leaf.hear({"said": {"a#0": (1, b"update")}})
    assert leaf.open_job("a#0") is None
    lost = leaf.report()
    assert lost["said"] == leaf.report()["said"] == {"a#0": [1, b"update"]}
    leaf.hear({"failed": {"b#1": (0, "no data")}})
    server.hear(lost, "leaf")
    assert server.open_job("a#0") is None
    leaf.answered(server.reply("leaf", lost["sheets"]))
    assert leaf.jobs == {}
    assert leaf.sheets == {}
    assert leaf.report()["failed"] == {"b#1": [0, "no data"]}


def test_what_is_said_while_a_report_is_under_way_is_in_the_next() -> None:
    leaf = Node()
    leaf.hear({"said": {"a#0": (1, b"one")}})
    leaf.report()
    leaf.hear({"said": {"a#0": (2, b"two")}})
    leaf.answered({"terms": b"", "jobs": {}, "sheets": {}})
    assert leaf.report()["said"] == {"a#0": [2, b"two"]}


def test_a_hello_goes_the_same_way() -> None:
    hello = Hello(name="device-000007", num_examples=3, schema="s")
    assert decode(from_text(to_text(encode(hello)))) == hello
