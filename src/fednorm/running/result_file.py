"""result.json: written with what it was made from, and believed only where that is still so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fednorm.core.state import digest
from fednorm.errors import CheckpointError, first_line
from fednorm.files import json_text, read_json, write_json
from fednorm.running.config import RunConfig
from fednorm.running.folder import RunFolder
from fednorm.running.given import refuse_other_config
from fednorm.running.records import ResultFile, RunId, RunResult, read_result
from fednorm.running.results import Result
from fednorm.running.sealed import SHA, digest_of, is_broken, sealed
from fednorm.running.store import Store
from fednorm.running.trained import opened_state

_ANEW = "delete it and resume, and it is written anew"


def write_result(folder: RunFolder, result: ResultFile, store: Store | None = None) -> None:
    """Write what came out of a run, whose state is in the store, or of a comparison."""
    state = {} if store is None else {"state": store.digest}
    made_from = {"config": digest_of(read_json(folder.config)), **state}
    write_json(folder.result, sealed({**result, "made_from": made_from}))


def read_result_file(folder: RunFolder) -> ResultFile:
    """What came out, as it was written, with the config that is there; files of older versions say less."""
    path, stored = folder.result, read_json(folder.result)
    result = read_result(stored, f"'{path}'")
    if is_broken(stored) or (SHA in stored) != ("made_from" in stored):
        raise CheckpointError(f"'{path}' is damaged or was edited (its digest differs); {_ANEW}")
    if "made_from" not in stored:
        print(f"note: '{path}' is of an older fednorm and has no digest; resume writes it anew", file=sys.stderr)
    elif stored["made_from"]["config"] != digest_of(read_json(folder.config)):
        raise CheckpointError(f"'{path}' is of another config than '{folder.config}'; {_ANEW}")
    _refuse_unusable(result, path)
    return result


def _refuse_unusable(result: ResultFile, path: Path) -> None:
    """Refuse what has the form of a result and not its fields, such as a file that somebody else made."""
    try:
        told = Result(tuple(result["runs"]))
        for tell in (told.to_json, told.__str__, told.rows):
            tell()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"'{path}' is not the result of a run ({why}); {_ANEW}") from None


def is_sealed(folder: RunFolder) -> bool:
    """Whether there is a result that can be checked."""
    return folder.result.exists() and "made_from" in read_json(folder.result)


def result_of(folder: RunFolder, id: RunId, config: RunConfig) -> RunResult:
    """The result of a run that others are compared with, checked against the state it was made from."""
    path, result = folder.result, read_result_file(folder)
    run = result["runs"][0]
    if len(result["runs"]) != 1 or (run["method"], run["seed"]) != id:
        raise CheckpointError(f"'{path}' is not the result of {id} but of {run['method']} seed {run['seed']}; {_ANEW}")
    with opened_state(folder.state) as store:
        refuse_other_config(store.facts()["config"], config, f"'{folder.path}'")
        rows = list(store.rows())
        final = next((row["eval"] for row in reversed(rows) if "eval" in row), {})
        told = (result.get("made_from", {}).get("state"), run["rounds_done"], run["digest"])
        if told != (store.digest, len(rows), digest(store.tree("model"))) or not _same(run["final"], final):
            raise CheckpointError(f"'{path}' was not made from '{folder.state}'; {_ANEW}")
    return run


def _same(one: Any, other: Any) -> bool:
    return json.loads(json_text(one)) == json.loads(json_text(other))
