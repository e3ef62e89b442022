"""What pytest may not import here: the kernels need Triton, which comes with GPU builds of torch."""

from importlib.util import find_spec

collect_ignore_glob = (
    [] if find_spec("triton") else ["src/fednorm/engines/kernels/conv.py", "src/fednorm/engines/kernels/norm.py"]
)
