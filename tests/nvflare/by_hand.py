"""A script of the Client API played without NVFlare's processes: its real in-process API, one script run a task.

Every task begins the script anew, as where a simulator has fewer threads than clients: what a site keeps must be on its
disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from nvflare.apis.shareable import Shareable
from nvflare.client import api
from nvflare.client.api_spec import CLIENT_API_KEY
from nvflare.client.config import ConfigKey, ExchangeFormat, TransferType
from nvflare.client.in_process.api import TOPIC_GLOBAL_RESULT, TOPIC_LOCAL_RESULT, InProcessClientAPI
from nvflare.fuel.data_event.data_bus import DataBus
from nvflare.fuel.data_event.event_manager import EventManager
from simulated import LIMIT

from fednorm.halves.messages import Hello, Message, Request, Welcome
from fednorm.nvflare import parts

Script = Callable[[], None]


def asked(script: Script, site: str, shareable: Shareable) -> tuple[Message | None, BaseException | None]:
    """What a script answers to one task, and what it raised."""
    formats = {
        ConfigKey.EXCHANGE_FORMAT: ExchangeFormat.PYTORCH,
        ConfigKey.SERVER_EXPECTED_FORMAT: ExchangeFormat.PYTORCH,
    }
    exchange = {**formats, ConfigKey.TRANSFER_TYPE: TransferType.FULL}
    meta = {"SITE_NAME": site, "JOB_ID": "job", "site_name": site, "job_id": "job"}
    door = InProcessClientAPI({**meta, ConfigKey.TASK_NAME: "train", ConfigKey.TASK_EXCHANGE: exchange}, 0.01)
    door.init()
    bus, answers, raised = DataBus(), [], []
    bus.put_data(CLIENT_API_KEY, door)
    api.context_dict.clear()
    api.default_context = None

    def taken(topic: str, data: Any, databus: Any) -> None:
        answers.append(parts.message_in(data))
        door.stop = True

    def run() -> None:
        try:
            script()
        except BaseException as error:
            raised.append(error)

    bus.subscribe([TOPIC_LOCAL_RESULT], taken)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    EventManager(bus).fire_event(TOPIC_GLOBAL_RESULT, shareable)
    thread.join(timeout=LIMIT)
    bus.unsubscribe(TOPIC_LOCAL_RESULT, taken)
    door.close()
    assert not thread.is_alive()
    return (answers[0] if answers else None), (raised[0] if raised else None)


def hello(script: Script, site: str) -> Hello:
    """How the script's site introduces itself."""
    answer, raised = asked(script, site, parts.question())
    assert raised is None
    assert isinstance(answer, Hello)
    return answer


def answer(script: Script, site: str, welcome: Welcome, request: Request) -> Message:
    """What the script answers to a request."""
    found, raised = asked(script, site, parts.to_shareable(request, welcome))
    assert raised is None
    assert found is not None
    return found
