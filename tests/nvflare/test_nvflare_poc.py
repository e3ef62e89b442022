"""A proof of concept with mTLS on loopback: jobs that complete, and what is left of a run that was killed."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from fednorm.core.state import digest
from fednorm.engines.machine import threads
from fednorm.halves.wire_files import load
from fednorm.running.config import updated
from fednorm.running.given import Objects
from fednorm.running.run import Run
from fednorm.running.store import Store

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "nvflare"
sys.path.insert(0, str(EXAMPLES))
from poc import JOB, SITES, Poc, running  # noqa: E402 (an example, no module of ours)
from submit import recipe  # noqa: E402

pytestmark = [pytest.mark.nvflare, pytest.mark.timeout(2400)]
ROUNDS = 4
SILENCE = 40
"""Seconds; a job says every ten that it lives, and on a busy machine some later."""
FAILED = {"FINISHED:EXECUTION_EXCEPTION", "FINISHED:ABNORMAL"}
"""What NVFlare calls a job that failed and said why: the second where the word of the server's job that it failed came
too late, or not at all. All that NVFlare knows then is that a site of the job is gone, for it a broken machine."""


@pytest.fixture(scope="module")
def poc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Poc]:
    """A proof of concept of which one site has a policy of its own: the one that our page shows."""
    found = Poc(tmp_path_factory.mktemp("poc"))
    found.prepare()
    (policy,) = re.findall(r"```json\n(.*?)```", (HERE.parents[1] / "docs" / "nvflare.md").read_text(), re.DOTALL)
    (found.kits / "site-2" / "local" / "privacy.json").write_text(policy)
    with running(found):
        yield found


def filtered(poc: Poc, site: str, job: str) -> int:
    """How often a site's audit of a job says that the sharing filter was applied."""
    return (poc.kits / site / job / "audit.log").read_text().count("applied filter: SharingFilter")


def submitted(poc: Poc, run_id: str) -> subprocess.Popen[str]:
    """A job on its way, from a process of its own: NVFlare's session leaves threads behind."""
    env = {**poc.env, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *filter(None, sys.path)])}
    command = [sys.executable, str(HERE / "submit.py"), str(poc.folder), run_id, str(ROUNDS), str(SILENCE)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def ended(job: subprocess.Popen[str]) -> tuple[str, Path]:
    """The status that a job ended with, and the folder of its run."""
    lines = job.communicate(timeout=2 * JOB)[0].splitlines()
    status, result = json.loads(lines[-1])
    return status, Path(result)


def left(poc: Poc, run_id: str, result: Path) -> dict[str, Any]:
    """Digests of the global model and of what each site keeps after the last round, and how far it came."""
    found: dict[str, Any] = {"server": digest(safetensors.torch.load((result / "model.safetensors").read_bytes()))}
    for site in SITES:
        (state,) = (poc.kits / site / "fednorm_state" / run_id).glob("site-*")
        header, trees = load(state)
        found[site] = digest(trees["accepted"]), header["steps"]
    return found


def undisturbed() -> dict[str, Any]:
    """The same of a run that nobody disturbs, in our own engine."""
    config = updated(recipe("whole", ROUNDS).setup.config, {"engine.name": "sequential"})
    with threads(1), closing(Store()) as store, closing(Run(Objects().trusting(config).plan(config), store)) as run:
        for _ in run.rounds():
            pass
        found: dict[str, Any] = {"server": digest(store.tree("model"))}
        for client, site in enumerate(SITES):
            found[site] = digest(store.get(client).tree), store.get(client).steps
    return found


def test_the_example_completes() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLES / "poc.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("FINISHED:COMPLETED: 3 rounds, last training loss ")


def answer_to(poc: Poc, context: ssl.SSLContext) -> bytes:
    """What the server's one port answers to a request; nothing where it hangs up."""
    try:
        with (
            socket.create_connection(("localhost", poc.port), timeout=120) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            secured.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return secured.recv(100)
    except (ssl.SSLError, ConnectionError):
        return b""


def test_the_server_hears_only_who_has_a_certificate(poc: Poc) -> None:
    startup = poc.kits / "site-1" / "startup"
    context = ssl.create_default_context(cafile=startup / "rootCA.pem")
    context.check_hostname = False
    assert answer_to(poc, context) == b""
    context.load_cert_chain(startup / "client.crt", startup / "client.key")
    assert answer_to(poc, context).startswith(b"HTTP/1.1 ")


def test_a_killed_run_goes_on_to_the_same_bits(poc: Poc) -> None:
    """A site's job, then the server, then a whole site are killed in mid-round; the run is submitted again each time.

    NVFlare 2.9 brings back no job that it lost. What is lost is the work of that round.
    """
    assert poc.listens_on() == {"127.0.0.1"}

    def cut(after: int) -> subprocess.Popen[str]:
        """The run, submitted again, in the middle of the round after this one."""
        mark = f"round {after} of {ROUNDS}: "
        seen = poc.count("server", mark)
        job = submitted(poc, "cut")
        poc.wait_for("server", mark, times=seen + 1)
        time.sleep(0.5)  # nothing hangs on it: the sites are at work by then, or will soon be
        return job

    job = cut(after=1)
    poc.kill("site-1", "worker_process")
    assert ended(job)[0] in FAILED

    job = cut(after=2)
    assert poc.said("server", f"run 'cut' goes on after round 1 of {ROUNDS}")
    over = {site: poc.count(site, "Client worker process is terminated") for site in SITES}
    poc.kill("server")
    job.kill()  # who waits for a server's word waits for ever
    job.communicate()
    poc.start("server")
    for site in SITES:
        poc.wait_for(site, "Client worker process is terminated", times=over[site] + 1)

    job = cut(after=3)
    assert poc.said("server", f"run 'cut' goes on after round 2 of {ROUNDS}")
    registered = poc.count("site-2", "Successfully registered client")
    poc.kill("site-2", "client_train")  # first, so that nobody is left to report the other
    poc.kill("site-2")
    poc.start("site-2")
    poc.wait_for("site-2", "Successfully registered client", times=registered + 1)
    assert ended(job)[0] in FAILED
    gone = f"it was not heard of for {SILENCE} seconds; its job there is gone"
    assert poc.said("server", f"site 'site-2', round 4: {gone}")

    status, again = ended(submitted(poc, "cut"))
    assert status == "FINISHED:COMPLETED"
    assert poc.said("server", f"run 'cut' goes on after round 3 of {ROUNDS}")
    assert left(poc, "cut", again) == undisturbed()
    passes = [filtered(poc, site, again.parents[1].name) for site in SITES]
    assert passes[1] == 2 * passes[0] > 0  # one site has a policy of its own beside the job's


def test_a_class_that_is_not_permitted_is_named(poc: Poc) -> None:
    """Without the entry in a site's list NVFlare refuses to build our components, and says which."""
    resources = poc.kits / "site-1" / "local" / "resources.json"
    text = resources.read_text()
    resources.write_text(text.replace('"fednorm.nvflare."', '"fednorm.other."'))
    try:
        status, _ = ended(submitted(poc, "unlisted"))
    finally:
        resources.write_text(text)
    assert status != "FINISHED:COMPLETED"
    assert poc.said("site-1", "Component 'fednorm.nvflare.client.NormExecutor'")
    assert poc.said("site-1", "is not in allow_list")
