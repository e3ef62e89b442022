"""`fednorm data check`: the facts of a federation, and every reason for which a run would refuse it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fednorm.data.checks import problems as data_problems
from fednorm.data.client_facts import federation_facts
from fednorm.data.from_files.problems import DataError
from fednorm.errors import ConfigError
from fednorm.running.config import RunConfig
from fednorm.running.consent import named_code
from fednorm.running.extensions import with_extensions
from fednorm.running.plan import build_federation, make_plan


def checked(make_config: Callable[[], RunConfig]) -> tuple[dict[str, Any], list[str]]:
    """(facts, problems) of the data of a config; no facts where the data could not be read at all.

    The config is the caller's own: code that it names is imported.
    """
    try:
        config = with_extensions(make_config())
        federation = build_federation(config)
    except DataError as error:
        return {}, list(error.problems)
    except ConfigError as error:
        return {}, [str(error)]
    problems = data_problems(federation)
    facts = federation_facts(federation) if not problems else {}
    try:
        make_plan(config, federation=federation, code=named_code(config))
    except ConfigError as error:
        if str(error) not in problems:
            problems.append(str(error))
    return {**facts, "model": config.model} if facts else {}, problems
