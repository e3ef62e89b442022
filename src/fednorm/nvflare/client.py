"""A site's executor: it answers every task of the server's with fednorm's own training on the site's own data."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from fednorm.errors import FednormError, WireError
from fednorm.halves.messages import Message, Refusal, Request
from fednorm.nvflare import parts
from fednorm.nvflare.component import member_of
from fednorm.nvflare.member import Member
from fednorm.nvflare.permission import Permission
from fednorm.nvflare.setup import Setup


class NormExecutor(Executor):
    """Carries requests to a `Member` and its answers back; what goes wrong is told to the server in one line."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__()
        self.setup = setup
        self._member: Member | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            parts.carry_tensors()
            with suppress(FednormError):  # what is wrong with them the first answer says
                Setup.from_json(self.setup).load_extensions(Permission(fl_ctx))  # filters may need them before
        super().handle_event(event_type, fl_ctx)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        if task_name not in (parts.HELLO, parts.WORK):
            return make_reply(ReturnCode.TASK_UNKNOWN)
        try:
            answer = self._answer(task_name, shareable, fl_ctx)
        except FednormError as error:
            self.log_error(fl_ctx, str(error))
            answer = Refusal(str(error))
        return parts.to_shareable(answer)

    def _answer(self, task_name: str, shareable: Shareable, fl_ctx: FLContext) -> Message:
        member = self._joined(fl_ctx)
        if task_name == parts.HELLO:
            return member.hello()
        dxo = parts.dxo_of(shareable)
        request = parts.from_dxo(dxo)
        if not isinstance(request, Request):
            raise WireError(f"the server sent a {type(request).__name__.lower()} where a request was expected")
        return member.answer(parts.welcome_in(dxo.meta or {}), request)

    def _joined(self, fl_ctx: FLContext) -> Member:
        if self._member is None:
            self._member = member_of(self, self.setup, fl_ctx)
        return self._member
