"""These tests have an environment of their own (`make test-nvflare`); elsewhere they are not even imported."""

from fednorm.errors import is_installed

collect_ignore = ["submit.py", "wrong_script.py"]  # programs, which do something when they are imported
collect_ignore_glob = [] if is_installed("nvflare") else ["*.py"]
