"""FedBN by a training script of one's own, in NVFlare's simulator: two sites, ten rounds, less than a minute."""

import json
import os
import sys
import tempfile
from pathlib import Path

from nvflare.recipe.sim_env import SimEnv

from fednorm.nvflare import Recipe

HERE = Path(__file__).parent


def main(method: str = "fedbn", rounds: int = 10) -> None:
    os.chdir(HERE)  # a script that is named by a path from here goes with the job
    recipe = Recipe(
        method=method,
        model="hello_net:Net",
        train_script="hello_train.py",
        num_rounds=rounds,
        min_clients=2,
        num_classes=2,
        every=rounds,
    )
    recipe.add_client_file("hello_net.py")
    recipe.add_server_file("hello_net.py")
    with tempfile.TemporaryDirectory() as workspace:
        run = recipe.execute(SimEnv(num_clients=2, workspace_root=workspace))
        (rows,) = Path(str(run.get_result())).rglob("metrics.jsonl")
        last = [json.loads(line) for line in rows.read_text().splitlines()][-1]
    print(f"{method}: {last['eval']['own_client']['accuracy']:.1f} % right, each site on examples of its own")


if __name__ == "__main__":
    main(*sys.argv[1:2])
