"""An experiment with its recipe: the cells it consists of, and the run behind each."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from fednorm.errors import ConfigError, unknown
from fednorm.running.config import RunConfig, from_dict, updated
from fednorm.running.on_clock import full_name
from fednorm.studies.choosing import Told, is_at, refuse_absent, spelled
from fednorm.studies.published import Experiment, PublishedCell, experiments, find_experiment
from fednorm.studies.recipes import Score, StudyRecipe, read_study_recipe


@dataclass(frozen=True)
class StudyCell:
    """One number of a study: what was published, if it was and is not a quick run's, and the run it is read off."""

    study: str
    method: str
    """the paper's key"""
    setting: Mapping[str, Any]
    variant: str
    """another reading of the paper; empty for the main one"""
    config: RunConfig
    """of the run, whatever its seed and engine"""
    score: Score
    published: PublishedCell | None
    describing: frozenset[str] = frozenset()
    """keys of the setting that only say what the method does"""

    @property
    def selected(self) -> str | None:
        """The domain that is looked at, by the name that the data have for it."""
        if self.score.select is None or self.score.select not in self.setting:
            return None
        value = str(self.setting[self.score.select])
        return self.score.names.get(value, value)

    @property
    def time(self) -> float | None:
        """The virtual time at which its score is read; None after the last round."""
        for axis, times in self.score.at_time.items():
            if _text(self.setting.get(axis)) in times:
                return times[_text(self.setting[axis])]
        return None


@dataclass(frozen=True)
class Study:
    """An experiment with its recipe."""

    experiment: Experiment
    recipe: StudyRecipe

    @property
    def id(self) -> str:
        return self.experiment.id

    @property
    def data(self) -> tuple[str, ...]:
        """The data sets of its runs."""
        return tuple(dict.fromkeys(cell.config.data.name for cell in self.cells()))

    def cells(
        self,
        *,
        quick: bool = False,
        methods: Sequence[str] = (),
        where: Mapping[str, Collection[str]] | None = None,
        variants: bool = False,
    ) -> tuple[StudyCell, ...]:
        """The numbers to be had: of some methods or of all, of some settings, of the main reading alone or of all.

        Settings are told by their axes; which reading it is, by `variant`, where the main one is `main`.
        """
        for key in methods:
            if key not in self.recipe.methods:
                raise unknown(f"method of {self.id}", key, self.recipe.methods)
        cells = self._of_methods(methods, quick, variants)
        if not where:
            return cells
        asked = {axis: [spelled(value) for value in values] for axis, values in where.items()}
        of_methods = {key: [*map(_told, self._of_methods([key], quick, variants))] for key in self.recipe.methods}
        refuse_absent(self.id, [*map(_told, cells)], of_methods, asked)
        return tuple(cell for cell in cells if is_at(_told(cell), asked))

    def _of_methods(self, methods: Sequence[str], quick: bool, variants: bool) -> tuple[StudyCell, ...]:
        return (*self._main(quick, methods), *(self._other_readings(quick, methods) if variants else ()))

    def _main(self, quick: bool, methods: Sequence[str]) -> Iterator[StudyCell]:
        for method, setting, published in self._published():
            if (not methods or method in methods) and not self._left_out(method, setting, quick):
                yield self._cell(method, setting, published, "", quick)

    def _other_readings(self, quick: bool, methods: Sequence[str]) -> Iterator[StudyCell]:
        """Cells of other readings, less those that a reading leaves as they are: the same run is no second opinion."""
        for name, reading in self.recipe.variants.items():
            for main in self._main(quick, methods):
                if is_at(_told(main), reading.get("where", {})):
                    other = self._cell(main.method, main.setting, main.published, name, quick)
                    if other.config != main.config:
                        yield other

    def _left_out(self, method: str, setting: Mapping[str, Any], quick: bool) -> bool:
        """Whether a figure does not have a combination, or a quick run does not play it."""
        told = {"method": method} | {key: _text(value) for key, value in setting.items()}
        if any(all(told.get(key) in values for key, values in rule.items()) for rule in self.recipe.skip):
            return True
        return quick and any(
            told[axis] not in values for axis, values in self.recipe.quick_axes.items() if axis in told
        )

    def _published(self) -> Iterator[tuple[str, Mapping[str, Any], PublishedCell | None]]:
        """Method and setting of every cell; where no digits were published, all combinations."""
        if self.experiment.cells:
            yield from ((cell.method, cell.setting, cell) for cell in self.experiment.cells)
            return
        axes = self.recipe.axes
        for method in self.recipe.methods:
            for values in itertools.product(*axes.values()):
                yield method, dict(zip(axes, values, strict=True)), None

    def _cell(
        self, method: str, setting: Mapping[str, Any], published: PublishedCell | None, variant: str, quick: bool
    ) -> StudyCell:
        recipe = self.recipe
        if method not in recipe.methods:
            raise ConfigError(f"the recipe of {self.id} has no method '{method}'; add it below [methods]")
        entry = recipe.methods[method]
        expression, fields = (entry, {}) if isinstance(entry, str) else (entry["method"], dict(entry.get("set", {})))
        texts = {key: _text(value) for key, value in setting.items()}
        for axis, value in texts.items():
            if axis == recipe.score.select:
                continue
            if value not in recipe.axes.get(axis, {}):
                raise ConfigError(f"the recipe of {self.id} has no {axis}='{value}'; add it below [axes.{axis}]")
            fields |= recipe.axes[axis][value]
            expression = fields.pop("method", {}).get(method, expression)
            fields |= fields.pop("set", {}).get(method, {})
        reading = recipe.variants[variant] if variant else {}
        expression = reading.get("methods", {}).get(method, expression)
        fields |= reading.get("set", {})
        for axis, values in reading.get("axes", {}).items():
            fields |= values.get(texts.get(axis, ""), {})
        if quick:
            expression = recipe.quick_methods.get(method, expression)
            fields |= {**recipe.quick, **recipe.quick_set.get(method, {})}
            for axis, values in recipe.quick_axes.items():
                fields |= values.get(texts.get(axis, ""), {})
        # An expression may name an axis: fedwon(use_agc={agc}).
        config = updated(self._common, {**fields, "method": _full_name(expression.format_map(texts))})
        names = {**recipe.score.names, **recipe.score.stand_ins} if quick else recipe.score.names
        score = replace(recipe.score, names=names, at_time=recipe.quick_at_time if quick else recipe.score.at_time)
        told = None if quick else published  # a quick run is not the paper's setting, and nothing to set beside it
        return StudyCell(self.id, method, setting, variant, config, score, told, self._describing)

    @cached_property
    def _common(self) -> RunConfig:
        """What all cells share."""
        return from_dict(self.recipe.run)

    @cached_property
    def _describing(self) -> frozenset[str]:
        """Axes that set nothing, whatever their value, and that no method's expression names."""
        silent = {axis for axis, values in self.recipe.axes.items() if not any(values.values())}
        return frozenset(axis for axis in silent if f"{{{axis}}}" not in str(self.recipe.methods))


def cell_label(cell: StudyCell) -> str:
    """A cell in a line: what sets it apart.

    A variant is named last, in brackets.
    """
    setting = "".join(f" {key}={value}" for key, value in cell.setting.items() if key != cell.score.select)
    return f"{cell.method}{setting}" + (f" [{cell.variant}]" if cell.variant else "")


@cache
def find_study(id: str) -> Study:
    """A study by its id."""
    return Study(find_experiment(id), read_study_recipe(id))


def all_studies() -> list[Study]:
    """Every study, in the order in which they are played."""
    found = [find_study(id) for id in experiments()]
    return sorted(found, key=lambda study: (study.recipe.place is None, study.recipe.place or 0))


@cache
def _full_name(expression: str) -> str:
    """A method by the name it has in results, in which every spelling of it is the same."""
    return full_name(expression)


def _told(cell: StudyCell) -> Told:
    """A cell's setting as texts, and which reading it is."""
    return {"variant": cell.variant or "main"} | {axis: _text(value) for axis, value in cell.setting.items()}


def _text(value: Any) -> str:
    """A value of a setting as a recipe spells it.

    >>> _text(True), _text(32), _text("iid")
    ('true', '32', 'iid')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)
