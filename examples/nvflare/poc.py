"""FedBN on NVFlare's proof of concept: a server and two sites as processes of their own, mTLS, loopback only.

    python examples/nvflare/poc.py          # prepares, starts, submits, fetches the result, stops: about two minutes

`nvflare poc prepare` makes the kits. Before they start, the server is made to listen on loopback only, at a port of its
own, and to keep its jobs in a folder of its own: all that NVFlare prepares on one machine have the same, and take each
other's jobs. Each site's list of classes gets those that a job without code of its own may name, and whoever waits for
an answer waits longer than NVFlare's few seconds, in which a busy machine does not answer.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nvflare.recipe.prod_env import ProdEnv
from nvflare.recipe.session_mgr import SessionManager

from fednorm.nvflare import Recipe

SITES = ("site-1", "site-2")
ANSWER, JOB = 120.0, 600.0
"""Seconds to wait for an answer, and for the end of a job; an idle machine needs one and thirty."""


def processes(wanted: Callable[[list[str]], bool]) -> list[int]:
    """The processes whose command line, word by word, is wanted."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode().split("\0")
        except OSError:  # it has just ended
            continue
        if wanted(words):
            found.append(int(entry.parent.name))
    return found


def listening(pids: list[int]) -> set[str]:
    """The addresses at which processes can be reached."""
    sockets: set[str] = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(handle))
            except OSError:  # it was closed meanwhile
                continue
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for row in (line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]):
            if row[3] == "0A" and f"socket:[{row[9]}]" in sockets:
                number = bytes.fromhex(row[1].partition(":")[0])
                found.add(socket.inet_ntop(socket.AF_INET, number[::-1]) if table == "tcp" else number.hex())
    return found


class PatientEnv(ProdEnv):
    """NVFlare's own, which gives a server five seconds to answer a command and cannot be told otherwise."""

    def _get_session_manager(self) -> SessionManager:
        kit = {"username": self.username, "startup_kit_location": self.startup_kit_location}
        return SessionManager({**kit, "timeout": ANSWER, "command_timeout": ANSWER})


class Poc:
    """The kits of a proof of concept in a folder, and the processes that run them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kits = folder / "poc" / "example_project" / "prod_00"
        self.admin = self.kits / "admin@nvidia.com"
        self.port = 0
        bin_folder = Path(sys.executable).parent  # the kits' scripts call python3
        own = {"HOME": str(folder), "NVFLARE_POC_WORKSPACE": str(folder / "poc"), "OMP_NUM_THREADS": "1"}
        self._started: list[subprocess.Popen[bytes]] = []
        self._place = socket.socket()
        self.env = {**os.environ, **own, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}

    def prepare(self) -> None:
        """Make the kits, for a port that is free."""
        command = [sys.executable, "-m", "nvflare.cli", "poc", "prepare", "-n", str(len(SITES)), "--force"]
        subprocess.run(command, env=self.env, check=True, capture_output=True)  # noqa: S603
        # Bound until the end, so that no other program is given the port, also while the server is started again. It
        # does not listen, and so lets the server have it, which like this says that it would share.
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind(("127.0.0.1", 0))
        self.port = self._place.getsockname()[1]
        for file in self.kits.glob("*/startup/fed_*.json"):
            text = file.read_text().replace("server:8002", "localhost:8002")
            file.write_text(text.replace("8002", str(self.port)))
        admin = self.admin / "startup" / "fed_admin.json"
        said = json.loads(admin.read_text())
        said["admin"] |= {"authenticate_msg_timeout": ANSWER, "file_download_progress_timeout": ANSWER}
        admin.write_text(json.dumps(said, indent=2))
        for kit in ("server", *SITES):
            self.permit(kit, "fednorm.nvflare.")

    def permit(self, kit: str, prefix: str) -> None:
        """Let jobs that bring no code name classes of ours at a site; its owner does that once, by hand."""
        local = self.kits / kit / "local"
        text = (local / "resources.json.default").read_text().replace("/tmp/nvflare", str(self.folder / "kept"))  # noqa: S108
        resources = json.loads(text)
        resources["class_allow_list"].append(prefix)
        for server in resources.get("servers", ()):
            server["admin_timeout"] = ANSWER
        (local / "resources.json").write_text(json.dumps(resources, indent=2))

    def start(self, kit: str) -> None:
        """Start a kit's process, once: NVFlare's own daemon would start it again whenever it ends."""
        command = ["/bin/bash", str(self.kits / kit / "startup" / "sub_start.sh"), "--once"]
        with (self.folder / f"{kit}.out").open("a") as out:
            begun = subprocess.Popen(command, env=self.env, stdout=out, stderr=out, start_new_session=True)  # noqa: S603
        self._started.append(begun)

    def pids(self, kit: str, module: str = "") -> list[int]:
        """The processes of a kit; `module` is the last name of the one they run, such as `worker_process`."""
        place = str(self.kits / kit)
        return processes(lambda words: place in words and any(word.endswith(module) for word in words[:4]))

    def kill(self, kit: str, module: str = "") -> None:
        """End processes of a kit as a power cut would."""
        for pid in self.pids(kit, module):
            os.kill(pid, signal.SIGKILL)

    def count(self, kit: str, words: str) -> int:
        """How often a kit's output has these words."""
        return (self.folder / f"{kit}.out").read_text().count(words)

    def said(self, kit: str, words: str) -> bool:
        return self.count(kit, words) > 0

    def wait_for(self, kit: str, words: str, times: int = 1, seconds: float = JOB) -> None:
        """Wait until a kit's output has these words so often."""
        end = time.monotonic() + seconds
        while self.count(kit, words) < times:
            if time.monotonic() > end:
                raise TimeoutError(f"{kit} did not say {words!r} in {seconds:g} seconds")
            time.sleep(0.2)

    def submit(self, recipe: Recipe) -> tuple[str, Path]:
        """Run a job to its end: its status, and the folder of the run."""
        run = recipe.execute(PatientEnv(startup_kit_location=str(self.admin)))
        folder = run.get_result(timeout=JOB)
        if folder is None:
            raise RuntimeError("the job did not end, or its result did not come; see what NVFlare said")
        return str(run.get_status()), Path(folder) / "workspace" / "fednorm"

    def listens_on(self) -> set[str]:
        """The addresses at which anybody could reach these processes."""
        return listening([pid for kit in ("server", *SITES) for pid in self.pids(kit)])

    def stop(self) -> None:
        for kit in (*SITES, "server"):
            self.kill(kit)
        for process in self._started:
            process.wait()
        self._place.close()


@contextmanager
def running(poc: Poc) -> Iterator[Poc]:
    """A proof of concept whose sites have registered; it is stopped at the end."""
    try:
        for kit in ("server", *SITES):
            poc.start(kit)
        for site in SITES:
            poc.wait_for(site, "Successfully registered client")
        yield poc
    finally:
        poc.stop()


def main() -> None:
    recipe = Recipe(
        method="fedbn",
        model="fedbs_mnist_cnn",
        data={"name": "fashion_mnist_small", "train_limit": 400},
        num_rounds=3,
        min_clients=len(SITES),
        lr=0.02,
    )
    with tempfile.TemporaryDirectory() as folder:
        poc = Poc(Path(folder))
        poc.prepare()
        with running(poc):
            status, result = poc.submit(recipe)
        rows = [json.loads(line) for line in (result / "metrics.jsonl").read_text().splitlines()]
        print(f"{status}: {len(rows)} rounds, last training loss {rows[-1]['train_loss']:.3f}")


if __name__ == "__main__":
    main()
