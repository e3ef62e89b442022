"""Where the state of a run lies: one folder a run, in it a file for the server and one for each site.

A run goes by a name. A job that was given `run_id` continues the run of that name, on the server and at every site; any
other begins a run of its own. All files are written whole or not at all, and only their owner may read them.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from dataclasses import asdict, replace
from pathlib import Path

from fednorm.errors import ConfigError
from fednorm.files import disk_errors, refuse_links, safe_name
from fednorm.halves.messages import Terms
from fednorm.halves.mine import Mine
from fednorm.halves.wire_files import load_mine, save_mine

FOLDER = "fednorm_state"
_SIMULATED = "simulate_job"
"""the id of every job in NVFlare's simulator"""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,99}")


def check_run_id(run_id: str | None) -> None:
    """Refuse a name that cannot be that of a folder."""
    if run_id is not None and not _NAME.fullmatch(run_id):
        raise ConfigError(
            f"run_id={run_id!r} cannot name a folder; give letters, digits, '.', '_', '=' and '-', 100 at most"
        )


def run_name(run_id: str | None, job_id: str) -> str:
    """The name of a job's run: its `run_id`, or one that no run had before.

    A job that NVFlare starts again keeps its id, and so its run. Jobs of the simulator all have the same.
    """
    if run_id is not None:
        return run_id
    return f"{job_id}-{uuid.uuid4().hex[:8]}" if is_simulated(job_id) else job_id


def is_simulated(job_id: str) -> bool:
    """Whether a job is one of NVFlare's simulator."""
    return job_id == _SIMULATED


def state_root(state_dir: str | None, workspace: str | Path) -> Path:
    """The folder of all runs' states at a site or a server: below its workspace unless `state_dir` is absolute."""
    return Path(workspace) / (state_dir or FOLDER)


def server_file(root: Path, run: str) -> Path:
    """Where the server's state of a run lies; its folder is made."""
    return _made(root, run) / "server"


def site_file(root: Path, run: str, site: str) -> Path:
    """Where the state of a site in a run lies; its folder is made."""
    # Two names may be one as file names; the digest keeps them apart.
    mark = hashlib.sha256(site.encode()).hexdigest()[:8]
    return _made(root, run) / f"site-{safe_name(site)[:80]}-{mark}"


def _made(root: Path, run: str) -> Path:
    check_run_id(run)
    folder = root / run
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    refuse_links(folder)
    return folder


def lineage(terms: Terms) -> str:
    """A digest of all terms but the number of rounds: a run may be trained on for more of them."""
    fixed = replace(terms, work=replace(terms.work, rounds=0, total_steps=0))
    return hashlib.sha256(json.dumps(asdict(fixed), sort_keys=True).encode()).hexdigest()


def load_own(path: Path, terms: Terms) -> Mine:
    """What a site kept of a run, nothing where it kept nothing; refused where it was kept under other terms."""
    return load_mine(path, terms=lineage(terms))


def save_own(path: Path, mine: Mine, terms: Terms) -> None:
    """Keep what is a site's own, before its answer goes out."""
    save_mine(path, mine, terms=lineage(terms))
