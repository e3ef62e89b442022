"""What pytest may not import here: the kernels need Triton, which comes with GPU builds of torch."""

from importlib.util import find_spec

_NAMES = ("conv", "elements", "group_norm", "images", "norm")
_KERNELS = [f"src/fednorm/engines/stack/kernels/{name}.py" for name in _NAMES]
collect_ignore_glob = [] if find_spec("triton") else [*_KERNELS, "tests/kernel_checks.py"]
