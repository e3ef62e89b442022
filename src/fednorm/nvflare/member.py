"""A site's part in a run, whatever carries its messages: it says hello, answers requests and keeps what is its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from fednorm.halves.messages import Hello, Request, Scores, Update, Welcome
from fednorm.halves.mine import Mine
from fednorm.halves.site import Site
from fednorm.nvflare.keeping import load_own, save_own, site_file, state_root
from fednorm.nvflare.setup import OwnData, Permit, Setup
from fednorm.nvflare.telling import round_line


class Member:
    """A site with data of its own.

    What it keeps is on the disk before its answer goes out, so a process may end after any answer, and another may give
    the next.
    """

    def __init__(
        self,
        setup: Setup,
        name: str,
        workspace: str | Path,
        *,
        permit: Permit | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        setup.load_extensions(permit)
        self.setup, self.name, self.root = setup, name, state_root(setup.state_dir, workspace)
        self.permit = permit
        self.say = say or (lambda line: None)
        self._site: Site | None = None
        self._mine: Mine | None = None
        setup.set_threads()

    @cached_property
    def data(self) -> OwnData:
        return self.setup.own_data(self.name, self.permit)

    def hello(self) -> Hello:
        """How this site introduces itself."""
        return Site.hello(self.name, self.setup.network(self.permit), len(self.data.train[1]))

    def answer(self, welcome: Welcome, request: Request) -> Update | Scores:
        """Do what a request asks for; what this site keeps of it is on the disk when the answer is given."""
        site = self.site(welcome)
        path = site_file(self.root, welcome.terms.run, self.name)
        mine = self._mine if self._mine is not None else load_own(path, welcome.terms)
        answer, self._mine = site.answer(request, mine)
        save_own(path, self._mine, welcome.terms)
        if line := round_line(site.sites, request):
            self.say(line)
        return answer

    def site(self, welcome: Welcome) -> Site:
        """The site at the terms it was welcomed with."""
        if self._site is None or (self._site.terms, self._site.client) != (welcome.terms, welcome.client):
            data = self.data
            self._site, self._mine = (
                Site(
                    welcome.terms,
                    welcome.client,
                    self.setup.network(self.permit),
                    data.train,
                    task=data.task,
                    test=data.test,
                    mean=data.mean,
                    std=data.std,
                    device=self.setup.device,
                    allow_noop=self.setup.config.allow_noop,
                ),
                None,
            )
        return self._site
