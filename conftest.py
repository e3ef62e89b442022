"""What pytest may not import: kernels need Triton, which comes with GPU builds of torch; adapters, what they adapt."""

from importlib.util import find_spec
from pathlib import Path

from fednorm.engines.stack import making_ready

_STACK = Path(__file__).parent / "src/fednorm/engines/stack/kernels"
_KERNELS = [str(path) for path in _STACK.glob("*.py") if "\nimport triton\n" in path.read_text()]
collect_ignore_glob = [] if find_spec("triton") else [*_KERNELS, "tests/kernel_checks.py", "tests/kernel_builds.py"]
# A GPU build of torch brings Triton, and not what its interpreter is taught narrow numbers with.
collect_ignore_glob += [] if find_spec("triton") and find_spec("ml_dtypes") else ["tests/narrow_interpreter.py"]
collect_ignore_glob += [] if find_spec("nvflare") else ["src/fednorm/nvflare/*", "src/fednorm/nvflare/**/*"]

# Tests compare what is said word by word, and a busy machine would add how long it took.
making_ready.WORTH_A_LINE = 3600.0
