"""Sites that went silent: a job that NVFlare lost at a site, and does not start again, must not be waited for."""

from __future__ import annotations

import time
from typing import Any

from nvflare.apis.fl_constant import SystemConfigs
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.utils.config_service import ConfigService

SILENCE = "fednorm_silence"
"""of the job's server config: seconds without a sign of life after which a site counts as gone"""
_USUAL = 600.0
"""as long as NVFlare's own server waits for a site's heartbeat"""


class Watch:
    """When each site was last heard of.

    The job's process at a site sends a heartbeat every ten seconds, however long it trains. Where the site's own
    process died and was started again, NVFlare tells nobody that the job's process ended with it.
    """

    def __init__(self, communicator: Any) -> None:
        self.seconds = float(ConfigService.get_float_var(SILENCE, SystemConfigs.APPLICATION_CONF) or _USUAL)
        self._heard: dict[str, float] = {}
        pass_on = communicator.client_is_active

        def client_is_active(client_name: str, reason: str, fl_ctx: FLContext) -> None:
            self._heard[client_name] = time.monotonic()
            pass_on(client_name, reason, fl_ctx)

        # NVFlare calls it for heartbeats and for every question of a site's job, and fires no event.
        communicator.client_is_active = client_is_active

    def is_silent(self, site: str) -> bool:
        """Whether a site has not been heard of for so long that it will not answer; one never heard of begins now."""
        return time.monotonic() - self._heard.setdefault(site, time.monotonic()) > self.seconds
