"""All there is to say of a method, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fednorm.cli.output import echo, say, size_text


def print_method(facts: dict[str, Any]) -> None:
    """Print what `describe_method` found: the method, its exchanges one by one, and what each piece does."""
    title = facts["name"] + (" (reconstruction)" if facts["reconstruction"] else "")
    say(f"{title}: {facts['summary']}" if facts["summary"] else title)
    _print_lines(_whole(facts))
    for when, exchanges in _in_time(facts):
        for phase in exchanges["phases"]:
            echo(f"\n{when}, {phase['name']}")
            _print_lines(_phase(phase))
    echo("\npieces")
    _print_lines((piece, about) for piece, about in facts["pieces"].items() if about)


def _print_lines(lines: Iterable[tuple[str, str]]) -> None:
    for name, text in lines:
        if text:
            say(f"  {name}: {text}")


def _whole(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "paper", facts["paper"]
    for part in facts["parts"]:
        options = [f"{name}={option['default']} ({option['takes']})" for name, option in part["options"].items()]
        yield f"options of {part['name']} and their defaults", ", ".join(options)
    yield "decides", ", ".join(claim.replace(":", " of ") for claim in facts["claims"])
    yield "needs", ", ".join(facts["needs"]).replace("_", " ")
    yield "data", "all clients' data as one" if facts["data"] == "union" else "each client has its own"
    yield "surgery", ", then ".join(facts["surgery"])
    yield "stages", f"{len(facts['stages'])}, the second {facts['switch']}" if len(facts["stages"]) > 1 else "one"
    yield "newcomers", facts["newcomers"]


def _in_time(facts: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, stage in enumerate(facts["stages"], 1):
        yield f"stage {number}", stage
    for name, when in (("finish", "after training"), ("query", "before every test")):
        if facts[name]:
            yield when, facts[name]


_WORK = {"local": "the configured steps or epochs", "epoch": "one pass over the data", "batch": "one batch"}


def _phase(phase: dict[str, Any]) -> Iterator[tuple[str, str]]:
    several = bool(phase["then"])
    for number, each in enumerate([phase, *phase["then"]], 1):
        yield from ((f"pass {number}, {name}" if several else name, text) for name, text in _pass(each))
    looks = [] if phase["consumes_batches"] else ["of batches that are not used up"]
    looks += ["over all clients' data as one"] * phase["union"]
    yield "which data", ", ".join(looks)
    yield "in lock-step", f"the first {phase['lockstep']}" if phase["lockstep"] else ""
    yield "reports", _pairs(phase["measures"])
    yield "policies", _by_value(phase["policy"])
    yield "weights", _by_value(phase["weights"])
    yield "merges", _by_value(phase["merge"])
    extras = (f"{name} ({x['policy']}, {x['merge']}, {x['weights']})" for name, x in phase["extras"].items())
    yield "extras", ", ".join(extras)
    sent, received = size_text(phase["bytes_up"]), size_text(phase["bytes_down"])
    yield "cost of a client", f"exchanges {phase['exchanges']}, up {sent}, down {received}"


def _pass(each: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "step", each["step"]
    yield "work", _WORK[each["work"]]
    yield "trains", "" if each["trains"] == "all" else f"the {each['trains']} alone"
    yield "losses", ", ".join(each["losses"])
    yield "gradients", ", then ".join(each["grads"])
    yield "numbers", _pairs(each["numbers"])
    yield "learning rates", ", ".join(each["lr_factors"])
    yield "held", ", ".join(each["held"])
    yield "at its end", ", then ".join(each["closings"])


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _by_value(values: Mapping[str, str]) -> str:
    """Kinds that have the same value together.

    >>> _by_value({"weight": "shared", "affine": "local", "statistic": "local"})
    'shared: weight; local: affine, statistic'
    """
    kinds: dict[str, list[str]] = {}
    for kind, value in values.items():
        kinds.setdefault(value, []).append(kind)
    return "; ".join(f"{value}: {', '.join(some)}" for value, some in kinds.items())
