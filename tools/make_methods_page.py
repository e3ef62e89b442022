"""Write docs/methods.md from the registry; with `--check`, only say whether it is up to date.

python tools/make_methods_page.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fednorm.core.newcomer import AsGiven
from fednorm.core.state import Kind
from fednorm.methods import known_methods, parse
from fednorm.views.describe_method import ABSENT, REFERENCE, describe_method
from fednorm.views.describe_piece import describe_piece

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, READINGS = DOCS / "methods.md", DOCS / "readings.md"

CHOICES = (
    ("Labels differ between clients, one common model is wanted", "fixbn", "BatchNorm's gain early, no mismatch late"),
    ("... and clients keep state, or the payload may double", "fixbn+local-momentum", "or `fixbn+global-momentum`"),
    ("Images look different from client to client, each client tests its own model", "fedbn", "norms stay at home"),
    ("... and new clients will come", "silobn+adabn", "a newcomer needs unlabelled data only"),
    ("Statistics of the data must not leave a client", "silobn", "or a norm without statistics, such as `gn`"),
    ("Clients keep no state between rounds", "fixbn", "also `gn`, `ln`, `fedwon`, which have no statistics at all"),
    ("Batches of one or two examples", "fedwon", "or `gn`: neither looks at the batch"),
    ("A network that costs nothing extra at inference", "fedwon", "its convolutions fold; so does BatchNorm"),
    ("Training is over and the global model disappoints", "fedavg+posthoc", "new statistics, same weights"),
    ("Clients' losses differ widely", "fedbs", "clients with a large loss count more at first"),
    ("Exactly what centralized BatchNorm would do, at any price", "fedtan", "with one local step; many exchanges"),
    ("A floor and a ceiling for the comparison", "standalone", "and `centralized`"),
)

INTRODUCTION = """\
# Methods

<!-- Written by tools/make_methods_page.py: change the registry or docs/readings.md and run it again. -->

`fednorm methods` lists them, `fednorm methods EXPR` says all there is to say of one, and
`fednorm inspect MODEL --method EXPR` shows what it does with every tensor.
[Add your own](adding_a_method.md) in one file."""

COSTS = """\
Bytes are what one client sends in a round, counted on `{model}` with SGD momentum, relative to the {fedavg:,} bytes of
`fedavg`. `100.0 % → 99.5 %`: the second stage sends less. `1 + 1` exchanges: one a round, one after training
or before every test."""

COMBINE = """\
Join parts with `+`: `fedwon+fedprox`, `fixbn+global-momentum`, `fedbs+gn`, `fedbn+fedadam`. A part that finds nothing
to act on is refused, and so are two parts that decide the same thing:"""

OVERVIEW = ("method", "what it does", "stays on the client", "needs", "bytes up", "exchanges", "source")

KINDS = """\
Every tensor has a kind, decided by the type of the layer that owns it: `weight` (all that is trained outside norms),
`affine` (gamma and beta of norms), `statistic` (running mean and variance), `counter` (batches seen), `optimizer`
(momentum buffers), `extra` (what a method adds). A policy says what happens to it between two rounds:

| policy | goes up | is merged | comes down | kept by |
|---|---|---|---|---|
| shared | yes | yes | yes | server |
| local | no | no | no | client |
| frozen | no | no | yes | server, as it is |
| fresh | no | no | no | nobody: starts anew every round |
| dropped | no | no | no | nobody: not used in training |
| absent | | | | the model has none after the method's surgery |

The affine of norms without batch statistics (GN, LN, IN) is treated as a weight. With every update a client also
reports its number of examples and its mean training loss."""


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def in_time(values: Iterable[str]) -> str:
    """Values of the stages, once where they agree."""
    return " → ".join(dict.fromkeys(values))


def overview(facts: dict[str, Any]) -> list[str]:
    stages = facts["stages"]
    later = [facts[name]["exchanges"] for name in ("finish", "query") if facts[name]]
    exchanges = " + ".join([in_time(str(stage["exchanges"]) for stage in stages), *map(str, later)])
    return [
        f"[`{facts['name']}`](#{facts['name']})",
        facts["summary"] + (" (**reconstruction**)" if facts["reconstruction"] else ""),
        ", ".join(facts["local"] if facts["data"] == "each" else []) or "-",
        ", ".join(facts["needs"]).replace("_", " ") or "-",
        in_time(f"{stage['percent_up']:.1f} %" for stage in stages),
        exchanges,
        facts["paper"],
    ]


def phase_rows(facts: dict[str, Any]) -> list[list[str]]:
    """A line for each exchange of each stage, with the policies of all kinds."""
    stages = [(f"stage {n}" if len(facts["stages"]) > 1 else "", s) for n, s in enumerate(facts["stages"], 1)]
    later = (("finish", "after training"), ("query", "before every test"))
    stages += [(when, facts[name]) for name, when in later if facts[name]]
    return [
        [
            ", ".join(filter(None, (stage, phase["name"]))),
            *(phase["policy"][kind].replace(ABSENT, "-") for kind in Kind),
            one_or_each(phase["weights"]),
            one_or_each(phase["merge"]),
        ]
        for stage, exchange in stages
        for phase in exchange["phases"]
    ]


def one_or_each(rules: dict[str, str]) -> str:
    """A rule that all kinds share, or the rule of each; counters always merge by maximum, whatever the weights."""
    rules = {kind: rule for kind, rule in rules.items() if kind != Kind.COUNTER}
    if len(set(rules.values())) <= 1:
        return next(iter(rules.values()), "-")
    kinds = {rule: ", ".join(kind for kind, each in rules.items() if each == rule) for rule in rules.values()}
    return "; ".join(f"{some}: {rule}" for rule, some in kinds.items())


def remarks(facts: dict[str, Any]) -> list[str]:
    """What a method does beside its policies."""
    phases = [phase for stage in facts["stages"] for phase in stage["phases"]]
    held = in_time(" and ".join(phase["held"]) for phase in phases if phase["held"])
    measures = sorted({name for phase in phases for name in phase["measures"]})
    lockstep = max(phase["lockstep"] for phase in phases)
    numbers = {name: value for phase in phases for name, value in phase["numbers"].items()}

    def listed(what: str) -> str:
        return ", ".join(dict.fromkeys(piece for phase in phases for piece in phase[what]))

    found = [
        facts["data"] == "union" and "One model trains on everybody's data; nothing is sent.",
        facts["surgery"] and f"Surgery: {', then '.join(facts['surgery'])}.",
        len(facts["stages"]) > 1 and f"Goes from one stage to the next: {facts['switch']}.",
        listed("losses") and f"Added to the loss: {listed('losses')}.",
        listed("grads") and f"Gradients: {listed('grads')}.",
        listed("lr_factors") and f"Learning rates: {listed('lr_factors')}.",
        numbers and f"Numbers: {', '.join(f'`{name}` {value}' for name, value in numbers.items())}.",
        held and f"Held in local training: {held}.",
        measures and f"Clients also report: {', '.join(measures)}.",
        lockstep and f"The cohort takes {lockstep} step together, exchanging batch statistics and their gradients.",
        facts["newcomers"] != describe_piece(AsGiven())
        and f"Statistics of a client that never trained: {facts['newcomers']}.",
        *(f"On {REFERENCE}: {note}." for note in facts["notes"]),
    ]
    return [f"- {line}" for line in found if line]


def section(facts: dict[str, Any]) -> str:
    """All about one method."""
    head = f"### {facts['name']}\n\n{capital(facts['summary'])}. Source: {facts['paper']}."
    if facts["reconstruction"]:
        head += " **A reconstruction**: the source is not complete enough to claim more."
    parts = [head, table(["exchange", *(kind.value for kind in Kind), "client weights", "merge"], phase_rows(facts))]
    if remarks(facts):
        parts.append("\n".join(remarks(facts)))
    if facts["options"]:
        rows = [[f"`{name}`", shown(each["default"]), each["takes"]] for name, each in facts["options"].items()]
        parts.append(table(["option", "default", "takes"], rows))
    return "\n\n".join(parts)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def shown(default: Any) -> str:
    """A default as it is written in an expression."""
    if default is None:
        return "-"
    return str(default).lower() if isinstance(default, bool) else str(default)


def claims_table() -> str:
    """Which methods decide the same thing, so that at most one of them fits into an expression."""
    holders: dict[str, list[str]] = {}
    for name in known_methods():
        for claim in sorted(parse(name).parts[0].claims):
            holders.setdefault(claim, []).append(f"`{name}`")
    rows = [
        [claim.replace(":", " of "), ", ".join(names)] for claim, names in sorted(holders.items()) if len(names) > 1
    ]
    return table(["decides", "methods"], rows)


def page() -> str:
    """The whole page."""
    methods = [describe_method(name) for name in known_methods()]
    fedavg = next(facts for facts in methods if facts["name"] == "fedavg")["stages"][0]["bytes_up"]
    choices = [[situation, f"`{parse(expression).name}`", why] for situation, expression, why in CHOICES]
    readings = READINGS.read_text(encoding="utf-8").replace("\n## ", "\n### ").replace("# ", "## ", 1)
    blocks = [
        INTRODUCTION,
        "## Choose a method",
        table(["situation", "start with", "why"], choices),
        "## All methods",
        COSTS.format(model=REFERENCE, fedavg=fedavg),
        table(OVERVIEW, map(overview, methods)),
        "## Combine",
        COMBINE,
        claims_table(),
        "## State by method",
        KINDS,
        *map(section, methods),
        readings.strip(),
    ]
    return "\n\n".join(blocks) + "\n"


def main(arguments: list[str]) -> int:
    made = page()
    if arguments == ["--check"]:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if current != made:
            print("docs/methods.md is out of date; run python tools/make_methods_page.py", file=sys.stderr)
        return int(current != made)
    if arguments:
        print("usage: python tools/make_methods_page.py [--check]", file=sys.stderr)
        return 2
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
