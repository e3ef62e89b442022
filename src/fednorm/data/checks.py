"""What is wrong with a federation's data: every reason a run would refuse them, with the client that is concerned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from fednorm.data.client_rows import MANY, ClientRows
from fednorm.data.federation import Federation
from fednorm.data.items import kind_of, name_of
from fednorm.errors import ConfigError

MOST_LINES = 10
"""Clients named for one kind of problem; that more have it is said in a line of its own."""


def check(federation: Federation, task: str | None = None) -> None:
    """Refuse data that a run could only misunderstand; a task's name in place of the federation's own."""
    for problem in problems(federation, task):
        raise ConfigError(problem)


def problems(federation: Federation, task: str | None = None) -> list[str]:
    """Every reason a run would refuse these data, one line each.

    >>> x, y = torch.zeros(2, 3), torch.tensor([0, 2])
    >>> rows = (torch.arange(2),)
    >>> data = Federation(name="", x=x, y=y, clients=rows, test_x=x, test_y=y, own_test=rows, num_classes=2)
    >>> problems(data)[0]
    'client 0, example 1: label 2 is not one of the 2 classes; number the classes 0 to 1, or give num_classes=3'
    """
    found = [*_structure(federation)]
    if found:  # rows that are not there have no values to look at
        return found
    return [problem for part in _parts(federation) for problem in _values(part, federation, task or federation.task)]


@dataclass(frozen=True)
class _Part:
    """Training or test examples, and whose they are."""

    x: Tensor
    y: Tensor
    rows: Sequence[Tensor]
    who: Callable[[int], str]


def _parts(federation: Federation) -> list[_Part]:
    own = federation.own_test
    joint = len(own) >= MANY or len({id(rows) for rows in own}) < len(own)
    tests = (torch.arange(len(federation.test_y)),) if joint else own

    def of_test(client: int) -> str:
        return "the test set" if joint else f"the test set of {federation.called(client)}"

    train = _Part(federation.x, federation.y, federation.clients, federation.called)
    test = _Part(federation.test_x, federation.test_y, tests, of_test)
    # What is not in memory is looked at when it is read.
    return [part for part, live in ((train, federation.live), (test, federation.live_test)) if live is None]


def _structure(federation: Federation) -> Iterator[str]:
    """Numbers of rows, shapes and types."""
    empty = (federation.sizes == 0).nonzero()[:, 0].tolist()
    yield from _some(
        f"{federation.called(c)} has no examples; leave it out or give it data"
        for c in empty
        if c not in federation.unseen
    )
    if federation.num_tests == 0:
        yield "the test set has no examples; give some"
    for what, x, y, live in (
        ("training", federation.x, federation.y, federation.live),
        ("test", federation.test_x, federation.test_y, federation.live_test),
    ):
        if live is None and len(x) != len(y):
            yield f"the {what} data have {len(x)} inputs and {len(y)} labels; each input needs one label"
    if len(federation.own_test) != len(federation.clients):
        yield (
            f"{len(federation.clients)} clients but {len(federation.own_test)} lists of own test rows; "
            "give one for each client"
        )
    yield from _rows_out_of_range(federation)
    for what, (a, b) in {
        "inputs": (federation.x, federation.test_x),
        "labels": (federation.y, federation.test_y),
    }.items():
        if problem := unlike(f"the training {what}", a, f"the test {what}", b):
            yield problem


def unlike(one: str, a: Tensor, other: str, b: Tensor) -> str | None:
    """Why two sets of examples cannot be used together, by name.

    >>> unlike("client 0", torch.zeros(2, 3), "client 1", torch.zeros(2, 4))
    'client 0 has examples of shape (3,) but client 1 (4,); bring all to one shape'
    """
    has, but = ("have", "have") if one.endswith("s") else ("has", "")
    if kind_of(a.dtype) != kind_of(b.dtype):
        return (
            f"{one} {has} {name_of(a.dtype)} numbers but {other} {name_of(b.dtype)}; bring all to one type: "
            "bytes are scaled from 0-255 to 0-1, other numbers are taken as they are"
        )
    if a.shape[1:] != b.shape[1:]:
        return (
            f"{one} {has} examples of shape {tuple(a.shape[1:])} but {other} {but} {tuple(b.shape[1:])}; "
            "bring all to one shape"
        ).replace("  ", " ")
    return None


def _rows_out_of_range(federation: Federation) -> Iterator[str]:
    for what, each, count in (
        ("rows", federation.clients, federation.num_examples),
        ("test rows", federation.own_test, federation.num_tests),
    ):
        low, high = _extent(each)
        if low < 0 or high >= count:
            yield f"{what} of clients go from {low} to {high}, but there are {count}; give rows 0 to {count - 1}"


def _extent(rows: Sequence[Tensor]) -> tuple[int, int]:
    """The smallest and the largest row of all clients."""
    if isinstance(rows, ClientRows) and rows.rows is None:
        return int(rows.starts.min()), int(rows.stops.max()) - 1
    if isinstance(rows, ClientRows):
        every = rows.rows
    else:  # clients that share a test set have the same tensor, which need not be looked at a million times
        every = torch.cat(list({id(part): part for part in rows}.values())) if rows else None
    if every is None or not len(every):
        return 0, -1
    low, high = every.aminmax()
    return int(low), int(high)


def _values(part: _Part, federation: Federation, task: str) -> Iterator[str]:
    yield from _not_finite(part, part.x, "the input")
    looks = {
        "classification": _class_numbers,
        "segmentation": _masks,
        "multilabel": _many_labels,
        "regression": _measurements,
    }
    if task in looks:
        yield from looks[task](part, federation)
    else:  # a task of the user's own says itself what its targets are
        yield from _not_finite(part, part.y, "the target")


def _not_finite(part: _Part, values: Tensor, what: str) -> Iterator[str]:
    """NaN or infinite numbers, which would look like a learning rate that is too high."""
    if not values.is_floating_point() or bool(values.sum().isfinite()):  # one quick pass for nearly all data
        return
    bad = ~values.flatten(1).isfinite().all(1) if values.dim() > 1 else ~values.isfinite()

    def text(row: int) -> str:
        at = (~values[row].isfinite()).nonzero()[0].tolist()
        where = f" at {tuple(at)}" if len(at) > 1 else f" in column {at[0]}" if at else ""
        number = float(values[row][tuple(at)])
        return f"{what} is {number}{where}; replace or leave out what is missing"

    yield from _examples(part, bad, text)


def _class_numbers(part: _Part, federation: Federation) -> Iterator[str]:
    y, classes = part.y, federation.num_classes
    if problem := not_class_numbers(y):
        yield f"{part.who(_owner(part))}: {problem}"
        return
    low, high = y.aminmax()
    if int(low) >= 0 and int(high) < classes:
        return

    def text(row: int) -> str:
        label = int(y[row])
        if label < 0:
            return f"label {label} is negative; number the classes from 0, and leave out examples without a label"
        fix = f"number the classes 0 to {classes - 1}, or give num_classes={int(high) + 1}"
        return f"label {label} is not one of the {classes} classes; {fix}"

    yield from _examples(part, (y < 0) | (y >= classes), text)


def not_class_numbers(y: Tensor) -> str | None:
    """Why these are no class numbers, one for each example, and what to give instead."""
    if y.dim() == 2 and y.shape[1] > 1:
        return (
            f"labels have shape {tuple(y.shape)}, but a class is one number; for one-hot labels give y.argmax(1), "
            "for several labels at once task='multilabel'"
        )
    if y.dim() == 2:
        return f"labels have shape {tuple(y.shape)}, but a class is one number; give y[:, 0]"
    if y.dim() > 2:
        return f"labels have shape {tuple(y.shape)}, but a class is one number; for masks give task='segmentation'"
    if y.is_floating_point():
        return (
            f"labels are {name_of(y.dtype)} numbers, such as {float(y[0]):g}; give y.long() if they are class numbers, "
            "or task='regression' if they are measurements"
        )
    return None


def _masks(part: _Part, federation: Federation) -> Iterator[str]:
    y, classes, ignored = part.y, federation.num_classes, federation.ignore_index
    if y.is_floating_point() or y.dim() != 3 or (part.x.dim() == 4 and y.shape[1:] != part.x.shape[2:]):
        shape = tuple(part.x.shape[2:])
        yield (
            f"{part.who(_owner(part))}: masks are {name_of(y.dtype)} of shape {tuple(y.shape[1:])}; "
            f"give a class number for each pixel, whole numbers of shape {shape}"
        )
        return
    counted = torch.empty(len(y), dtype=torch.bool, device=y.device)
    strange = torch.empty_like(counted)
    for start in range(0, len(y), 1024):  # masks of a whole set at once would need several times its memory
        some = y[start : start + 1024].flatten(1).long()
        kept = some != ignored
        counted[start : start + 1024] = kept.any(1)
        strange[start : start + 1024] = (kept & ((some < 0) | (some >= classes))).any(1)

    def text(row: int) -> str:
        mask = y[row].long()
        label = int(mask[(mask != ignored) & ((mask < 0) | (mask >= classes))][0])
        return (
            f"the mask has {label}, which is not one of the {classes} classes and not the ignored {ignored}; "
            f"number the classes 0 to {classes - 1}"
        )

    yield from _examples(part, strange, text)
    if not bool(counted.all()):
        yield from _some(
            f"{part.who(c)} has no pixel that counts: all are {ignored}, which is ignored; leave it out"
            for c, rows in enumerate(part.rows)
            if len(rows) and not bool(counted[rows.to(y.device)].any())
        )


def _many_labels(part: _Part, federation: Federation) -> Iterator[str]:
    y, classes = part.y, federation.num_classes
    if y.dim() != 2 or y.shape[1] != classes:
        yield (
            f"{part.who(_owner(part))}: labels have shape {tuple(y.shape)}; several labels at once are 0 or 1 for each "
            f"of {classes} classes, of shape ({len(y)}, {classes})"
        )
        return
    strange = (y != 0) & (y != 1)

    def text(row: int) -> str:
        column = int(strange[row].nonzero()[0])
        return f"label {float(y[row, column]):g} in column {column} is neither 0 nor 1; give 1 where a class is present"

    if bool(strange.any()):
        yield from _examples(part, strange.any(1), text)


def _measurements(part: _Part, federation: Federation) -> Iterator[str]:
    y = part.y
    if not y.is_floating_point():
        yield f"{part.who(_owner(part))}: targets of a regression are {name_of(y.dtype)} numbers; give y.float()"
    elif y.dim() > 2:
        yield (
            f"{part.who(_owner(part))}: targets of a regression have shape {tuple(y.shape)}; "
            "give one number, or one row of numbers, for each example"
        )
    else:
        yield from _not_finite(part, y, "the target")


def _owner(part: _Part) -> int:
    """The first with examples: a problem of all is told of one."""
    return next((c for c, rows in enumerate(part.rows) if len(rows)), 0)


def _examples(part: _Part, bad: Tensor, text: Callable[[int], str]) -> Iterator[str]:
    """A line for each client with bad examples, about its first; rows that nobody has harm nobody."""

    def lines() -> Iterator[str]:
        if not bool(bad.any()):
            return
        flags = bad.cpu()
        for client, rows in enumerate(part.rows):
            found = flags[rows.cpu()].nonzero()
            if len(found):
                first = int(found[0])
                more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
                yield f"{part.who(client)}, example {first}{more}: {text(int(rows[first]))}"

    return _some(lines())


def _some(lines: Iterator[str]) -> Iterator[str]:
    yield from islice(lines, MOST_LINES)
    if next(lines, None) is not None:
        yield f"more than {MOST_LINES} clients have this problem; those above are the first"
