"""A result of `fednorm bench` as a Markdown table: `python benchmarks/table.py benchmarks/results/cpu.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fednorm.bench.report import number


def table(result: dict[str, Any]) -> str:
    """Variants by workload: median (lowest to highest), and below it the numbers that have a name."""
    lines = []
    for section in result["sections"].values():
        found = section["measurements"]
        workloads = list(dict.fromkeys(each["workload"] for each in found))
        units = {each["workload"]: each["unit"] for each in found}
        lines.append(["", *(f"{workload}, {units[workload]}" for workload in workloads)])
        lines.append(["---"] * (1 + len(workloads)))
        for variant in dict.fromkeys(each["variant"] for each in found):
            own = {each["workload"]: each for each in found if each["variant"] == variant}
            lines.append([variant, *(_cell(own.get(workload)) for workload in workloads)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(each: dict[str, Any] | None) -> str:
    if each is None:
        return "-"
    spread = f" ({number(each['low'])}-{number(each['high'])})" if each["timings"] > 1 else ""
    return number(each["median"]) + spread


def named(result: dict[str, Any]) -> str:
    """The numbers that have a name, such as `ratio.plain/stacked`, one a line."""
    keys = [key for key in result if key.startswith(("ratio.", "overhead"))]
    return "\n".join(f"- `{key}`: {json.dumps(result[key])}" for key in keys)


if __name__ == "__main__":
    stored = json.loads(Path(sys.argv[1]).read_text())
    print(f"{table(stored)}\n\n{named(stored)}")
