"""The parts of FedRevive's server step, each for itself: take a teacher, make images, distil."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fednorm.core import rng
from fednorm.core.state import Kind, Tree
from fednorm.core.strategy import Arrived, Context, Memory
from fednorm.errors import ConfigError
from fednorm.layers.label_counts import counts_key
from fednorm.strategies.revive.distil import Distilled, distil
from fednorm.strategies.revive.generator import bare_generator, first_parameters
from fednorm.strategies.revive.inputs import Inputs
from fednorm.strategies.revive.network import Mode, Network
from fednorm.strategies.revive.objective import Cast
from fednorm.strategies.revive.pool import ImagePool, chosen
from fednorm.strategies.revive.recall import Recall
from fednorm.strategies.revive.settings import Settings
from fednorm.strategies.revive.synthesis import Synthesis, fresh_buffers, reptile, synthesise
from fednorm.strategies.revive.teachers import (
    PROBE_TEMPERATURE,
    PROBED_UPLOADS,
    Belief,
    Teacher,
    noise,
    probe,
    with_teacher,
)


@dataclass(frozen=True)
class ServerStep:
    """FedRevive's settings in a run."""

    settings: Settings
    context: Context

    @cached_property
    def network(self) -> Network:
        return Network.of(self.context)

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Of an image."""
        channels, height, width = self.context.input_shape
        return channels, height, width

    @cached_property
    def like(self) -> Tensor:
        """An entry with the device and the type of number that models have here."""
        entry = next(entry for entry in self.context.facts.entries.values() if entry.trainable)
        return self.context.initial[entry.key].to(self.context.device)

    @cached_property
    def classes(self) -> int:
        """How many classes the model tells apart, which two images of noise show where nobody knows."""
        if self.context.num_classes:
            return self.context.num_classes
        return self._outputs()[-1]

    @torch.no_grad()
    def _outputs(self) -> torch.Size:
        x = noise(rng.key(self.context.seed, "revive"), 2, self.shape, self.like)
        return self.network(self._here(self.context.initial), x, "batch").shape

    def key(self, version: int, what: str) -> Tensor:
        """All that is drawn for something in a version comes from this; on the host, where few numbers cost least."""
        return rng.key(self.context.seed, "revive", version, what)

    def _here(self, tree: Tree) -> Tree:
        return {key: value.to(self.context.device) for key, value in tree.items()}

    def begin(self) -> Recall:
        """What is remembered before the first update; what cannot be revived is refused."""
        settings, context = self.settings, self.context
        if len(context.input_shape) != 3:
            shape = context.input_shape or "nobody told the server of"
            raise ConfigError(
                f"FedRevive distils on images (channels, height, width), but an example here has a shape {shape}; "
                "use another strategy, or tell the server input_shape, mean and std"
            )
        task, outputs = context.task, self._outputs()
        if len(outputs) != 2 or (task is not None and task.kind not in ("", "classification")):
            named = "" if task is None else f" in the task '{task.name}'"
            raise ConfigError(
                f"FedRevive distils the scores of classes, but the model's outputs are of shape "
                f"{tuple(outputs[1:])}{named}; use another strategy"
            )
        if settings.statistics != "none" and settings.synthetic and not self.network.watched(settings.statistics):
            what = {"bn": "BatchNorm with running statistics", "tracker": "tracker"}[settings.statistics]
            raise ConfigError(
                f"FedRevive's statistics={settings.statistics} finds no {what} in the model; use statistics=none, "
                "or a model that has some"
            )
        if not settings.synthetic:
            self._examples  # noqa: B018 (refused where there are none)
        generator: Tree = {}
        if settings.synthetic:
            seed = rng.as_seed(rng.key(context.seed, "revive", "generator"))
            first = first_parameters(settings.latent, settings.width, self.shape, seed)
            generator = {key: value.to(self.like) for key, value in first.items()}
        return Recall(generator, fresh_buffers(generator), self._pool())

    @property
    def _examples(self) -> tuple[Tensor, Tensor]:
        if self.context.examples is None:
            raise ConfigError(
                "FedRevive with images=real distils on examples that the server has, and it has none; "
                "hold some out for it (data.val_fraction), or take fedrevive with images=synthetic"
            )
        return self.context.examples

    def _pool(self) -> ImagePool:
        return ImagePool(self.settings.pool, self.shape, self.context.device)

    def recall(self, memory: Memory) -> Recall:
        return Recall.of(memory, self._pool(), self.context.device)

    def take(self, recall: Recall, arrived: Arrived) -> None:
        """An update's model becomes the newest teacher."""
        whole = self._here(arrived.whole)
        mode = self.network.mode_of(whole)
        initial = self.context.initial
        tree = {key: whole[key] if key in whole else initial[key] for key in self.context.facts.entries}
        tree = self._here(tree)
        proportions = self._proportions(recall, arrived, tree, mode)
        recall.teachers = with_teacher(
            recall.teachers, Teacher(arrived.client, tree, proportions, mode), self.settings.teachers
        )

    def _proportions(self, recall: Recall, arrived: Arrived, tree: Tree, mode: Mode) -> Tensor:
        settings, client = self.settings, arrived.client
        counts = counts_key(self.context.model)
        if settings.counted and counts is not None:
            seen = tree[counts].double()
            return seen / seen.sum().clamp_min(1)
        belief = recall.beliefs.get(client) or Belief(torch.zeros(self.classes).double())
        if belief.uploads < PROBED_UPLOADS:
            inputs = noise(self.key(arrived.number, "probe"), settings.probes, self.shape, self.like)
            belief = belief.after(probe(self.network, tree, mode, inputs, PROBE_TEMPERATURE).cpu())
            recall.beliefs = {**recall.beliefs, client: belief}
        return belief.proportions.to(self.context.device)

    def is_due(self, recall: Recall, version: int) -> bool:
        """Whether images are to be made."""
        last = recall.synthesised
        return self.settings.synthetic and (last is None or version - last >= self.settings.every)

    def synthesise(self, recall: Recall, student: Tree, known: Tree, version: int) -> Synthesis:
        """Make images for the pool, and move the generator towards the copy that made them."""
        settings = self.settings
        made = synthesise(
            settings,
            Cast(self.network, recall.teachers, student, self.network.mode_of(known), self.context.programs),
            bare_generator(settings.latent, settings.width, self.shape),
            recall.generator,
            Inputs(settings.augmentation, self.context.mean, self.context.std),
            recall.guard,
            self.key(version, "synthesis"),
            adversarial=version >= settings.warmup,
        )
        recall.generator, recall.adam = reptile(recall.generator, made.fast, recall.adam, settings.generator_lr)
        recall.pool.add(made.images, made.labels)
        recall.synthesised = version
        return made

    def distil(
        self,
        recall: Recall,
        student: Tree,
        keys: Sequence[str],
        version: int,
        hold: frozenset[Kind] = frozenset(),
    ) -> Distilled:
        """Teach a copy of the server's model what the teachers know, as clients train it: what they hold, it holds."""

        def draw(key: Tensor, labels: Tensor) -> Tensor:
            return self.drawn(recall.pool, key, labels).to(self.like.dtype)

        key = self.key(version, "distillation")
        network = replace(self.network, hold=hold)
        programs = self.context.programs
        return distil(self.settings, network, recall.teachers, student, keys, draw, recall.guard, key, programs)

    def drawn(self, pool: ImagePool, key: Tensor, labels: Tensor) -> Tensor:
        """Inputs of the classifier, one for each label, augmented as clients do it; several keys have a row each."""
        picture, crop = rng.key(key, "which"), rng.key(key, "augment")
        inputs = Inputs(self.settings.augmentation, self.context.mean, self.context.std)
        if self.settings.synthetic:
            return inputs(pool.draw(picture, labels, self.classes), crop)
        x, y = (part.to(self.context.device) for part in self._examples)
        return inputs(inputs.images_of(x[chosen(picture, y, labels, self.classes)]), crop)
