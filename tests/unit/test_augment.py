"""Augmentation: what each operation does, equal bits under vmap, good errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from fednorm.core import rng
from fednorm.data.augment import Augmentation, apply, augment, augment_with_mask, draws, parse
from fednorm.data.augment_steps import crop_of
from fednorm.errors import ConfigError
from test_stacked import gap

SPECS = (
    "flip",
    "crop(2)+flip",
    "rotate(30)+flip",
    "window(6)+flip",
    "crop(3)+rotate(45)+window(5)",
    "resized_crop+flip",
    "crop(1)+resized_crop(0.2)+window(6)",
)


def images(batch=6, channels=3, height=9, width=8):
    count = batch * channels * height * width
    return (torch.arange(1, count + 1) % 251 + 1).to(torch.uint8).reshape(batch, channels, height, width)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_vmap_over_clients_gives_the_bits_of_a_loop(spec, dtype):
    x = torch.stack([images(), images() + 1, images() + 2]).to(dtype)
    keys = rng.key(7, "augment", torch.arange(3))
    loop = torch.stack([augment(part, key, spec) for part, key in zip(x, keys, strict=True)])
    mapped = torch.vmap(lambda part, key: augment(part, key, spec))(x, keys)
    assert torch.equal(loop, mapped)
    assert loop.dtype == dtype


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spec", SPECS)
def test_cuda_gives_the_bits_of_the_cpu(spec):
    key = rng.key(3)
    assert torch.equal(augment(images(), key, spec), augment(images().cuda(), key, spec).cpu())


@given(st.integers(0, 2**40), st.integers(1, 4))
def test_pad_and_crop_is_a_window_of_the_padded_image(seed, pad):
    x = images()
    out = augment(x, rng.key(seed), f"crop({pad})")
    padded = torch.nn.functional.pad(x, (pad,) * 4)
    for before, after in zip(padded, out, strict=True):
        windows = [before[:, i : i + 9, j : j + 8] for i in range(2 * pad + 1) for j in range(2 * pad + 1)]
        assert any(torch.equal(window, after) for window in windows)


def test_flip_mirrors_about_half_of_the_images_whole():
    x = images(batch=400)
    out = augment(x, rng.key(1), "flip")
    same = (out == x).flatten(1).all(1)
    mirrored = (out == x.flip(3)).flatten(1).all(1)
    assert bool((same | mirrored).all())
    assert 150 < int(mirrored.sum()) < 250


def test_crop_offsets_are_uniform_and_rows_and_columns_independent():
    point = torch.zeros(2000, 1, 7, 7, dtype=torch.uint8)
    point[:, :, 3, 3] = 1
    places = augment(point, rng.key(2), "crop(1)").flatten(1).argmax(1)
    counts = torch.bincount(places, minlength=49)
    assert int((counts > 0).sum()) == 9
    assert counts[counts > 0].min() > 160


def test_rotation_by_nothing_is_the_image_and_a_quarter_turn_at_most_moves_the_corner():
    x = images(height=8, width=8)
    assert torch.equal(augment(x, rng.key(4), "rotate(0)"), x)
    turned = augment(torch.full((50, 1, 33, 33), 9, dtype=torch.uint8), rng.key(4), "rotate(45)")
    assert bool((turned[:, 0, 16, 16] == 9).all())
    assert bool((turned[:, 0, 0, 0] == 0).any())


def test_angles_are_uniform_from_minus_to_plus_the_degrees():
    drawn = draws(rng.key(3), (20_000, 1, 8, 8), parse("rotate(40)"))[:, 0].double() / 65536
    degrees = torch.rad2deg(torch.atan2(drawn[:, 1], drawn[:, 0]))
    assert torch.allclose(drawn.square().sum(1), torch.ones(1, dtype=torch.float64), atol=1e-4)
    assert degrees.abs().max().item() == pytest.approx(40, abs=0.05)
    shares = torch.histc(degrees, 4, -40, 40) / len(degrees)
    assert shares.tolist() == pytest.approx([0.25] * 4, abs=0.02)


def test_rotation_keeps_a_disc_and_its_mass():
    yy, xx = torch.meshgrid(torch.arange(41) - 20, torch.arange(41) - 20, indexing="ij")
    disc = ((yy**2 + xx**2) <= 15**2).to(torch.uint8)[None, None].expand(20, -1, -1, -1)
    turned = augment(disc, rng.key(0), "rotate(30)")
    assert int((turned != disc).sum(dim=(1, 2, 3)).max()) < 60


def test_masks_move_with_their_images():
    x = images(channels=1, height=12, width=12)
    out, mask = augment_with_mask(x, x[:, 0], rng.key(5), "crop(2)+window(8)+flip+rotate(20)", mask_fill=0)
    assert out.shape == (6, 1, 8, 8)
    assert torch.equal(out[:, 0], mask)
    _, filled = augment_with_mask(x, x[:, 0], rng.key(5), "crop(2)", mask_fill=255)
    assert torch.equal((filled == 255), augment(x, rng.key(5), "crop(2)")[:, 0] == 0)


@pytest.mark.parametrize("spec", ["crop(3)+rotate(45)", "rotate(45)+crop(3)", "rotate(45)+window(6)+flip+crop(2)"])
def test_a_chain_is_its_steps_one_after_the_other(spec):
    """What one step left black stays so, though a later one may turn it back to where the image was."""
    x, chain = images(batch=40), parse(spec)
    drawn = draws(rng.key(5), x.shape, chain)
    step_by_step = x
    for place, step in enumerate(chain.steps):
        step_by_step = apply(step_by_step, None, drawn[:, place : place + 1], Augmentation((step,)))[0]
    assert torch.equal(apply(x, None, drawn, chain)[0], step_by_step)
    assert bool((step_by_step == 0).any())


def test_window_lies_inside_and_pads_what_is_too_small():
    x = images(height=12, width=20)
    assert bool((augment(x, rng.key(6), "window(12)") > 0).all())
    large = augment(x, rng.key(6), "window(16)")
    assert large.shape[2:] == (16, 16)
    assert bool((large[:, :, 12:] == 0).all())


def test_same_key_same_bits_other_key_other_bits():
    x = images(batch=32)
    first, again, other = (augment(x, rng.key(0, "augment", client), "crop(2)+flip") for client in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_what_is_not_told_has_a_default():
    assert str(parse("flip+rotate")) == "flip(0.5)+rotate(30)"


def test_none_returns_the_input_itself():
    x = images()
    assert augment(x, rng.key(0), "none") is x
    assert str(parse("")) == "none"


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("flop", "augmentation 'flop' is not known; did you mean 'flip'?"),
        ("crop", "augmentation 'crop' needs its pixels, as in crop(4)"),
        ("crop(2", "augmentation 'crop(2' cannot be read at 'crop(2'; write it like crop(2)+flip, or none"),
        ("crop(2.5)", "augmentation 'crop': pixels must be a whole number from 1 to 512, not '2.5'"),
        ("flip(x)", "augmentation 'flip': chance must be a number from 0 to 1, not 'x'"),
        ("rotate(nan)", "augmentation 'rotate': degrees must be a number from 0 to 180, not 'nan'"),
        (
            "resized_crop(low=0.9,high=0.5)",
            "augmentation 'resized_crop': low=0.9 is above high=0.5; give low up to high",
        ),
        ("resized_crop(0)", "augmentation 'resized_crop': low must be a number from 1e-06 to 1, not '0'"),
        (
            "resized_crop(lo=0.1)",
            "option of augmentation 'resized_crop' 'lo' is not known; did you mean 'low'?",
        ),
        ("flip(0.5,1)", "augmentation 'flip' takes chance and no more, not '1'"),
        ("crop(inf)", "augmentation 'crop': pixels must be a whole number from 1 to 512, not 'inf'"),
    ],
)
def test_bad_specs_are_refused(spec, text):
    with pytest.raises(ConfigError) as caught:
        parse(spec)
    assert str(caught.value) == text


def crops(shape, key, spec):
    """Top, left, height and width of what is drawn for each image."""
    drawn = draws(key, shape, parse(spec))[:, 0]
    (top, height), (left, width) = (crop_of(drawn[:, which]) for which in (0, 1))
    return torch.stack([top, left, height, width], 1).tolist()


def test_a_resized_crop_is_the_crop_at_the_size_of_the_image():
    x = (rng.bits(rng.key(8), (40, 3, 24, 20)) % 256).to(torch.uint8)
    out = augment(x, rng.key(9), "resized_crop(0.08,1)")
    for before, after, (top, left, height, width) in zip(
        x, out, crops(x.shape, rng.key(9), "resized_crop"), strict=True
    ):
        crop = before[None, :, top : top + height, left : left + width].double()
        expected = torch.nn.functional.interpolate(crop, (24, 20), mode="bilinear")[0]
        assert float((after.double() - expected).abs().max()) < 2
        assert float((after.double() - expected).mean().abs()) < 0.1


def test_a_resized_crop_of_everything_is_the_image():
    square = images(height=8, width=8)
    assert torch.equal(augment(square, rng.key(0), "resized_crop(low=1,ratio=1)"), square)
    exact = augment(square.double() / 7, rng.key(0), "resized_crop(low=1,ratio=1)")
    assert torch.equal(exact, square.double() / 7)


def test_resized_crops_lie_inside_and_have_the_area_and_the_ratio_asked_for():
    found = torch.tensor(crops((4000, 1, 64, 64), rng.key(3), "resized_crop(low=0.2,high=0.8)")).double()
    top, left, height, width = found.T
    assert bool((top >= 0).all() and (left >= 0).all() and (top + height <= 64).all() and (left + width <= 64).all())
    area, ratio = height * width / 64**2, width / height
    assert (float(area.min()) > 0.18, float(area.max()) < 0.82) == (True, True)
    assert abs(float(area.mean()) - 0.5) < 0.02
    assert (float(ratio.min()) > 0.7, float(ratio.max()) < 1.43) == (True, True)
    assert abs(float(ratio.log().mean())) < 0.02
    assert abs(float(((top + 0.5) / (65 - height)).mean()) - 0.5) < 0.02


def test_masks_of_resized_crops_keep_their_values_and_lie_on_their_images():
    square = torch.zeros(64, 1, 32, 32, dtype=torch.uint8)
    square[:, :, 8:24, 8:24] = 200
    out, mask = augment_with_mask(square, square[:, 0] // 200 * 7, rng.key(5), "resized_crop(0.3)+flip")
    assert set(mask.unique().tolist()) == {0, 7}
    sure = (out[:, 0] == 0) | (out[:, 0] == 200)
    assert torch.equal((out[:, 0] == 200)[sure], (mask == 7)[sure])
    assert float(sure.double().mean()) > 0.8
    drawn = draws(rng.key(5), square.shape, parse("resized_crop(0.3)+flip"))
    mapped = torch.vmap(lambda x, y, drawn: apply(x, y, drawn, parse("resized_crop(0.3)+flip")))(
        *(each.unflatten(0, (4, 16)) for each in (square, square[:, 0] // 200 * 7, drawn))
    )
    assert torch.equal(mapped[0].flatten(0, 1), out)
    assert torch.equal(mapped[1].flatten(0, 1), mask)


def test_an_image_that_no_crop_of_the_ratio_fits_is_taken_whole():
    assert crops((3, 1, 2, 50), rng.key(0), "resized_crop(low=1)") == [[0, 0, 2, 50]] * 3


def test_resized_crops_are_equal_in_a_program(monkeypatch):
    monkeypatch.setattr("fednorm.engines.stack.slot.DEVICES", {"cpu"})
    choices = {"train__augment": "resized_crop(low=0.3)+flip", "data": tiny.federation((8, 8, 8)), "rounds": 2}
    choices |= {"train__local_steps": 1, "eval__every": 2}
    runs = [tiny.play(tiny.plan("fedavg", engine__name=name, **choices)) for name in ("sequential", "stacked")]
    assert gap(*runs) < 1e-10
