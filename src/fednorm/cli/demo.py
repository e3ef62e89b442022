"""`fednorm demo`."""

from __future__ import annotations

from pathlib import Path

from fednorm.cli.flags import Jobs, Json, Out
from fednorm.cli.output import print_json, print_scores
from fednorm.cli.settings import Asked
from fednorm.errors import ConfigError

NEXT = """next:
  fednorm compare fedavg fedavg+gn fixbn --partition "dir_client(alpha=0.1)" --local-steps 10
  fednorm inspect resnet18 --method fedbn
  fednorm methods"""


def demo(
    out: Out = None,
    jobs: Jobs = 2,
    json: Json = False,
) -> None:
    """See on real images what label skew does to BatchNorm and what repairs it; some minutes on two cores."""
    from fednorm.cli.play import fresh, watch
    from fednorm.running.comparison import usable_jobs
    from fednorm.running.plan import find_device
    from fednorm.views.demo import HEADLINE, METHODS, SEEDS, demo_config, play_demo, what_was_seen

    folder = out or fresh("demo")
    asked = Asked(
        config=demo_config(),
        methods=METHODS,
        seeds=SEEDS,
        out=folder,
        jobs=usable_jobs(jobs),
        dry_run=False,
        json=json,
        quiet=False,
        tensorboard=False,
        code_in_file=False,
    )
    if not json:
        print(f"{HEADLINE} · {find_device('auto').type}")
    result = watch(
        asked, folder, len(METHODS) * len(SEEDS), lambda tell: play_demo(folder, jobs=asked.jobs, on_row=tell)
    )
    seen = what_was_seen(result)
    picture = _draw(result, folder)
    if json:
        print_json({**result.to_json(), "folder": result.folder, "seen": seen, "picture": picture})
        return
    print()
    print_scores(result)
    print(f"\n{seen}")
    print(f"curves: {picture}" if picture else 'no picture of the curves: pip install "fednorm[report]"')
    print(f"folder: {result.folder}\n{NEXT}")


def _draw(result, folder: Path) -> str | None:  # type: ignore[no-untyped-def]
    from fednorm.running.pictures import curves

    title = "Fashion-MNIST subset, 5 clients with 2 classes each, small_resnet"
    try:
        return str(curves(result, folder / "curves.png", title, ("pooled", "own_client")))
    except ConfigError:
        return None  # matplotlib is not there; the caller says how to get it
