"""`fednorm run`."""

from __future__ import annotations

from fednorm.cli.flags import METHOD, takes_request
from fednorm.cli.settings import Request


@takes_request(METHOD)
def run(request: Request) -> None:
    """Play one method; with several seeds, once for each.

    Under torchrun (`torchrun --nproc_per_node=2 -m fednorm run ...`) the clients are split over its processes.
    """
    from fednorm.cli.dry import print_preview
    from fednorm.cli.play import play_comparison, play_run

    if request.dry_run:
        print_preview(request, [request.config.method])
    elif len(request.seeds) > 1:
        play_comparison(request, [request.config.method])
    else:
        play_run(request.with_seed())
