"""What tools/fuzz.py feeds: for each reader some good inputs, words that it knows, and how damaged ones are read."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import random
from collections.abc import Callable, Sequence
from contextlib import closing, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

import fednorm
from fednorm.core.expression import parse_term, parse_terms
from fednorm.core.report import Report
from fednorm.core.state import model_state
from fednorm.data.from_files.file_set import FileOptions
from fednorm.data.from_files.npz import read_npz
from fednorm.data.from_files.source import Source
from fednorm.data.from_files.table import read_table
from fednorm.data.partition import find_partition
from fednorm.data.readers.digits import read_libsvm, read_mat
from fednorm.data.readers.idx import read_idx
from fednorm.data.readers.images import read_image
from fednorm.data.readers.packed import read_archive
from fednorm.errors import FednormError
from fednorm.halves import wire
from fednorm.halves.messages import Address, Update
from fednorm.halves.mine import ClientState
from fednorm.halves.wire_format import canonical, pack
from fednorm.methods import known_methods, parse
from fednorm.running.config import RunConfig, from_dict, to_dict
from fednorm.running.folder import RunFolder
from fednorm.running.given import config_in, read_stored
from fednorm.running.initial import read_start
from fednorm.running.recipe import read_recipe, to_toml
from fednorm.running.result_file import read_result_file
from fednorm.running.results import Result
from fednorm.running.store import Store
from fednorm.running.tensor_files import load_tree, save_tree


@dataclass(frozen=True)
class Target:
    """Something that reads what others wrote."""

    seeds: Sequence[bytes]
    read: Callable[[bytes], Any]
    words: Sequence[bytes] = ()
    refine: Callable[[bytes, random.Random], bytes] = lambda data, _: data
    """makes what outer digests would refuse acceptable to them, so that the inner readers are reached"""


def target(name: str, place: Path) -> Target:
    """The target of a name, whose files are in a folder of their own."""
    folder = place / name
    folder.mkdir()
    return TARGETS[name](folder)


def _file(path: Path, read: Callable[[], Any]) -> Callable[[bytes], Any]:
    """Write the input where a reader expects it, and let it read."""

    def reading(data: bytes) -> Any:
        path.write_bytes(data)
        return read()

    return reading


NUMBERS = [b"-1", b"0", b"1e400", b"NaN", b"1e-400", b"9223372036854775808", b"340282366920938463463374607431768211456"]
JSON_WORDS = [*NUMBERS, b"null", b"true", b"[]", b"{}", b'""', b"[[[[", b'{"a":', b'"\\ud800"', b"Infinity"]


def _config(folder: Path) -> Target:
    run = RunFolder(folder)
    stored = {**to_dict(RunConfig()), "given": [], "use_sha256": {}}
    compared = {**stored, "compare": {"methods": ["fedavg", "fedbn"], "seeds": [0, 1]}}
    seeds = [json.dumps(each).encode() for each in (stored, compared)]
    return Target(seeds, _file(run.config, lambda: config_in(read_stored(run))), JSON_WORDS)


def _result(folder: Path) -> Target:
    run = RunFolder(folder)
    settings: dict[str, Any] = {"rounds": 2, "local_steps": 1, "engine.threads": 1, "data.train_limit": 60}
    result = fednorm.run(method="fedbn", model="mlp_bn(width=4)", **settings)

    def read() -> Any:
        with redirect_stderr(io.StringIO()):  # a result without a digest is noted
            found = Result(tuple(read_result_file(run)["runs"]))
        return found.to_json(), str(found), found.rows()

    return Target([json.dumps(result.to_json()).encode()], _file(run.result, read), JSON_WORDS)


def _toml(folder: Path) -> Target:
    path = folder / "recipe.toml"

    def read() -> Any:
        recipe = read_recipe(path)
        return from_dict(recipe.fields), recipe.methods, recipe.seeds

    plain = to_toml(to_dict(RunConfig()))
    small = '[compare]\nmethods = ["fedavg"]\nseeds = [0]\n[train]\nlr = 0.1\n[data]\nname = "digits"\n'
    words = [b"[train]", b"[[data]]", b"= {", b"'''", b"inf", b"nan", b"1979-05-27", b"0x", *NUMBERS]
    return Target([plain.encode(), small.encode()], _file(path, read), words)


EXPRESSION_WORDS = [b"(", b")", b"+", b"=", b"'", b",", b"__", b"lambda", *NUMBERS]


def _grammar(folder: Path) -> Target:
    def read(data: bytes) -> Any:
        return parse_terms(data.decode(errors="replace"), "method", "fixbn(at=0.5)")

    return Target([b"fedprox(mu=0.01)+gn(groups=2)", b"a(b=[1, 'x'], c=None)+d", b"f(x=-1e-5)"], read, EXPRESSION_WORDS)


def _expression(folder: Path) -> Target:
    seeds = [name.encode() for name in known_methods()]
    seeds += [b"fedprox(mu=0.01)+gn(groups=2)", b"dirichlet(alpha=0.1)", b"mlp_bn(width=16)", b"fixbn(at=0.5)"]

    def read(data: bytes) -> Any:
        text = data.decode(errors="replace")
        with suppress(FednormError):  # methods are asked whatever partitions say
            term = parse_term(text, "partition", "dirichlet(alpha=0.1)")
            find_partition(term.name, term.options)
        return parse(text)

    return Target(seeds, read, EXPRESSION_WORDS)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))


def _safetensors(folder: Path) -> Target:
    path, net = folder / "m.safetensors", _net()
    tree = model_state(net)
    save_tree(path, tree, {"method": "fedavg"})
    foreign = save(tree, {"format": "pt"})

    def read() -> Any:
        read_start(str(path), partial=True).before_surgery(net)
        return {key: value.sum() for key, value in load_tree(path).items()}

    words = [b'"F32"', b'"I64"', b'"BOOL"', b'"F8_E4M3"', b'"shape":[', b'"data_offsets":[0,', *NUMBERS]
    return Target([path.read_bytes(), foreign, foreign], _file(path, read), words)


def _wire(folder: Path) -> Target:
    update = Update(
        address=Address(terms="t", number=1, attempt=1),
        report=Report(client=3, num_examples=8, losses={"all": 0.5}),
        shared=model_state(_net()),
        reported={},
    )
    header, tree = wire.to_parts(update)

    def refine(data: bytes, draw: random.Random) -> bytes:
        """Now and then a message whose header was changed by somebody who can compute digests."""
        if draw.random() < 0.5:
            return data
        try:
            changed = json.loads(data.decode())
            changed.pop("digest", None)
            changed["digest"] = hashlib.sha256(canonical(changed)).hexdigest()
            return pack(changed, tree)
        except (ValueError, AttributeError, TypeError, RecursionError):
            return data

    return Target([wire.encode(update), canonical(header), canonical(header)], wire.decode, JSON_WORDS, refine)


def _store(folder: Path) -> Target:
    path = folder / "s"
    with closing(Store(path)) as store:
        for client in range(4):
            store.put(client, ClientState(client, {"a": torch.arange(40.0)}))
        store.commit(1, {"model": model_state(_net())}, {"switch": {"k": 1}}, [{"round": 1}])
    good = path.read_bytes()

    def read(data: bytes) -> Any:
        for old in folder.iterdir():
            old.unlink()
        path.write_bytes(data)
        with closing(Store(path)) as store:
            facts, rows, states = store.facts(), list(store.rows()), store.get_many(store.seen())
            return facts, rows, states, store.tree("model") if facts else {}

    return Target([good], read, [b"seal", b"clients", b"\0\0\0\0", b"\xff\xff\xff\xff", b"CREATE TABLE"])


def _idx(folder: Path) -> Target:
    path = folder / "train-labels-idx1-ubyte"
    plain = b"\0\0\x08\x03" + (2).to_bytes(4, "big") * 3 + bytes(8)

    def read(data: bytes) -> Any:
        packed = data[:2] == b"\x1f\x8b"
        path.unlink(missing_ok=True)
        path.with_suffix(".gz").unlink(missing_ok=True)
        (path.with_suffix(".gz") if packed else path).write_bytes(data)
        return read_idx(path, 3)

    words = [b"\xff\xff\xff\xff", b"\x80\0\0\0", b"\x7f\xff\xff\xff"]
    return Target([plain, plain, gzip.compress(plain)], read, words)


def _arrays(**arrays: np.ndarray) -> list[bytes]:
    found = []
    for save_arrays in (np.savez, np.savez_compressed):
        buffer = io.BytesIO()
        save_arrays(buffer, **arrays)
        found.append(buffer.getvalue())
    return found


NPZ_WORDS = [b"'|O'", b"'<f8'", b"'shape': (", b"PK\x01\x02", b"PK\x03\x04", b"\x93NUMPY", b".npy", *NUMBERS]


def _npz(folder: Path) -> Target:
    path = folder / "a.npz"
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    seeds = _arrays(x=rows, y=np.arange(6) % 2, client=np.arange(6) % 3)
    read = _file(path, lambda: read_npz(Source("npz", path), FileOptions()))
    return Target(seeds, read, NPZ_WORDS)


def _packed(folder: Path) -> Target:
    path = folder / "a.npz"
    seeds = _arrays(x_train=np.zeros((3, 4, 4), np.uint8), y_train=np.arange(3))
    return Target(seeds, _file(path, lambda: read_archive(path, "x_train", "y_train")), NPZ_WORDS)


def _mat(folder: Path) -> Target:
    from scipy.io import savemat

    path, seeds = folder / "a.mat", []
    for compressed in (False, True):
        savemat(path, {"X": np.zeros((4, 4, 3, 2), np.uint8), "y": np.ones((2, 1))}, do_compression=compressed)
        seeds.append(path.read_bytes())
    return Target(seeds, _file(path, lambda: read_mat(path)), [b"\x0e\0\0\0", b"\x0f\0\0\0", b"\xff\xff\xff\x7f"])


def _libsvm(folder: Path) -> Target:
    path = folder / "usps.bz2"
    line = b"3 " + b" ".join(b"%d:0.5" % number for number in range(1, 257)) + b"\n"

    def read(data: bytes) -> Any:
        path.write_bytes(data if data[:3] == b"BZh" else bz2.compress(data, 1))
        return read_libsvm(path)

    return Target([line, b"1 1:-1\n2 2:1\n", bz2.compress(line)], read, [b":", b"nan", b"257:", *NUMBERS])


def _image(folder: Path) -> Target:
    from PIL import Image

    path, seeds = folder / "a.png", []
    picture = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    for kind in ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM"):
        buffer = io.BytesIO()
        picture.save(buffer, kind)
        seeds.append(buffer.getvalue())
    return Target(seeds, _file(path, lambda: read_image(path, (8, 8))), [b"%!PS-Adobe", b"IDAT", b"\xff\xd8\xff"])


def _parquet(folder: Path) -> Target:
    import pyarrow
    import pyarrow.parquet

    path = folder / "a.parquet"
    table = pyarrow.table({"age": [31, 45, 28], "site": ["a", "b", "a"], "y": [0, 1, 1]})
    pyarrow.parquet.write_table(table, path)
    options = FileOptions(target="y", client="site")
    read = _file(path, lambda: read_table(Source("table", path), options))
    return Target([path.read_bytes()], read, [b"PAR1", b"\xff\xff\xff\xff", b"\0\0\0\0"])


def _csv(folder: Path) -> Target:
    path = folder / "a.csv"
    text = b'age,sex,"name, full",site,y\n31,m,"a ""b""",1,0\n45,f,c,2,1\n28,m,c,1,1\n'
    options = FileOptions(target="y", client="site")
    read = _file(path, lambda: read_table(Source("table", path), options))
    return Target([text, text.replace(b",", b";")], read, [b'"', b"\r", b"\0", b"\xef\xbb\xbf", b"PAR1", *NUMBERS])


TARGETS: dict[str, Callable[[Path], Target]] = {
    "config": _config,
    "result": _result,
    "toml": _toml,
    "grammar": _grammar,
    "expression": _expression,
    "safetensors": _safetensors,
    "wire": _wire,
    "store": _store,
    "idx": _idx,
    "npz": _npz,
    "packed": _packed,
    "mat": _mat,
    "libsvm": _libsvm,
    "csv": _csv,
    "image": _image,
    "parquet": _parquet,
}
