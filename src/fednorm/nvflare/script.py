"""An existing training script of NVFlare's Client API becomes a client of any method whose phases train.

    client = fednorm.nvflare.join(model, loader)       # in place of flare.init()
    for job in client:                                 # in place of flare.is_running() and flare.receive()
        with job.training(optimizer) as rules:         # around the loop, in which the loss is rules.loss(...)
            ...
        job.send()                                     # in place of flare.send(...)

`client.model` is the model after the method's surgery. What is loaded (the server's entries and the site's own), the
rules of the phase, what is kept (in two generations, on the disk) and what is sent are the method's; batches and
optimizer are the script's. Phases that take statistics, and tests, are fednorm's own over the loaders; the script never
sees them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import nvflare.client.api as flare
import torch
from nvflare.app_common.abstract.fl_model import FLModel
from torch import Tensor, nn

from fednorm.core import rng
from fednorm.core.phases import Purpose
from fednorm.core.state import digest
from fednorm.core.task import AnyTask
from fednorm.data.batches import num_held
from fednorm.errors import ConfigError, FednormError, WireError
from fednorm.halves.agreed import Agreed
from fednorm.halves.messages import Message, Refusal, Request, Scores, Terms, Update, Welcome
from fednorm.halves.mine import Mine
from fednorm.halves.site import Site
from fednorm.halves.terms import agree
from fednorm.halves.wire import check_request, check_terms, to_parts
from fednorm.nvflare.keeping import load_own, save_own, site_file, state_root
from fednorm.nvflare.parts import HEADER, from_meta, welcome_in
from fednorm.nvflare.script_job import Job, refuse_beyond_scripts, trains
from fednorm.nvflare.telling import round_line
from fednorm.scoring.scores import Examples
from fednorm.scoring.tasks import make_task

log = logging.getLogger("fednorm.script")
Loader = Iterable[Any]
"""Gives batches (x, y) as often as it is asked; a `torch.utils.data.DataLoader`, or a list."""


def join(
    model: nn.Module,
    loader: Loader,
    *,
    test_loader: Loader | None = None,
    num_examples: int | None = None,
    task: AnyTask | None = None,
    state_dir: str | None = None,
) -> Client:
    """Take part in the run of the job that runs this script; returns once the server has named its terms.

    `model` is the model as everybody builds it, before any surgery. The loader is for the number of its examples, where
    `num_examples` does not say it, and for phases that take statistics. `state_dir` is where the site's own state is
    kept, below the site's workspace unless it is absolute.
    """
    flare.init()
    if not log.isEnabledFor(logging.INFO):  # a process of the script's own, whose output NVFlare has in the site's log
        log.setLevel(logging.INFO)
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
    client = Client(model, loader, test_loader, num_examples, task, state_dir)
    client.begin()
    return client


class Client:
    """A script's side of a run: iterate over it for the jobs that are the script's."""

    def __init__(
        self,
        model: nn.Module,
        loader: Loader,
        test_loader: Loader | None = None,
        num_examples: int | None = None,
        task: AnyTask | None = None,
        state_dir: str | None = None,
    ) -> None:
        self.model = model
        self.name = ""
        self._given, self._loader, self._test_loader, self._task = model, loader, test_loader, task
        self._examples = _num_examples(loader) if num_examples is None else num_examples
        self._root = state_root(state_dir, _workspace())
        self._waiting: Request | None = None
        self._terms: Terms | None = None
        self._number = 0
        self._agreed: Agreed | None = None

    def begin(self) -> None:
        """Wait for the first request, of which the terms follow."""
        self._waiting = next(self._requests(), None)

    def __iter__(self) -> Iterator[Job]:
        while True:
            request = self._waiting or next(self._requests(), None)
            self._waiting = None
            if request is None:
                return
            try:
                job = self._opened(request)
            except FednormError as error:
                self._refuse(error)
                continue
            if job is None:
                continue
            yield job
            if not job.sent:
                raise ConfigError(f"the job of round {job.round} was not sent; call job.send() after training")

    def _requests(self) -> Iterator[Request]:
        """What the server asks for; questions who is there are answered at once."""
        while flare.is_running():
            received = flare.receive()
            if received is None:
                return
            self.name = flare.get_site_name()
            meta, params = received.meta or {}, received.params or {}
            if HEADER not in meta:
                _send(Site.hello(self.name, self._given, self._examples))
                continue
            try:
                request = from_meta(meta, params)
                if not isinstance(request, Request):
                    raise WireError(f"the server sent a {type(request).__name__.lower()} where a request was expected")
                self._welcomed(welcome_in(meta))
            except FednormError as error:
                self._refuse(error)
                if self._agreed is None:
                    raise
                continue
            yield request

    def _welcomed(self, welcome: Welcome) -> None:
        """Come to terms: the method's surgery on a copy of the model, which the script trains from then on."""
        if welcome.terms == self._terms:
            return
        if self._agreed is not None:
            raise WireError("the server's terms have changed in mid-run; submit the job again")
        terms = welcome.terms
        agreed = agree(self._given, terms.method, terms.work, weights=terms.weights)
        refuse_beyond_scripts(agreed.method)
        check_terms(terms, agreed.schema_digest)
        if terms.initial != digest(agreed.prepared.initial):
            log.info("what is this site's own begins with the values of its script's model, not with the server's")
        self._terms, self._number, self._agreed = terms, welcome.client, agreed
        self.model = agreed.prepared.model

    def _opened(self, request: Request) -> Job | None:
        """The script's job; None where the request was answered here."""
        terms, agreed = self._settled()
        if request.purpose is Purpose.SCORE and self._test_loader is None:
            _send(Scores(client=self._number, address=request.address, sums={}))
            return None
        mine = load_own(site_file(self._root, terms.run, self.name), terms)
        if request.purpose is not Purpose.SCORE and request.phase not in agreed.method.all_phases:
            raise WireError(f"'{terms.method}' has no phase {request.phase}", client=request.client)
        phase = agreed.phase(request.phase)
        if request.purpose is Purpose.SCORE or not trains(phase.phase):
            self._answer(request, *self._site.answer(request, mine))
            return None
        check_request(request, terms.digest, {key: phase.schema[key][0] for key in phase.sent})
        held = num_held(self._examples, terms.work.val_fraction)
        return Job(
            agreed=agreed,
            request=request,
            mine=mine.as_of(request.accepted),
            num_examples=self._examples - held,
            per_epoch=len(cast(Any, self._loader)) if hasattr(self._loader, "__len__") else None,
            key=rng.key(terms.work.seed, "script", self._number, request.address.number),
            answer=self._answer,
        )

    def _answer(self, request: Request, answer: Update | Scores, mine: Mine) -> None:
        """Keep what is the site's own, then send the rest."""
        terms, agreed = self._settled()
        save_own(site_file(self._root, terms.run, self.name), mine, terms)
        if line := round_line(agreed, request):
            log.info("%s", line)
        _send(answer)

    def _settled(self) -> tuple[Terms, Agreed]:
        if self._terms is None or self._agreed is None:
            raise ConfigError("the server has not named its terms yet; make the client with fednorm.nvflare.join")
        return self._terms, self._agreed

    @cached_property
    def _site(self) -> Site:
        """This site as fednorm's own training has it, for all that is not the script's; its data are read once."""
        terms, agreed = self._settled()
        train = _in_memory(self._loader)
        test = None if self._test_loader is None else _in_memory(self._test_loader)
        task = self._task or make_task(terms.task or "classification", _outputs(agreed.prepared.model, train[0]))
        return Site(terms, self._number, self._given, train, task=task, test=test, any_start=True)

    def _refuse(self, error: FednormError) -> None:
        log.error("%s", error)
        _send(Refusal(str(error)))


def _send(message: Message) -> None:
    header, tree = to_parts(message)
    flare.send(FLModel(params=tree, meta={HEADER: header}))


def _num_examples(loader: Loader) -> int:
    data = getattr(loader, "dataset", None)
    if hasattr(data, "__len__"):
        return len(cast(Any, data))
    return sum(len(y) for _, y in loader)


def _in_memory(loader: Loader) -> Examples:
    pairs = [(x, y) for x, y in loader]
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


@torch.no_grad()
def _outputs(model: nn.Module, x: Tensor) -> int:
    """How many classes, labels or targets a model tells apart."""
    where = next(model.parameters()).device
    return model.eval()(x[:1].to(where)).shape[1]


def _workspace() -> Path:
    """The site's workspace, in whose folder, or below it, NVFlare runs a script."""
    here = Path.cwd()
    return next((each for each in (here, *here.parents) if (each / "startup").is_dir()), here)
