"""`fednorm doctor`."""

from __future__ import annotations

from fednorm.cli.flags import Json
from fednorm.cli.output import echo, print_json, say, size_text


def doctor(json: Json = False) -> None:
    """Look at this machine: versions, accelerators, extras, data, speed."""
    from fednorm.views.doctor import examine, missing_line

    found = examine()
    if json:
        print_json(found)
        return
    say(f"fednorm {found['fednorm']}, python {found['python']}, torch {found['torch']}, {found['platform']}")
    say(f"cores: {found['cores']}, free disk: {size_text(found['free_disk_bytes'])}")
    cuda = f"{found['cuda']}, bf16 {'yes' if found['bf16'] else 'no'}" if found["cuda"] else "no"
    say(f"cuda: {cuda}; mps: {'yes' if found['mps'] else 'no'}")
    say(f"torchvision: {found['torchvision']}")
    for extra, packages in found["extras"].items():
        listed = ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())
        line = missing_line(extra, packages)
        say(f"extra {extra}: {listed}")
        if line:
            echo(f"  get it with: {line}")
    say(f"data folder (FEDNORM_DATA): {found['data_folder'] or 'not set'}")
    say(f"data sets here: {', '.join(found['datasets'])}")
    say(f"one round (5 clients, 10 steps of 20 images, small_resnet): {found['seconds_per_round']:.2f} s")
