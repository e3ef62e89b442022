"""Users' data sets are taken in: read once into memory, or left where they are to be read anew in every epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.data import memory
from fednorm.data.checks import not_class_numbers, unlike
from fednorm.data.federation import Federation
from fednorm.data.live import Form, LiveRows, usual_loaders
from fednorm.data.source import Arrays, Items, Source, known_labels, own_generators, seed_generators
from fednorm.errors import ConfigError, unknown

PROBED_ITEMS, PROBED_READS = 16, 4
"""How many items are read how often to find out whether they change from read to read."""
LONG_SECONDS = 10.0
"""Reading that takes longer is shared among processes."""
PART = 64
"""Items read at a time."""

Read = Literal["auto", "once", "anew"]


@dataclass(frozen=True)
class Wishes:
    """What a user said about the data."""

    task: str = "classification"
    num_classes: int | None = None
    ignore_index: int | None = None
    read: Read = "auto"
    memory_limit: int | None = None
    name: str = "own data"
    labels: bool = False
    """whether the label of every example must be known, to deal examples by it"""


@dataclass(frozen=True)
class Split:
    """Training or test examples: in memory, or read when they are needed, and then perhaps without known labels."""

    x: Tensor
    y: Tensor
    sizes: list[int]
    live: LiveRows | None = None
    note: str = ""

    @property
    def nbytes(self) -> int:
        return 0 if self.live else self.x.nbytes + self.y.nbytes


@dataclass(frozen=True)
class Intake:
    """What was taken in, and what is known of it."""

    train: Split
    test: Split
    wishes: Wishes
    num_classes: int
    ignore_index: int

    def federation(self, **fields: Any) -> Federation:
        """The federation of these examples."""
        return Federation(
            name=self.wishes.name,
            x=self.train.x,
            y=self.train.y,
            test_x=self.test.x,
            test_y=self.test.y,
            live=self.train.live,
            live_test=self.test.live,
            task=self.wishes.task,
            num_classes=self.num_classes,
            ignore_index=self.ignore_index,
            notes=tuple(note for note in (self.train.note, self.test.note) if note),
            **fields,
        )


def take_in(train: Sequence[Source], test: Sequence[Source], wishes: Wishes) -> Intake:
    """Read what can be read once; the user is told what was done."""
    if wishes.read not in get_args(Read):
        raise unknown("read", wishes.read, get_args(Read))
    ignored = wishes.ignore_index
    ignored = ignored if ignored is not None else 255 if wishes.task == "segmentation" else -100
    form = _form_of(train[0], wishes.task)
    _same_form([*train, *test], form, wishes.task)
    limit = memory.memory_limit() if wishes.memory_limit is None else wishes.memory_limit
    trained = _split(train, form, wishes, limit, "training")
    tested = _split(test, form, wishes, limit - trained.nbytes, "test")
    classes = wishes.num_classes or _count_classes(form, wishes.task, [trained.y, tested.y], ignored)
    strict = replace(form, num_classes=classes if wishes.task == "classification" else None)
    trained, tested = (_with_form(split, strict) for split in (trained, tested))
    for note in (trained.note, tested.note):
        if note:
            print(note, file=sys.stderr)
    return Intake(trained, tested, wishes, classes, ignored)


def _with_form(split: Split, form: Form) -> Split:
    return replace(split, live=LiveRows(split.live.sources, form)) if split.live else split


def _form_of(source: Source, task: str) -> Form:
    """What all examples must look like, by the first one."""
    x, y = source.item(0)
    if task == "classification" and (problem := not_class_numbers(_labels_of(source, y))):
        raise ConfigError(f"{source.who}: {problem}")
    return Form(source.who, x.shape, x.dtype, y.shape, y.dtype, _target_dtype(task, y.dtype))


def _labels_of(source: Source, y: Tensor) -> Tensor:
    return source.y if isinstance(source, Arrays) else y.unsqueeze(0)


def _target_dtype(task: str, dtype: torch.dtype) -> torch.dtype:
    if task == "multilabel" or (task == "regression" and not dtype.is_floating_point):
        return torch.float32
    keeps = dtype.is_floating_point or (task == "segmentation" and dtype == torch.uint8)
    return dtype if keeps else torch.int64


def _same_form(sources: Sequence[Source], form: Form, task: str) -> None:
    """Refuse sources whose examples look different, by name; of a data set the first item is looked at."""
    x, y = form.empty()
    y = y.to(form.y_dtype)
    for source in sources:
        if isinstance(source, Items):
            if problem := form.differs(*source.item(0)):
                raise ConfigError(f"{source.who}, item 0: {problem}")
            continue
        if task == "classification" and (problem := not_class_numbers(source.y)):
            raise ConfigError(f"{source.who}: {problem}")
        for one, other in ((x, source.x), (y, source.y)):
            if problem := unlike(form.who, one, source.who, other):
                raise ConfigError(problem)


def _split(sources: Sequence[Source], form: Form, wishes: Wishes, limit: int, what: str) -> Split:
    rows = LiveRows(sources, form)
    anew, why = _how(rows, wishes, limit, what)
    note = f"{wishes.name}: {why}" if why else ""
    sizes = [len(source) for source in sources]
    if not anew:
        return Split(*_in_memory(rows), sizes, note=note)
    x, y = form.empty()
    labels = _labels(rows)
    if labels is None and (wishes.labels or (wishes.num_classes is None and what == "training" and _has_classes(form))):
        labels = torch.cat([part for _, part in rows.with_loaders(usual_loaders()).parts(None, PART)])
        note += "; they were read once to know their labels"
    return Split(x, y if labels is None else labels, sizes, rows, note)


def _has_classes(form: Form) -> bool:
    return not form.targets.is_floating_point


def _how(rows: LiveRows, wishes: Wishes, limit: int, what: str) -> tuple[bool, str]:
    """Whether examples are to be read anew in every epoch, and what to tell the user."""
    items = [source for source in rows.sources if isinstance(source, Items)]
    mapped = any(source.mapped for source in rows.sources if isinstance(source, Arrays))
    if not items and not mapped:
        return False, ""
    if wishes.read != "auto":
        return wishes.read == "anew", f"{what} items are read {_TIMES[wishes.read]}, as asked"
    needed = len(rows) * rows.form.bytes
    if needed > limit:
        sizes = f"{memory.in_words(needed)}, more than the limit of {memory.in_words(max(0, limit))}"
        return True, f"{what} items need {sizes}, so they are read {_TIMES['anew']}"
    if what == "test" or not items:  # tests read each item with a seed of its own, always the same
        return False, ""
    found = _changes(items)
    if found is None:
        return False, f"{what} items are equal in every read, so they are read {_TIMES['once']}"
    return True, f"{what} items change from read to read{found}, so they are read {_TIMES['anew']}"


_TIMES = {"once": "once into memory", "anew": "anew in every epoch"}


def _changes(sources: Sequence[Items]) -> str | None:
    """None where items are equal in every read; else what there is to say about it."""
    starts = torch.tensor([len(source) for source in sources]).cumsum(0)
    rows = torch.linspace(0, int(starts[-1]) - 1, min(PROBED_ITEMS, int(starts[-1]))).long().unique()
    which = torch.searchsorted(starts, rows, right=True)
    at = [(sources[s], int(row - starts[s] + len(sources[s]))) for s, row in zip(which.tolist(), rows, strict=True)]
    with own_generators():
        for source, item in at:
            seeds = [rng.as_seed(rng.key("probe", item, number)) for number in range(PROBED_READS)]
            first, again, *others = [_bytes_of(source, item, seed) for seed in (seeds[0], *seeds)]
            if first != again:
                return ", even with equal seeds, so that runs do not repeat (draw from torch's own generator)"
            if any(other != first for other in others):
                return ""
    return None


def _bytes_of(source: Items, item: int, seed: int) -> tuple[Any, ...]:
    """An item in a form that can be compared, NaN included."""
    seed_generators(seed)
    return tuple((part.shape, part.dtype, part.detach().cpu().numpy().tobytes()) for part in source.item(item))


def _in_memory(rows: LiveRows) -> tuple[Tensor, Tensor]:
    form, sources = rows.form, rows.sources
    if all(isinstance(source, Arrays) for source in sources):
        arrays = [source for source in sources if isinstance(source, Arrays)]
        return torch.cat([each.x for each in arrays]), torch.cat([each.y for each in arrays]).to(form.targets)
    x, y = form.empty(len(rows))
    started, done = time.perf_counter(), 0
    first = min(len(rows), PART)
    for here, some in ((rows, torch.arange(first)), (None, torch.arange(first, len(rows)))):
        if here is None:  # by now it is known how long it takes; what is read does not depend on who reads
            long = (time.perf_counter() - started) / first * len(rows) > LONG_SECONDS
            here = rows.with_loaders(usual_loaders() if long else 0)
        for part_x, part_y in here.parts(some, PART):
            x[done : done + len(part_x)], y[done : done + len(part_x)] = part_x, part_y
            done += len(part_x)
    return x, y


def _labels(rows: LiveRows) -> Tensor | None:
    """The labels of all rows where the data sets list them, and an item of each says the same."""
    parts: list[Tensor] = []
    for source in rows.sources:
        known = known_labels(source)
        if known is None or known.shape[1:] != rows.form.y_shape:
            return None
        last = len(source) - 1
        with own_generators():
            if any(not torch.equal(source.item(index)[1], known[index]) for index in {0, last // 2, last}):
                return None
        parts.append(known.to(rows.form.targets))
    return torch.cat(parts)


def _count_classes(form: Form, task: str, labels: Sequence[Tensor], ignored: int) -> int:
    """Classes, or outputs of a regression."""
    if form.targets.is_floating_point:
        return form.y_shape[0] if form.y_shape else 1
    most = [int(y[y != ignored].max()) for y in labels if y.numel() and bool((y != ignored).any())]
    return max(most, default=0) + 1
