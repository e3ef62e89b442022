"""`fednorm doctor`."""

from __future__ import annotations

from fednorm.cli.flags import Json
from fednorm.cli.output import print_json, size_text


def doctor(json: Json = False) -> None:
    """Look at this machine: versions, accelerators, extras, data, speed."""
    from fednorm.views.doctor import examine, missing_line

    found = examine()
    if json:
        print_json(found)
        return
    print(f"fednorm {found['fednorm']}, python {found['python']}, torch {found['torch']}, {found['platform']}")
    print(f"cores: {found['cores']}, free disk: {size_text(found['free_disk_bytes'])}")
    cuda = f"{found['cuda']}, bf16 {'yes' if found['bf16'] else 'no'}" if found["cuda"] else "no"
    print(f"cuda: {cuda}; mps: {'yes' if found['mps'] else 'no'}")
    print(f"torchvision: {found['torchvision']}")
    for extra, packages in found["extras"].items():
        listed = ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())
        line = missing_line(extra, packages)
        print(f"extra {extra}: {listed}" + (f"; get it with: {line}" if line else ""))
    print(f"data folder (FEDNORM_DATA): {found['data_folder'] or 'not set'}")
    print(f"data sets here: {', '.join(found['datasets'])}")
    print(f"one round (5 clients, 10 steps of 20 images, small_resnet): {found['seconds_per_round']:.2f} s")
