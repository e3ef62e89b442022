"""Training on for more rounds than a run was started with, as if it had been started with them, or else by request.

What follows from the number of rounds and has been acted on already cannot be taken back: such a run is refused with
the reason, unless its user wants it to follow the new number from here on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from fednorm.core.method import Memory, Progress
from fednorm.core.phases import PhaseId, Purpose
from fednorm.errors import ConfigError
from fednorm.files import read_json, write_json
from fednorm.layers.scheduled import Scheduled
from fednorm.running.config import from_dict, to_dict
from fednorm.running.folder import RunFolder
from fednorm.running.given import Objects
from fednorm.running.plan import Plan
from fednorm.running.sealed import sealed
from fednorm.running.store import Store


@dataclass(frozen=True)
class Lengthening:
    """A run of a folder that is to have more rounds, and why it will not equal one that was started with them."""

    folder: RunFolder
    rounds: int
    done: int
    reasons: tuple[str, ...]

    @property
    def note(self) -> str:
        """What a user is told, now and in the result."""
        return f"{' and '.join(self.reasons)}: from round {self.done + 1} on all follows the new number, {self.rounds}"

    def write(self) -> None:
        """Change the folder; a kill in between leaves one that the same command brings to its end."""
        self.folder.result.unlink(missing_ok=True)
        set_rounds(self.folder, self.rounds)
        if not (self.folder.has_begun or self.folder.state.exists()):
            return
        with closing(Store(self.folder.state, begun=self.folder.has_begun)) as store:
            facts = store.facts()
            if facts:
                config = replace(from_dict(facts["config"]), rounds=self.rounds)
                notes = [*facts.get("notes", []), *([self.note] if self.reasons else [])]
                changes = {"config": to_dict(config), "finished": False, "notes": notes}
                store.commit(facts["round"], {}, changes, [])


def set_rounds(folder: RunFolder, rounds: int) -> None:
    """Change the number of rounds in config.json."""
    write_json(folder.config, sealed({**read_json(folder.config), "rounds": rounds}))


def lengthening(folder: RunFolder, plan: Plan, objects: Objects, rounds: int) -> Lengthening | None:
    """What it means to train the run of a folder on to this many rounds; None where it has them already.

    `plan` is the run's with the new number.
    """
    facts = {}
    if folder.has_begun or folder.state.exists():
        with closing(Store(folder.state, begun=folder.has_begun)) as store:
            facts = store.facts()
    if not facts:
        return Lengthening(folder, rounds, 0, ())
    started, done = from_dict(facts["config"]), facts["round"]
    if rounds < started.rounds:
        raise ConfigError(
            f"--rounds {rounds} is less than the {started.rounds} rounds of '{folder.path}'; give more than that"
        )
    if rounds == started.rounds:
        return None
    if facts.get("over"):
        raise ConfigError(
            f"'{folder.path}' ended with engine.checkpoint_every=0, so nothing is left of its clients under way and it "
            f"cannot be trained on; start a new run with --rounds {rounds}"
        )
    return Lengthening(folder, rounds, done, tuple(_reasons(objects.plan(started), plan, done)))


def refuse_unless_wanted(found: Sequence[Lengthening], reschedule: bool) -> None:
    """Refuse runs that would not equal those started with the new number, unless their user wants them all the same."""
    for each in found:
        if each.reasons and not reschedule:
            raise ConfigError(
                f"'{each.folder.path}' cannot be trained on as if it had been started with {each.rounds} rounds: "
                f"{' and '.join(each.reasons)}; add --reschedule to let it follow the new number from here on"
            )


def _reasons(before: Plan, after: Plan, done: int) -> list[str]:
    """What of the rounds that were played would have been different with the new number of rounds."""
    found: list[str] = []
    old = before.work.rounds
    stages, now = (_stages(plan, plan.work.rounds, done) for plan in (before, after))
    phases = [PhaseId(Purpose.TRAIN, stage) for stage in stages]
    if any(before.numbers(id, round) != after.numbers(id, round) for round, id in enumerate(phases, start=1)):
        found.append(f"schedule '{before.config.train.schedule}' spans the {old} rounds it was started with")
    if stages != now:
        found.append(f"method '{before.method.name}' changed its stage by the {old} rounds it was started with")
    layers = {type(module).__name__ for module in before.prepared.model.modules() if isinstance(module, Scheduled)}
    if layers and done:
        found.append(f"{', '.join(sorted(layers))} layers change over the {old} rounds the run was started with")
    if done == old and (before.method.finish or before.method.query is not None):
        found.append(f"method '{before.method.name}' ended the run with an exchange of its own")
    return found


def _stages(plan: Plan, rounds: int, done: int) -> list[int]:
    """The stages of the rounds that were played if a run has this many; where clients' reports decide, they did."""
    if getattr(plan.method.switch, "uses_reports", True):
        return [0] * done
    memory: Memory = {}
    stages: list[int] = []
    for number in range(1, done + 1):
        memory, stage = plan.method.switch(memory, Progress(number, rounds), ())
        stages.append(stage)
    return stages
