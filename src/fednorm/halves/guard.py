"""The one check that what clients send passes before every merge, wherever they train.

It has three parts. The form: report and tensors are what was agreed on. The values: all finite, no variance negative,
no counter beyond what the client's steps explain. And among the clients of an exchange the distance: nobody moves the
model a great many times as far as the others. What is found names the entry and the reason; who asks adds the client
and the round.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fednorm.core.reductions import wide
from fednorm.core.report import LOSSES, Report
from fednorm.core.state import Entry, Kind, Policy, Tree
from fednorm.data.streams import batches_per_epoch
from fednorm.halves.messages import LocalWork, Update
from fednorm.halves.norm_bound import groups
from fednorm.halves.prepared_phase import PreparedPhase
from fednorm.halves.schema import OWN, Schema, keys_with
from fednorm.halves.stacks import Stacks
from fednorm.halves.wire_format import short

CALLS_A_STEP = 1 << 16
"""Times that a layer may count in one step: most count once, one inside a recurrence as often as it is called."""


@dataclass(frozen=True)
class Flaw:
    """Why something cannot be used, and in which entry."""

    why: str
    entry: str = ""

    def __str__(self) -> str:
        return f"'{self.entry}' {self.why}" if self.entry else self.why


@dataclass(frozen=True)
class Allowed:
    """What an answer may say of its client: how many examples it has, and as much counting as its steps explain."""

    examples: int
    steps: int

    @classmethod
    def by_terms(cls, phase: PreparedPhase, work: LocalWork, examples: int) -> Allowed:
        """What follows from the terms for a client that trains on this many examples."""
        per_epoch = batches_per_epoch(examples, work.batch_size)
        return cls(examples, sum(each.steps(work, per_epoch) for each in phase.passes))


# -- form --


class Sent(NamedTuple):
    """The entries that a phase's updates have."""

    shared: Mapping[str, Entry]
    reported: Mapping[str, Entry]

    @classmethod
    def by(cls, schema: Schema) -> Sent:
        each = (keys_with(schema, policy) for policy in (Policy.SHARED, Policy.REPORTED))
        return cls(*({key: schema[key][0] for key in keys} for keys in each))


def flaw_of_form(
    update: Update, sent: Sent, measures: Collection[str] | None = None, allowed: Allowed | None = None
) -> Flaw | None:
    """What is wrong with an update before one looks at its values: entries, shapes, types, and what its report says.

    Where the phase's `measures` are given, the report must have just these and all losses; else what it has must fit.
    """
    found = flaw_of_tree(update.shared, sent.shared) or flaw_of_tree(update.reported, sent.reported)
    return found or _flaw_of_report(update.report, measures, allowed)


def flaw_of_tree(tree: object, expected: Mapping[str, Entry]) -> Flaw | None:
    """The first entry that is missing, that nobody expects, or that is no plain tensor of its shape and type."""
    if not isinstance(tree, Mapping):
        return Flaw(f"its entries are {short(tree)}, expected tensors by name")
    named = cast(Mapping[str, Any], tree)
    if expected.keys() != named.keys():
        key = min(expected.keys() ^ named.keys(), key=str)
        return Flaw("is missing" if key in expected else "was not expected", str(key))
    for key, entry in expected.items():
        tensor = named[key]
        if not isinstance(tensor, Tensor):
            return Flaw(f"is {short(tensor)}, expected a tensor", key)
        if tensor.shape != entry.shape:
            return Flaw(f"has shape {tuple(tensor.shape)}, expected {tuple(entry.shape)}", key)
        if tensor.dtype != entry.dtype:
            return Flaw(f"has type {tensor.dtype}, expected {entry.dtype}", key)
        if tensor.layout != torch.strided or tensor.is_meta:
            return Flaw("has no plain values (it is sparse or on the meta device); send a dense tensor", key)
        if tensor.requires_grad:
            return Flaw("carries a gradient; send it detached", key)
    return None


def _flaw_of_report(report: object, measures: Collection[str] | None, allowed: Allowed | None) -> Flaw | None:
    if not isinstance(report, Report):
        return Flaw(f"its report is {short(report)}, expected examples, losses and scalars")
    count: object = report.num_examples
    if type(count) is not int or count < 1:
        return Flaw(f"its number of examples is {short(count)}, expected a whole number above 0")
    if allowed is not None and count != allowed.examples:
        return Flaw(f"it weighs {short(count)} examples, but said it trains on {allowed.examples}")
    complete = measures is not None
    return _flaw_of_numbers("loss", report.losses, LOSSES if complete else None) or _flaw_of_numbers(
        "scalar", report.scalars, measures
    )


def _flaw_of_numbers(what: str, numbers: object, expected: Collection[str] | None) -> Flaw | None:
    if not isinstance(numbers, Mapping):
        return Flaw(f"what it reports as {what} is {short(numbers)}, expected numbers by name")
    named = cast(Mapping[str, object], numbers)
    for name in sorted(named.keys() ^ set(expected), key=str) if expected is not None else ():
        return Flaw(f"its {what} {short(name)} {'was not expected' if name in named else 'is missing'}")
    for name, value in named.items():
        if not (type(value) is float or (type(value) is int and abs(value) < 1 << 63)):
            return Flaw(f"its {what} {short(name)} is {short(value)}, expected a number")
    return None


# -- values --


def flaw(update: Update, schema: Schema) -> str | None:
    """Why an update alone cannot be used, or None."""
    return flaws([update], schema)[0]


def flaws(
    updates: Sequence[Update],
    schema: Schema,
    stacks: Stacks | None = None,
    *,
    measures: Collection[str] | None = None,
    allowed: Mapping[int, Allowed] | None = None,
    server: Tree | Sequence[Tree] | None = None,
) -> list[str | None]:
    """Why each update cannot be used, or None; one question to the device for all, where all is well.

    `allowed` and the `server`'s tree bound what counters may say; of updates that began at different ones there is one
    for each. `stacks` are those of the updates, where somebody made them before.
    """
    caps, expected = allowed or {}, Sent.by(schema)
    found = [flaw_of_form(update, expected, measures, caps.get(update.client)) for update in updates]
    sound = [update for update, why in zip(updates, found, strict=True) if why is None]
    steps = [caps[update.client].steps if server is not None and update.client in caps else None for update in sound]
    same = stacks if stacks is not None and len(sound) == len(updates) else Stacks([each.shared for each in sound])
    bases = [server or {}] * len(updates) if server is None or isinstance(server, Mapping) else server
    starts = [base for base, why in zip(bases, found, strict=True) if why is None]
    ills = _ailments(same, expected.shared, starts, steps)
    if expected.reported:
        reported = _ailments(Stacks([update.reported for update in sound]), expected.reported)
        ills = [why or each for why, each in zip(ills, reported, strict=True)]
    rest = iter([why or ailment_of_report(update.report) for update, why in zip(sound, ills, strict=True)])
    return [None if why is None else str(why) for why in (each or next(rest) for each in found)]


def flaws_of_kept(
    trees: Sequence[Tree], schema: Schema, before: Sequence[Tree], steps: Sequence[int]
) -> list[str | None]:
    """Why clients cannot keep what they would, or None, given what they started from and how many steps they took."""
    entries = {key: schema[key][0] for key in keys_with(schema, *OWN)}
    found = [flaw_of_tree(tree, entries) for tree in trees]
    if not any(found) and entries:
        found = _ailments(Stacks(trees), entries, before, steps)
    return [f"'{why.entry}' (local) {why.why}" if why else None for why in found]


def cannot_be_negative(entry: Entry) -> bool:
    """Whether an entry is a variance, a standard deviation or a counter."""
    spreads = entry.kind is Kind.STATISTIC and entry.part.endswith(("_var", "_std", "_count"))
    return spreads or entry.kind is Kind.COUNTER


def _ailments(
    stacks: Stacks,
    entries: Mapping[str, Entry],
    before: Sequence[Tree] | None = None,
    steps: Sequence[int | None] | None = None,
) -> list[Flaw | None]:
    """What is wrong with the values of trees whose form is right."""
    trees = stacks.trees
    nothing: Tree = {}
    starts = before or [nothing] * len(trees)
    caps = [None if each is None else each * CALLS_A_STEP for each in steps or [None] * len(trees)]
    if not trees or _all_healthy(stacks, entries, starts, caps):
        return [None] * len(trees)
    return [_ailment(tree, entries, start, cap) for tree, start, cap in zip(trees, starts, caps, strict=True)]


def _all_healthy(
    stacks: Stacks, entries: Mapping[str, Entry], starts: Sequence[Tree], caps: Sequence[int | None]
) -> bool:
    """Whether all values surely can be used, by their norms and by the least and the most of those with a bound.

    A number that is not finite makes a norm so. That of good ones may overflow: then each tensor must be asked.
    """
    lengths = [stacks.lengths(keys) for keys in groups(entries) if keys]
    signed = [key for key, entry in entries.items() if cannot_be_negative(entry)]
    counters = [key for key in signed if entries[key].kind is Kind.COUNTER and None not in caps and key in starts[0]]
    asked = {"length": torch.stack(lengths).amax()} if lengths else {}
    if signed:
        asked["least"] = torch.cat([wide(stacks.rows(key)) for key in signed], 1).amin()
    if counters:
        asked["grown"] = torch.cat([wide(stacks.rows(key)) - _started(starts, key) for key in counters], 1).amax()
    if not asked:
        return True
    told = torch.stack([wide(value) for value in asked.values()])
    found = dict(zip(asked, cast(list[float], told.tolist()), strict=True))  # pyright: ignore[reportUnknownMemberType]
    if not all(map(math.isfinite, found.values())) or found.get("least", 0) < 0:
        return False
    return not counters or found["grown"] <= min(cap for cap in caps if cap is not None)


def _started(starts: Sequence[Tree], key: str) -> Tensor:
    """What clients started from, a row each; one row where it is the server's for all."""
    common = all(start is starts[0] for start in starts)
    return wide(Stacks(starts[:1] if common else starts).rows(key))


def _ailment(tree: Tree, entries: Mapping[str, Entry], start: Tree, cap: int | None) -> Flaw | None:
    """The first entry with values that cannot be used, and what they are."""
    for key, entry in entries.items():
        tensor = tree[key]
        if not bool(torch.isfinite(tensor).all()):
            return Flaw("is not finite", key)
        if cannot_be_negative(entry) and not bool((tensor >= 0).all()):
            return Flaw("is negative", key)
        if entry.kind is Kind.COUNTER and cap is not None and key in start and tensor.numel():
            grown = int((wide(tensor) - wide(start[key])).amax())
            if grown > cap:
                return Flaw(f"counts {grown} more than it started with; its steps explain {cap} at most", key)
    return None


def ailment_of_report(report: Report) -> Flaw | None:
    for what, numbers in (("loss", report.losses), ("scalar", report.scalars)):
        for name, value in numbers.items():
            if not math.isfinite(value):
                return Flaw(f"its {what} '{name}' is {value}")
    return None
