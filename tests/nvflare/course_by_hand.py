"""A course and its sites in one process, without anything that carries their messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulated import tiny

from fednorm.errors import WireError
from fednorm.halves.messages import Message
from fednorm.nvflare.course import Course
from fednorm.nvflare.keeping import server_file
from fednorm.nvflare.member import Member
from fednorm.nvflare.recipe import Recipe
from fednorm.nvflare.setup import Setup

SITES = ("site-1", "site-2")
Change = Callable[[str, Message], Message]


def setup_of(**fields: Any) -> Setup:
    return Recipe(config=tiny(**fields)).setup


def unchanged(site: str, message: Message) -> Message:
    return message


class Federation:
    """A course and its sites in one process, each with its own folder; messages go as DXOs."""

    def __init__(self, folder: Path, setup: Setup, run: str = "trial", change: Change = unchanged) -> None:
        self.folder, self.setup, self.run, self.change = folder, setup, run, change
        self.said: list[str] = []
        self.refused: list[str] = []
        self.members = {site: Member(setup, site, folder / site, say=self.said.append) for site in SITES}
        self.course = self.new_course()

    def new_course(self) -> Course:
        state = server_file(self.folder / "server", self.run)
        return Course(self.setup, state, self.folder / "records", self.run, self.said.append)

    def begin(self) -> Course:
        for site, member in self.members.items():
            self.course.greet(site, self.change(site, member.hello()))
        self.course.begin()
        return self.course

    def exchange(self, *sites: str) -> None:
        """One exchange with these sites, in this order."""
        asked = self.course.asked()
        for site in sites or SITES:
            if site in asked:
                welcome, request = asked[site]
                try:
                    self.course.take(site, self.change(site, self.members[site].answer(welcome, request)))
                except WireError as error:
                    self.refused.append(str(error))
        self.course.close()

    def play(self, *sites: str) -> Federation:
        self.begin()
        while not self.course.over:
            self.exchange(*sites)
        self.course.end()
        return self
