"""`fednorm.nvflare.Recipe`: a method as a job of NVFlare's, for its simulator, a POC or a provisioned federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from nvflare.apis.filter import Filter
from nvflare.client.config import ExchangeFormat, TransferType
from nvflare.fuel.utils.constants import FrameworkType
from nvflare.fuel.utils.validation_utils import check_job_name
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from nvflare.recipe.sim_env import SimEnv
from nvflare.recipe.spec import ExecEnv
from nvflare.recipe.spec import Recipe as FlareRecipe

from fednorm.errors import ConfigError, unknown
from fednorm.nvflare import parts
from fednorm.nvflare.client import NormExecutor
from fednorm.nvflare.filter import SharingFilter
from fednorm.nvflare.keeping import check_run_id
from fednorm.nvflare.permission import code_paths, permit_in
from fednorm.nvflare.script_job import refuse_beyond_scripts
from fednorm.nvflare.server import NormController
from fednorm.nvflare.setup import Setup, usual_sites
from fednorm.running.api import settings_to_fields
from fednorm.running.config import RunConfig, updated
from fednorm.running.extensions import with_extensions
from fednorm.running.on_clock import make_clock, settled
from fednorm.running.own_files import settled_by_files
from fednorm.running.plan import build_federation
from fednorm.running.tasks import settle_task

POLL = 0.05
"""Seconds between two looks of a site for a task; NVFlare's own are 2, which no round could be quicker than."""
Transport = Literal["tasks", "collab"]


class Recipe(FlareRecipe):
    """A method on NVFlare.

    `model` is a name that fednorm builds (`resnet20`), or code: `package.module:Net(width=16)`, a class or a function.
    `data` is the name of a data set or own files (`table:FILE`), a table with the fields of a RUN.toml's `[data]`, or
    code: `package.module:function`, which is called with the site's name and returns (train, test), each (x, y). In
    place of data, `train_script` is a script of the Client API. `settings` are any fields of the config, as of
    `fednorm.run`: `lr=0.1, local_epochs=1, seed=3`.

    A job with `run_id` continues the run of that name, on the server and at every site; any other starts clean.
    `transport` is `tasks`, or `collab` for calls of the Collab API, which strategies such as `fedbuff(b=2)+fedbn` need.
    """

    def __init__(
        self,
        *,
        method: str | None = None,
        model: str | type | Mapping[str, Any] | None = None,
        data: str | Mapping[str, Any] | None = None,
        train_script: str | None = None,
        num_rounds: int | None = None,
        min_clients: int | None = None,
        name: str = "fednorm",
        run_id: str | None = None,
        state_dir: str | None = None,
        sites: Sequence[str] = (),
        wait: float = 0.0,
        shape: Sequence[int] | None = None,
        num_classes: int | None = None,
        train_args: str = "",
        launch_external_process: bool = False,
        server_reads_data: bool = False,
        transport: Transport | None = None,
        config: RunConfig | None = None,
        **settings: Any,
    ) -> None:
        check_run_id(run_id)
        check_name(name)
        if data is not None and train_script is not None:
            raise ConfigError("data and train_script were both given; give one of them")
        fields: dict[str, Any] = settings_to_fields(settings)
        fields |= {"method": method} if method is not None else {}
        fields |= {"model": model_name(model)} if model is not None else {}
        fields |= {"rounds": num_rounds} if num_rounds is not None else {}
        fields |= _data_fields(data, min_clients)
        base = with_extensions(updated(config or RunConfig(), fields))
        base = settled(_absolute(settled_by_files(base, set(fields))))
        if base.data.clients == 1 and (min_clients or 1) > 1:  # every site has files of its own under this name
            base = updated(base, {"data.digest": None})
        setup = Setup(config=base, run_id=run_id, state_dir=state_dir, wait=wait, server_reads_data=server_reads_data)
        self.setup = _shaped(setup, tuple(sites), train_script, shape, num_classes)
        _refuse_ignored(self.setup)
        enough = min_clients or len(self.setup.sites)
        if enough < 1:
            raise ConfigError("how many sites take part is not known; give min_clients")
        self.min_clients = max(enough, len(self.setup.sites))
        job = FedJob(name=name, min_clients=self.min_clients)
        job.set_app_packages(["fednorm"])  # installed at every site: a copy in the job would hide it
        super().__init__(job)
        carrier = _carrier(transport, self.setup, train_script)
        self._by_tasks, self._written = carrier == "tasks", False
        if not self._by_tasks:
            from fednorm.nvflare.collab import add_parts

            add_parts(job, self.setup, self.min_clients)
        else:
            job.to_server(NormController(self.setup.to_json(), self.min_clients))
            job.to_clients(_executor(self.setup, train_script, train_args, launch_external_process), tasks=_TASKS)
        self.add_server_config({"server": {"task_request_interval": POLL}})

    def add_client_input_filter(
        self, filter: Filter, tasks: Sequence[str] | None = None, clients: list[str] | None = None
    ) -> None:
        """Add a filter of what comes to sites; without `tasks` of all that carries entries."""
        for task in self._filtered(tasks):
            super().add_client_input_filter(filter, [task], clients)

    def add_client_output_filter(
        self, filter: Filter, tasks: Sequence[str] | None = None, clients: list[str] | None = None
    ) -> None:
        """Add a filter of what leaves sites; without `tasks` of all that carries entries."""
        for task in self._filtered(tasks):
            super().add_client_output_filter(filter, [task], clients)

    def _filtered(self, tasks: Sequence[str] | None) -> Sequence[str]:
        """The tasks that a filter is for, one by one: NVFlare keeps a chain for each name, and calls none for `*`."""
        if self._written:
            raise ConfigError("the job was written already, with fednorm's filter at the end; add filters before")
        for task in tasks or ():
            if task not in (*_TASKS, "*"):
                raise unknown("task", task, _TASKS)
        if not tasks:
            return [parts.WORK]
        return _TASKS if "*" in tasks else tasks

    def _validate_before_use(self) -> None:
        """The sharing filter is added when the job is written: it stands last, after all filters that users added."""
        if not self._written and self._by_tasks:
            self.add_client_input_filter(SharingFilter.of(self.setup), _TASKS)
            self.add_client_output_filter(SharingFilter.of(self.setup), _TASKS)
        self._written = True

    def process_env(self, env: ExecEnv) -> None:
        """The simulator has sites of its own, which permit what this job names: whoever runs it wrote it."""
        if isinstance(env, SimEnv):
            refuse_few(env, self.min_clients)
            permit_in(Path(env.workspace_root) / self.name, code_paths(self.setup.config))


_TASKS = [parts.HELLO, parts.WORK]


def check_name(name: str) -> None:
    """Refuse a name that NVFlare has for no job."""
    try:
        check_job_name(f"name={name!r}", name)
    except ValueError as error:
        raise ConfigError(f"{error}; give the job another name") from None


def refuse_few(env: SimEnv, wanted: int) -> None:
    """Refuse a simulator in which a run would wait for ever."""
    if env.num_clients < wanted:
        raise ConfigError(
            f"the simulator has num_clients={env.num_clients}, and the run waits for {wanted}; give it as many"
        )


def _carrier(transport: str | None, setup: Setup, script: str | None) -> str:
    """What carries messages: tasks, unless told otherwise or sites come one by one, which needs calls."""
    if transport not in (None, "tasks", "collab"):
        raise unknown("transport", transport, ["tasks", "collab"])
    chosen = transport or ("collab" if setup.strategy else "tasks")
    if setup.strategy and chosen == "tasks":
        raise ConfigError(
            f"'{setup.config.method}' takes updates as they come, and tasks come in rounds; use transport='collab'"
        )
    if script is not None and chosen == "collab":
        raise ConfigError(
            f"train_script={script!r} is a script of the Client API, which calls cannot reach; use transport='tasks', "
            "a method without a strategy, or data= in place of the script"
        )
    return chosen


def model_name(model: str | type | Mapping[str, Any]) -> str:
    """A model as a config names it.

    >>> model_name("resnet20"), model_name({"path": "mine.nets:Net", "args": {"width": 16}})
    ('resnet20', 'mine.nets:Net(width=16)')
    """
    if isinstance(model, str):
        return model
    if isinstance(model, Mapping):
        path, args = str(model.get("path") or model.get("class_path")), model.get("args") or {}
        dotted = path if ":" in path else ":".join(path.rpartition(".")[::2])
        return f"{dotted}({','.join(f'{name}={value}' for name, value in args.items())})" if args else dotted
    module, name = getattr(model, "__module__", "__main__"), getattr(model, "__qualname__", "")
    if module == "__main__" or not name:
        raise ConfigError(
            f"model {type(model).__name__} cannot be named in a job; give a name of fednorm's, or "
            "'package.module:Net(width=16)' of a module that the sites can import"
        )
    return f"{module}:{name}"


def _absolute(config: RunConfig) -> RunConfig:
    """The config with paths that mean the same in every process: each has a folder of its own."""
    paths = {"init": config.init, "data.dir": config.data.dir}
    return updated(config, {name: str(Path(path).absolute()) for name, path in paths.items() if path is not None})


def _data_fields(data: str | Mapping[str, Any] | None, min_clients: int | None) -> dict[str, Any]:
    if data is None:
        return {}
    said: dict[str, Any] = {"name": data} if isinstance(data, str) else dict(data)
    if min_clients is not None:
        said.setdefault("clients", min_clients)
    return {f"data.{name}": value for name, value in said.items()}


def _shaped(
    setup: Setup, sites: tuple[str, ...], script: str | None, shape: Sequence[int] | None, num_classes: int | None
) -> Setup:
    """The setup with what follows from the data, where the job brings them or they can be read here."""
    config = setup.config
    given = {}
    if shape is not None:
        given = {"in_channels": int(shape[0]), "image_size": int(shape[-1]) if len(shape) > 1 else 1}
    if num_classes is not None:
        given["outputs"] = num_classes
    if script is not None:
        refuse_beyond_scripts(setup.method)
    if script is not None or setup.data_code is not None:
        setup.method  # noqa: B018 (refused here, not on a server)
        return replace(setup, sites=sites, task=config.task or setup.task, **given)
    task, federation = settle_task(config.task, build_federation(config), setup.device)
    make_clock(config, setup.strategy, federation)  # refuses what it cannot mean
    known = {
        "outputs": getattr(task, "outputs", None) or federation.num_classes,
        "in_channels": federation.in_channels,
        "image_size": 1 if federation.x.dim() == 2 else int(federation.x.shape[-1]),
        "mean": federation.mean,
        "std": federation.std,
    }
    clients = len(federation.training_clients)
    if sites and len(set(sites)) != clients:
        raise ConfigError(f"sites= names {len(set(sites))} sites, the data are of {clients} clients; name as many")
    found = replace(setup, sites=sites or usual_sites(clients), task=task.name, **{**known, **given})
    found.method  # noqa: B018
    return found


def _refuse_ignored(setup: Setup) -> None:
    """Refuse what only the simulator plays: clients that fail by a draw, virtual time, and probes."""
    world = setup.config.world
    for name in ("dropout", "stragglers"):
        if getattr(world, name):
            raise ConfigError(
                f"world.{name}={getattr(world, name)} is played by fednorm's simulator alone; on NVFlare sites fail by "
                "themselves: set it to 0"
            )
    if setup.config.clock.times != "default":
        raise ConfigError(
            f"clock.times={setup.config.clock.times} is virtual time, which fednorm's simulator alone has; on NVFlare "
            "sites take the time they take: leave it out"
        )
    if setup.config.eval.probes:
        raise ConfigError("eval.probes are recorded by fednorm's simulator alone; leave them out on NVFlare")
    if setup.config.keep == "best" or setup.config.keep_every:
        raise ConfigError("on NVFlare the last model alone is kept; use keep=last and keep_every=0")


def _executor(setup: Setup, script: str | None, args: str, external: bool) -> NormExecutor | ScriptRunner:
    if script is None:
        return NormExecutor(setup.to_json())
    return ScriptRunner(
        script=script,
        script_args=args,
        launch_external_process=external,
        framework=FrameworkType.PYTORCH,
        server_expected_format=ExchangeFormat.PYTORCH,
        params_transfer_type=TransferType.FULL,
    )
