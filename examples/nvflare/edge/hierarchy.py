"""FedBN on a provisioned hierarchy: server, relay, two leaves with simulated devices, and one device of its own.

    python hierarchy.py WORK > hierarchy.log

Everything runs inside a network namespace of its own, in which there is nothing but loopback: NVFlare's leaves and
routing proxy listen on all addresses. That needs root, or user namespaces. The device is a process that knows NVFlare
only by HTTP: `python -m fednorm.nvflare.edge.device`. It is killed after its first job, and goes on from its file.
"""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SITES = ("server", "R1", "C1", "C11", "C12")
LEAVES = ("C11", "C12")
PROXY, JOB, DEVICE = 9100, "fednorm-edge", "phone#6"
INSIDE = "--inside"


def enter_namespace():
    """Start this program again where there is no network but loopback."""
    command = " ".join(["ip link set lo up &&", "exec", sys.executable, *sys.argv, INSIDE])
    root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    os.execvp("unshare", ["unshare", *root, "--net", "sh", "-c", command])  # noqa: S606, S607


def start(command, log, cwd):
    return subprocess.Popen(  # noqa: S603
        command, cwd=cwd, stdout=log.open("ab"), stderr=subprocess.STDOUT, start_new_session=True
    )


def said(path, pattern):
    """Lines of a log that match, without time and place."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    found = [re.search(pattern, line) for line in lines]
    return [each.group(0) for each in found if each]


def silence():
    """NVFlare's client of the server prints what it does."""
    return contextlib.redirect_stdout(io.StringIO())


def wait_for(path, pattern, seconds=180):
    until = time.monotonic() + seconds
    while not said(path, pattern):
        if time.monotonic() > until:
            raise TimeoutError(f"{path.name} does not say '{pattern}'")
        time.sleep(0.5)


def main(work):
    from nvflare.recipe.prod_env import ProdEnv

    from fednorm.halves.wire_files import load_mine
    from fednorm.nvflare import EdgeRecipe
    from fednorm.nvflare.edge.recipe import EDGE
    from fednorm.nvflare.permission import permit_in

    work.mkdir(parents=True)
    begun, running = time.monotonic(), []

    def tell(text):
        print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)

    os.environ["HOME"] = str(work)  # NVFlare writes into the user's
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["nvflare", "provision", "-p", str(HERE / "project.yml"), "-w", str(work)]
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603
    kits = work / "fednorm_edge" / "prod_00"
    for site in SITES:  # what every site must permit once: class_allow_list in its local/resources.json
        permit_in(kits / site, EDGE)
    tell(f"provisioned: {', '.join(SITES)}")
    try:
        for site in SITES:
            running.append(start([str(kits / site / "startup" / "sub_start.sh")], work / f"{site}.log", kits / site))
        leaves = {leaf: {"host": "localhost", "port": 9000 + int(leaf[1:])} for leaf in LEAVES}
        (work / "leaves.json").write_text(json.dumps(leaves))
        proxy = ["nvflare.edge.web.routing_proxy", str(PROXY), "leaves.json", str(kits / "C11/startup/rootCA.pem")]
        running.append(start([sys.executable, "-m", *proxy], work / "proxy.log", work))
        for site in ("C1", *LEAVES):
            wait_for(work / f"{site}.log", "Successfully registered client")
        tell("all sites are registered, the routing proxy listens on loopback")
        recipe = EdgeRecipe(
            method="fedbuff(b=3)+fedbn",
            model="fedbs_mnist_cnn",
            num_versions=40,
            leaves=LEAVES,
            devices_per_leaf=3,
            real_devices=1,
            name=JOB,
            run_id="first",
            local_steps=4,
            train_limit=1400,
            hello_timeout=240.0,
        )
        recipe.device_file(work / "run.json")
        admin = ProdEnv(startup_kit_location=str(kits / "admin@example.com"), username="admin@example.com")
        with silence():
            run = recipe.execute(admin)
        tell("the job is submitted; 6 devices are simulated below the leaves, one comes over HTTP")
        device = [sys.executable, "-m", "fednorm.nvflare.edge.device", f"http://127.0.0.1:{PROXY}"]
        device += ["--job", JOB, "--id", DEVICE, "--run", str(work / "run.json")]
        phone = work / "phone.log"
        first = start(device, phone, work)
        wait_for(phone, rf"device {DEVICE}, round \d+: .*")
        os.killpg(first.pid, signal.SIGKILL)
        tell(f"device {DEVICE} was killed after its first job, and is started again")
        again = start(device, phone, work)
        with silence():
            result = Path(run.get_result(timeout=300.0)) / "workspace"
            status = run.get_status()
        again.wait(60)
        tell(f"{status}; the device ended with code {again.returncode}")
        print("\nThe server said:")
        for line in said(
            result / "log.txt", r"(run 'first' .*|version \d+ of .*|version \d+ is the last.*|device '.*)"
        ):
            print(f"  {line.replace(str(work), 'WORK')}")
        print("\nThe device of its own said:")
        for line in said(phone, rf"(takes part in job|device {DEVICE}, round .*|the job is over.*)"):
            print(f"  {line}")
        states = {path.name: load_mine(path) for path in work.rglob("fednorm_state/first/site-device-*")}
        print("\nWhat devices keep, each in its own file:")
        for name, mine in sorted(states.items()):
            counted = sorted({int(each) for each in mine.accepted.tree.values() if not each.is_floating_point()})
            print(f"  {name[5:18]}: {len(mine.accepted.tree)} entries, batches counted by its norms: {counted}")
        found = sorted(path.name for path in (result / "fednorm").iterdir())
        print(f"\nThe server's records, as downloaded: {', '.join(found)}\n")
    finally:
        for site in SITES:
            (kits / site / "shutdown.fl").touch()
        for process in reversed(running):
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        tell("all is stopped")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if INSIDE in sys.argv:
        main(Path(sys.argv[1]).resolve())
    else:
        enter_namespace()
