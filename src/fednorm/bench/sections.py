"""All benchmarks by name, played one after the other into one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fednorm.bench import arrivals, cpu, gpu, long_runs, models
from fednorm.bench.machine import describe_machine
from fednorm.bench.options import Options
from fednorm.bench.report import Progress, Report, Section

MEASURES: dict[str, tuple[Callable[[Options], Section], Callable[[Options, Section, Progress], None]]] = {
    "gpu": (gpu.section, gpu.measure),
    "models": (models.section, models.measure),
    "cpu": (cpu.section, cpu.measure),
    "async": (arrivals.section, arrivals.measure),
}
for _workload in (long_runs.EVERY_STEP, long_runs.PFL):
    MEASURES[_workload.name] = (
        lambda options, workload=_workload: long_runs.section(workload, options),
        lambda options, found, progress, workload=_workload: long_runs.measure(workload, options, found, progress),
    )


def measure_all(options: Options, command: Sequence[str], quiet: bool, out: Path | None) -> Report:
    """Play the sections that were asked for; after an interrupt the report holds what was measured until then."""
    report = Report(describe_machine(options.device, command))
    progress = Progress(quiet, partial(report.write, out) if out else None)
    try:
        for name in options.sections:
            make, measure = MEASURES[name]
            section = make(options)
            report.sections.append(section)
            measure(options, section, progress)
    except KeyboardInterrupt:
        report.interrupted = True
    progress.done()
    if progress.save:
        progress.save()
    return report
