"""`fednorm.nvflare.EdgeRecipe`: a method on devices, as a job for NVFlare's simulator or a provisioned hierarchy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nvflare.apis.filter import Filter
from nvflare.edge.tools.edge_job import EdgeJob
from nvflare.edge.widgets.etr import EdgeTaskReceiver
from nvflare.recipe.sim_env import SimEnv
from nvflare.recipe.spec import ExecEnv
from nvflare.recipe.spec import Recipe as FlareRecipe

from fednorm.errors import ConfigError
from fednorm.files import write_json
from fednorm.nvflare.edge.jobs import Pace
from fednorm.nvflare.edge.leaf import DeviceRunner, NormEdgeExecutor
from fednorm.nvflare.edge.processor import NormTaskProcessor, device_name
from fednorm.nvflare.edge.server import NormAssessor, NormModelManager
from fednorm.nvflare.permission import code_paths, permit_in
from fednorm.nvflare.recipe import Recipe, check_name, refuse_few
from fednorm.nvflare.setup import usual_sites
from fednorm.running.config import RunConfig, updated
from fednorm.running.on_clock import names_strategy

EDGE = ("nvflare.edge.",)
"""what a class_allow_list must have beside fednorm itself: NVFlare lists none of its own edge parts"""
INTERVAL = 0.2
"""Seconds between two reports of a node; NVFlare's own are 1."""
JOB_TIMEOUT = 24 * 3600.0
"""Seconds that simulated devices wait for the run to begin; they end with their leaf. After NVFlare's own 60 they would
be gone for good where the server, or a busy machine, takes longer to begin."""
QUORUM, RETRIES = 0.5, 2
"""engine.quorum and engine.retries of a run on devices that does not say"""


class EdgeRecipe(FlareRecipe):
    """A method on devices below NVFlare's leaves, every one with the part of the data that its number says.

    `method` joins a strategy and a method, as in `fedbuff(b=5)+fedbn`; without a strategy devices work in rounds, and
    every method of rounds can be played. `num_versions` versions or rounds are made. `leaves` are the names of the
    leaves, or how many the simulator has; `devices_per_leaf` devices are simulated in each, and `real_devices` more
    come over HTTP, with the numbers behind those. `at_once` devices work at a time, all unless it is given. `settings`
    are any fields of the config, as of `fednorm.run`: `lr=0.1, local_steps=5, seed=3`.

    A job with `run_id` continues the run of that name, on the server and on every device; any other starts clean.
    """

    def __init__(
        self,
        *,
        method: str | None = None,
        model: str | None = None,
        data: str | Mapping[str, Any] | None = None,
        num_versions: int | None = None,
        leaves: int | Sequence[str] = 1,
        devices_per_leaf: int = 10,
        real_devices: int = 0,
        at_once: int | None = None,
        name: str = "fednorm-edge",
        run_id: str | None = None,
        state_dir: str | None = None,
        job_timeout: float = 0.0,
        hello_timeout: float = 0.0,
        processor: type[NormTaskProcessor] = NormTaskProcessor,
        config: RunConfig | None = None,
        **settings: Any,
    ) -> None:
        check_name(name)
        self.leaves = usual_sites(leaves) if isinstance(leaves, int) else tuple(leaves)
        self.devices = len(self.leaves) * devices_per_leaf + real_devices
        if self.devices < 1:
            raise ConfigError(f"{len(self.leaves)} leaves with {devices_per_leaf} devices each are none; give some")
        config = updated(config or RunConfig(), {"data.clients": self.devices})
        if config.engine.quorum is None:  # devices come and go
            config = updated(config, {"engine.quorum": QUORUM, "engine.retries": max(RETRIES, config.engine.retries)})
        if at_once is not None:
            timed = names_strategy(method or config.method) or config.clock.strategy is not None
            config = updated(config, {"clock.concurrency" if timed else "clients_per_round": at_once})
        self.setup = Recipe(
            method=method,
            model=model,
            data=data,
            num_rounds=num_versions,
            sites=[device_name(number) for number in range(self.devices)],
            run_id=run_id,
            state_dir=state_dir,
            config=config,
            **settings,
        ).setup
        self.pace = Pace(devices=self.devices, job_timeout=job_timeout, hello_timeout=hello_timeout)
        run, self._brings = self.setup.to_json(), f"{processor.__module__}.{processor.__qualname__}"
        job = EdgeJob(name=name, edge_method="fednorm", min_clients=1)
        job.set_app_packages(["fednorm"])  # installed at every site: a copy in the job would hide it
        job.to_server(NormModelManager(run, asdict(self.pace)), id="model_manager")
        job.configure_server(NormAssessor("model_manager"), assess_interval=INTERVAL, update_interval=INTERVAL)
        job.to_clients(EdgeTaskReceiver(), id="edge_task_receiver")
        job.to_clients(NormEdgeExecutor(), id="executor", tasks=["train"])
        if devices_per_leaf:
            first = {leaf: index * devices_per_leaf for index, leaf in enumerate(self.leaves)}
            of_leaf = job.to_clients(processor(run, first), id="task_processor")
            runner = DeviceRunner(of_leaf, JOB_TIMEOUT, num_devices=devices_per_leaf, num_workers=1)
            job.to_clients(runner, id="tpo_runner")
        super().__init__(job)

    def add_client_input_filter(self, filter: Filter, *options: Any, **more: Any) -> None:
        """Refused: what devices are sent goes by messages that NVFlare shows to no filter."""
        raise ConfigError(f"{type(filter).__name__} would never be called: NVFlare's filters do not see devices")

    add_client_output_filter = add_client_input_filter

    def device_file(self, path: str | Path) -> Path:
        """Write what a device of its own must know of the run, for `python -m fednorm.nvflare.edge.device --run`."""
        write_json(Path(path), self.setup.to_json())
        return Path(path)

    def simulator(self, **options: Any) -> SimEnv:
        """NVFlare's simulator with a process for every leaf, which the tree needs: leaves speak all the time."""
        return SimEnv(num_clients=len(self.leaves), num_threads=len(self.leaves), **options)

    def process_env(self, env: ExecEnv) -> None:
        """The simulator has sites of its own, which permit what this job names: whoever runs it wrote it."""
        if isinstance(env, SimEnv):
            refuse_few(env, len(self.leaves))
            permit_in(Path(env.workspace_root) / self.name, [*EDGE, self._brings, *code_paths(self.setup.config)])
