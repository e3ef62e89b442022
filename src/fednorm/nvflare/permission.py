"""Whether a site lets code run that a job names: by the same list and the same right as NVFlare's own components."""

from __future__ import annotations

from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer

from fednorm.errors import ConfigError


class Permission:
    """A site's answer to a path such as `hospital.data.load`: silence, or a refusal."""

    def __init__(self, fl_ctx: FLContext) -> None:
        self._context = fl_ctx
        self._authorizer = ComponentPathAuthorizer()

    def __call__(self, path: str) -> None:
        try:
            self._authorizer.authorize_component_config({"path": path}, fl_ctx=self._context)
        except UnsafeComponentError:
            raise ConfigError(
                f"the job names code, '{path}', which this site does not permit; add it to class_allow_list in "
                "local/resources.json, or submit the job with its code where the right byoc is granted"
            ) from None
