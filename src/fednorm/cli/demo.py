"""`fednorm demo`."""

from __future__ import annotations

from fednorm.cli.flags import Jobs, Json, Out
from fednorm.cli.output import echo, say
from fednorm.cli.settings import Asked

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
    from fednorm.cli.play import all_folders, finish, fresh, watch
    from fednorm.running.comparison import usable_jobs
    from fednorm.running.plan import find_device
    from fednorm.views.demo import HEADLINE, METHODS, SEEDS, demo_config, play_demo

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
        say(f"{HEADLINE} · {find_device('auto').type}")
    folders = all_folders(METHODS, SEEDS, folder)
    finish(asked, watch(asked, folder, folders, lambda tell: play_demo(folder, jobs=asked.jobs, on_row=tell)))
    if not json:
        echo(NEXT)
