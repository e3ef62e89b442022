"""`fednorm run`."""

from __future__ import annotations

from fednorm.cli.flags import METHOD, shared_flags
from fednorm.cli.settings import Asked


@shared_flags(METHOD)
def run(asked: Asked) -> None:
    """Play one method; with several seeds, once for each.

    Under torchrun (`torchrun --nproc_per_node=2 -m fednorm run ...`) the clients are split over its processes.
    """
    from fednorm.cli.dry import print_preview
    from fednorm.cli.play import play_comparison, play_run

    if asked.dry_run:
        print_preview(asked, [asked.config.method])
    elif len(asked.seeds) > 1:
        play_comparison(asked, [asked.config.method])
    else:
        play_run(asked.with_seed())
