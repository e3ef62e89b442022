"""A round on the CPU: ten clients of a small network, in a plain PyTorch loop, in our engines, and in other simulators.

Engines with several threads or processes suffer most from other work on the machine, so a timing counts only if other
programs took less than 5 % of the cores meanwhile; how many did is part of the result.
"""

from __future__ import annotations

import contextlib
import io
import statistics
from collections.abc import Mapping

import torch

from fednorm.bench.cpu_rounds import (
    BATCH,
    CLIENTS,
    EXAMPLES,
    LR,
    auto_round,
    bare_round,
    federation,
    network,
    our_round,
    overhead_seconds,
    plain_round,
)
from fednorm.bench.options import Options
from fednorm.bench.peers import Peer, find_peers
from fednorm.bench.report import Progress, Section, measured
from fednorm.bench.timing import Play, Race, repeated
from fednorm.engines.workers import usable_cores

CPU = torch.device("cpu")
PLAIN = ("plain, 1 thread", "plain, all threads")
PAIRS = 60
"""Pairs of rounds for each timing of a variant, at one step a round, from which the overhead is taken."""
OURS = "auto"


def section(options: Options) -> Section:
    size = sum(parameter.numel() for parameter in network().parameters())
    settings = {"clients": CLIENTS, "batch": BATCH, "examples a client": EXAMPLES, "lr": LR, "dtype": "float32"}
    return Section("cpu", {**settings, "parameters": size, "cores": usable_cores(), "data": "random"})


def measure(options: Options, found: Section, progress: Progress) -> None:
    """Fill a section, one number of local steps after the other."""
    peers = find_peers(options.peers, progress.line) if options.peers else []
    for steps in options.steps:
        workload = f"{CLIENTS} clients of a small CNN, E={steps}"
        progress.workload(f"cpu: {workload}")
        race = Race()
        try:
            race.run(variants(steps, peers, race), options.effort, progress.now)
        finally:
            found.measurements += measured(workload, "s a round", race.times, race.notes)
            _note_ratios(found, workload, f"E={steps}")
        progress.now("what the framework adds")
        added = overhead_seconds(federation(), steps, max(2, PAIRS * options.effort.turns // steps))
        found.key("overhead_ms", f"E={steps}", round(1e3 * statistics.median(added), 3))


def _note_ratios(found: Section, workload: str, steps: str) -> None:
    median = found.of(workload)
    plain = {name: median[name] for name in PLAIN if name in median}
    if not plain:
        return
    best = min(plain, key=lambda name: plain[name])
    found.references[workload] = best
    if OURS in median:
        found.key("ratio.ours/plain", steps, round(median[OURS] / plain[best], 4))
        peers = {name: value for name, value in median.items() if name.startswith(Peer.PREFIX)}
        if peers:
            fastest = min(peers, key=lambda name: peers[name])
            found.key("ratio.ours/fastest_peer", steps, {fastest: round(median[OURS] / peers[fastest], 4)})


def variants(steps: int, peers: list[Peer], race: Race) -> Mapping[str, Play]:
    """What is timed. `auto` first, which chooses its engine on a machine that does nothing else."""
    data, cores = federation(), usable_cores()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        auto = auto_round(data, steps)
    race.notes[OURS] = said.getvalue().strip().removeprefix("engine: ")
    rounds = {
        PLAIN[0]: plain_round(data, steps, 1),
        PLAIN[1]: plain_round(data, steps, cores),
        "bare steps, 1 thread": bare_round(data, steps),
        "sequential, 1 thread": our_round(data, steps, 1, "sequential"),
        "sequential, all threads": our_round(data, steps, cores, "sequential"),
        "stacked, all threads": our_round(data, steps, cores, "stacked"),
        f"workers, {cores} processes": our_round(data, steps, 1, "workers"),
        OURS: auto,
    }
    plays = {name: repeated(play, CPU) for name, play in rounds.items()}
    return plays | {peer.name: peer.player(steps, cores, race.notes) for peer in peers}
