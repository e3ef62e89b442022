"""What a component of a job needs where it runs: the course of its run, the member of its site, a word on failure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

from fednorm.errors import FednormError
from fednorm.nvflare.arrivals import ArrivalCourse
from fednorm.nvflare.course import Course
from fednorm.nvflare.keeping import run_name, server_file, state_root
from fednorm.nvflare.ledger import RESULTS, write_failure
from fednorm.nvflare.member import Member
from fednorm.nvflare.parts import place_of
from fednorm.nvflare.permission import Permission
from fednorm.nvflare.setup import Setup


def course_of(component: FLComponent, setup: Mapping[str, Any], fl_ctx: FLContext) -> Course:
    """The course of a job at its server, which logs as this component."""
    said, place = Setup.from_json(setup), place_of(fl_ctx)
    run, kind = run_name(said.run_id, place.job), ArrivalCourse if said.strategy else Course
    return kind(
        said,
        server_file(state_root(said.state_dir, place.root), run),
        place.run_dir / RESULTS,
        run,
        partial(component.log_info, fl_ctx),
        permit=Permission(fl_ctx),
    )


def member_of(component: FLComponent, setup: Mapping[str, Any], fl_ctx: FLContext) -> Member:
    """The member that a site of a job is, which logs as this component."""
    place, say = place_of(fl_ctx), partial(component.log_info, fl_ctx)
    return Member(Setup.from_json(setup), place.name, place.root, permit=Permission(fl_ctx), say=say)


def fail(component: FLComponent, error: FednormError, fl_ctx: FLContext) -> None:
    """End a job for a reason that its records have, in one line."""
    write_failure(place_of(fl_ctx).run_dir / RESULTS, error)
    component.system_panic(str(error), fl_ctx)
