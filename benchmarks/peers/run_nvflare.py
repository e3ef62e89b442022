"""NVFlare's simulator: a process for each of the ten sites, which ask for tasks every 50 ms.

With fewer processes than sites it starts a new one for every task, which takes seconds.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from nvflare_net import Net
from workload import CLIENTS, Clock, arguments, tell

if __name__ == "__main__":
    given = arguments()
    here = Path(__file__).parent
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(here)}
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        moments = Path(folder) / "moments"
        recipe = FedAvgRecipe(
            name="bench",
            model=Net(),
            min_clients=CLIENTS,
            num_rounds=given.rounds + 1,
            train_script=str(here / "nvflare_client.py"),
            train_args=f"--steps {given.steps} --moments {moments}",
        )
        recipe.add_server_config({"server": {"task_request_interval": 0.05}})
        with contextlib.redirect_stdout(sys.stderr):
            recipe.execute(SimEnv(num_clients=CLIENTS, num_threads=CLIENTS, workspace_root=folder))
        clock.moments = [float(line) for line in moments.read_text().splitlines()]
    tell("nvflare", "nvflare", f"{CLIENTS} processes", clock)
