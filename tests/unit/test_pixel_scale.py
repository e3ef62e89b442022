"""Bytes of images as numbers: the scale a user asks for, what is told of it, and what cannot be scaled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tiny
from fednorm.data.federation import Federation
from fednorm.data.from_files.scaling import with_image_scale
from fednorm.data.image_set import ImageSet
from fednorm.data.own import OWN, register_data
from fednorm.data.pixel_scale import with_pixel_scale
from fednorm.errors import ConfigError
from fednorm.running.config import RunConfig, updated
from fednorm.running.plan import build_federation, make_plan

PIXELS = torch.tensor([0, 51, 102, 255], dtype=torch.uint8).reshape(4, 1, 1, 1)


def federation(x: torch.Tensor = PIXELS) -> Federation:
    """Four examples of one pixel on two clients, of which the second never trains."""
    y, rows = torch.zeros(4, dtype=torch.int64), (torch.tensor([0, 1]), torch.tensor([2, 3]))
    named = {"name": "dots", "mean": (0.25,), "std": (2.0,), "num_classes": 2, "unseen": frozenset({1})}
    return Federation(x=x, y=y, clients=rows, test_x=x, test_y=y, own_test=rows, **named)


def numbers(data: Federation) -> list[float]:
    return data.pool.inputs(data.x).flatten().tolist()


def test_each_scale_by_hand() -> None:
    data = federation()
    assert with_pixel_scale(data, "auto") is data
    assert numbers(with_pixel_scale(data, "unit")) == pytest.approx([0, 0.2, 0.4, 1])
    assert numbers(with_pixel_scale(data, "symmetric")) == pytest.approx([-1, -0.6, -0.2, 1])
    # The client that trains has 0 and 0.2: mean 0.1, deviation 0.1.
    assert numbers(with_pixel_scale(data, "standard")) == pytest.approx([-1, 1, 3, 9])


def test_an_exported_model_says_how_its_pixels_were_scaled() -> None:
    about = with_pixel_scale(federation(), "unit").preprocessing
    assert about == {"kind": "images", "size": [1, 1], "channels": 1, "mean": [0.0], "std": [1.0]}


def test_what_was_told_of_another_scale_is_told_no_more() -> None:
    own = with_image_scale(replace(federation(), notes=("read from a file",)))
    assert len(own.notes) == 2
    assert with_pixel_scale(own, "symmetric").notes == ("read from a file",)
    assert with_pixel_scale(own, "standard").notes == own.notes


def test_numbers_are_not_scaled_as_pixels() -> None:
    with pytest.raises(ConfigError) as caught:
        with_pixel_scale(federation(torch.zeros(4, 3)), "unit")
    assert str(caught.value) == (
        "data.scaling=unit scales the bytes of images, but an example of 'dots' is float32 of shape (3,); leave it out"
    )


def small(**changes: object) -> RunConfig:
    return updated(RunConfig(), {"data.train_limit": 100, "rounds": 1, "train.local_steps": 1, **changes})


def test_a_run_trains_on_the_scale_and_the_size_that_its_config_names() -> None:
    config = small(**{"data.scaling": "unit", "data.size": 14, "engine.device": "cpu"})
    x, _, _ = make_plan(config).batches.batch(0, 0)
    assert x.shape == (20, 1, 14, 14)
    assert float(x.min()) == 0.0
    assert 0.5 < float(x.max()) <= 1.0


def test_a_stack_trains_on_the_same_scale() -> None:
    config = small(**{"data.scaling": "symmetric", "engine.device": "cpu", "data.clients": 2})
    engines = ("sequential", "stacked")
    reference, run = (tiny.play(make_plan(updated(config, {"engine.name": name}))) for name in engines)
    for key, value in reference.server.tree.items():
        if value.is_floating_point():
            torch.testing.assert_close(run.server.tree[key], value, rtol=1e-4, atol=1e-5)


def test_a_registered_set_of_images_is_resized_and_other_sets_are_refused() -> None:
    images = torch.zeros(20, 1, 6, 6, dtype=torch.uint8)
    labels = torch.arange(20) % 2
    try:
        register_data("dots")(lambda: ((images, labels), (images, labels)))
        register_data("points")(lambda: ((images.float(), labels), (images.float(), labels)))
        register_data("given")(lambda: federation())
        sized = {"data.size": 3, "data.partition": "iid", "data.clients": 2}
        assert build_federation(small(**sized, **{"data.name": "dots"})).x.shape[1:] == (1, 3, 3)
        with pytest.raises(ConfigError) as caught:
            build_federation(small(**sized, **{"data.name": "points"}))
        assert str(caught.value) == (
            "data.size=3 is for images in bytes, but an example of 'points' is float32 of shape (1, 6, 6); leave it out"
        )
        with pytest.raises(ConfigError) as caught:
            build_federation(updated(RunConfig(), {"data.name": "given", "data.size": 3}))
        assert str(caught.value) == "data set 'given' comes with its clients; leave out data.size=3"
    finally:
        for name in ("dots", "points", "given"):
            OWN.pop(name, None)


def test_images_that_would_not_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednorm.data.image_set.memory_limit", lambda: 1_000_000)
    x, y = torch.zeros(10, 3, 4, 4, dtype=torch.uint8), torch.zeros(10, dtype=torch.int64)
    with pytest.raises(ConfigError) as caught:
        ImageSet.of("cubes", (x, y), (x, y), (), (), (), num_classes=2).resized(224)
    assert str(caught.value) == (
        "data.size=224 makes 3.0 MB of 'cubes', and data may take 1.0 MB here; give a smaller size, or a machine with "
        "more memory"
    )
