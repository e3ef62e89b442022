"""FedBN on devices in NVFlare's simulator: server and leaf as processes, six devices, four of them at work at once.

    python simulate.py [WORK]

Two updates make a version, so a device may train on a version that is not the newest any more; rows say how stale each
update was. Norms stay on their device, in a file of its own. Takes about a minute.
"""

import json
import sys
import tempfile
from pathlib import Path

from fednorm.halves.wire_files import load_mine
from fednorm.nvflare import EdgeRecipe


def main(work):
    recipe = EdgeRecipe(
        method="fedbuff(b=2,lr=0.5)+fedbn",
        model="fedbs_mnist_cnn",
        data="fashion_mnist_small",
        num_versions=8,
        leaves=1,
        devices_per_leaf=6,
        at_once=4,
        run_id="example",
        state_dir=str(work / "state"),
        partition="dir_client(alpha=1.0)",
        train_limit=1200,
        local_steps=15,
        lr=0.005,
        **{"eval.every": 8},
    )
    recipe.execute(recipe.simulator(workspace_root=str(work / "simulator")))
    records = work / "simulator" / recipe.name / "server" / "simulate_job" / "fednorm"
    rows = [json.loads(line) for line in (records / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        stale = f"devices {row['cohort']}, staleness {row['staleness']}"
        print(f"version {row['round']}: {stale}, loss {row['train_loss']:.3f}")
    for client, score in rows[-1]["eval"]["own_client"]["per_client"].items():
        state = load_mine(next((work / "state" / "example").glob(f"site-device-{int(client):06}-*"))).accepted
        counted = {int(value) for value in state.tree.values() if not value.is_floating_point()}
        print(f"device {client}: accuracy {score:.1f} on its own test rows, its norms counted {counted} batches")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()).resolve())
