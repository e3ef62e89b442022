"""What pytest may not import: kernels need Triton, which comes with GPU builds of torch; adapters, what they adapt."""

from importlib.util import find_spec

_NAMES = ("conv", "elements", "group_norm", "images", "norm")
_KERNELS = [f"src/fednorm/engines/stack/kernels/{name}.py" for name in _NAMES]
collect_ignore_glob = [] if find_spec("triton") else [*_KERNELS, "tests/kernel_checks.py"]
collect_ignore_glob += [] if find_spec("nvflare") else ["src/fednorm/nvflare/*", "src/fednorm/nvflare/**/*"]
