"""Filters for messages that come by calls: NVFlare itself applies a site's filters, and a job's, to tasks alone."""

from __future__ import annotations

from nvflare.apis.fl_constant import FilterKey, FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.task_utils import apply_filters, get_filters
from nvflare.private.privacy_manager import Scope

from fednorm.errors import FednormError, WireError, first_line
from fednorm.halves.messages import Hello, Message, Request, Welcome
from fednorm.nvflare.filter import stamped
from fednorm.nvflare.parts import HELLO, WORK, dxo_of, from_dxo, to_shareable


def passed(message: Message, fl_ctx: FLContext, welcome: Welcome | None = None) -> Message:
    """A message behind the filters that it would pass as a task's data or result at this site, as it is without any.

    Values that filters of the site change on the way out, for privacy, are no corruption: they are sealed anew.
    """
    comes_in = isinstance(message, Request)
    name, way = (
        (Scope.TASK_DATA_FILTERS_NAME, FilterKey.IN) if comes_in else (Scope.TASK_RESULT_FILTERS_NAME, FilterKey.OUT)
    )
    task = HELLO if isinstance(message, Hello) else WORK
    of_job = getattr(fl_ctx.get_prop(FLContextKey.RUNNER), name, None) or {}
    if not get_filters(name, fl_ctx, of_job, task, way):
        return message
    try:
        dxo = dxo_of(apply_filters(name, to_shareable(message, welcome), fl_ctx, of_job, task, way))
        return from_dxo(dxo) if comes_in else stamped(dxo)
    except FednormError:
        raise
    except Exception as error:  # a filter is anybody's code, and one that fails lets nothing pass
        raise WireError(f"a filter let nothing {'in' if comes_in else 'out'}: {first_line(error)}") from None
