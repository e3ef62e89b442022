"""`python -m fednorm` is the command `fednorm`."""

import os
import sys
from pathlib import Path

here = os.getcwd()
if sys.path and sys.path[0] in ("", here) and not sys.flags.safe_path and Path(__file__).parents[1] != Path(here):
    # `python -m` lets every module of the folder one is in go before the installed one of its name. Whoever was sent
    # a folder and looks at it must not run a torchvision.py that lies there; `--use` and `--model` find theirs.
    del sys.path[0]

from fednorm.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
