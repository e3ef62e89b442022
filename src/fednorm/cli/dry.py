"""`--dry-run`: the resolved config, what would be sent, who has which data, and how long it would take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fednorm.cli.output import echo, print_json, size_text
from fednorm.cli.play import place_of, refuse_watchers
from fednorm.cli.settings import Asked
from fednorm.running.config import updated


def print_preview(asked: Asked, methods: list[str], comparison: bool = False) -> None:
    """Say what would be done; nothing is written."""
    from fednorm.running.comparison import settled
    from fednorm.running.consent import named_code
    from fednorm.running.folder import RunFolder
    from fednorm.running.plan import make_plan
    from fednorm.running.trial import try_out
    from fednorm.views.preview import preview

    # Whatever a run would refuse before it starts is refused here, by the same functions.
    refuse_watchers(asked)
    base = replace(asked.config, seed=asked.seeds[0])
    several = comparison or len(asked.seeds) > 1
    if several:
        base, methods = settled(methods, base, asked.seeds, asked.jobs)
    RunFolder(place_of(asked, methods)).refuse_place()
    code = named_code(base)  # it was typed, or consented to when the file was read
    plans = [make_plan(updated(base, {"method": method}), code=code) for method in methods]
    for plan in plans:
        try_out(plan)
    found = [preview(plan) for plan in plans]
    jobs = asked.jobs if several else 1
    seconds = sum(each["estimate"]["seconds"] for each in found) * len(asked.seeds) / jobs
    if asked.json:
        whole = {"seeds": list(asked.seeds), "estimated_seconds": seconds}
        print_json({"methods": dict(zip(methods, found, strict=True)), **whole})
        return
    _print_config(found[0]["config"], single=len(methods) == 1)
    from fednorm.data.summary import table

    echo(f"\n{table(found[0]['clients'])}\n")
    for line in found[0]["data_notes"]:
        echo(f"data: {line}")
    for method, each in zip(methods, found, strict=True):
        for line in each["bytes_per_client"]:
            # The last exchanges are with all clients, whoever takes part in a round.
            in_round = isinstance(line["stage"], int)
            who = f"each of {each['clients_per_round']} clients" if in_round else "every client"
            echo(
                f"{method}, {line['when']}, {line['phase']}: {who} sends {size_text(line['up'])} and receives "
                f"{size_text(line['down'])}{' a round' if in_round else ''}"
            )
        for note in each["notes"]:
            echo(f"{method}: {note}")
    runs = len(methods) * len(asked.seeds)
    echo(f"estimated time: {duration(seconds)} for {runs} run{'s' if runs > 1 else ''}; nothing was written")


def _print_config(config: dict[str, Any], single: bool) -> None:
    from fednorm.running.recipe import to_toml

    echo(to_toml(config if single else {key: value for key, value in config.items() if key != "method"}))


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(0.4), duration(75), duration(7320)
    ('less than a second', '1 min 15 s', '2 h 2 min')
    """
    whole = round(seconds)
    if whole < 1:
        return "less than a second"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
