"""FedRevive's functions on tensors small enough to work out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fednorm.core import rng
from fednorm.core.method import Facts
from fednorm.core.state import Kind, entries, model_state
from fednorm.errors import ConfigError
from fednorm.layers.keyed import KeyedDropout, number_keyed_layers
from fednorm.layers.stat_tracker import StatTracker
from fednorm.strategies import parse
from fednorm.strategies.revive.distil import distil
from fednorm.strategies.revive.features import gap, moments, seen_by
from fednorm.strategies.revive.generator import bare_generator, first_parameters, images_of
from fednorm.strategies.revive.guard import LossGuard
from fednorm.strategies.revive.inputs import Inputs
from fednorm.strategies.revive.losses import (
    adversarial_loss,
    distillation_loss,
    feature_loss,
    one_hot_loss,
    teacher_weights,
)
from fednorm.strategies.revive.network import Network
from fednorm.strategies.revive.objective import Cast
from fednorm.strategies.revive.pool import ImagePool, draw_labels
from fednorm.strategies.revive.reviser import Revive
from fednorm.strategies.revive.settings import Settings
from fednorm.strategies.revive.synthesis import fresh_buffers, reptile, synthesise
from fednorm.strategies.revive.teachers import Belief, Teacher, probe, with_teacher

CPU = torch.device("cpu")


def logits(*rows: tuple[float, ...]) -> Tensor:
    """Logits whose softmax is these rows."""
    return torch.tensor(rows, dtype=torch.float64).log()


# -- losses --


def test_a_class_no_teacher_has_weighs_nothing() -> None:
    proportions = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
    found = teacher_weights(proportions, torch.tensor([0, 1, 2]))
    assert found.tolist() == [[0.5, 0.0, 0.0], [0.5, 0.0, 0.0], [0.0, 1.0, 0.0]]


def test_the_feature_loss_weighs_teachers_by_their_images() -> None:
    weights = torch.tensor([[1.0, 0.5], [0.0, 0.5]])
    assert feature_loss(torch.tensor([2.0, 4.0]), weights).item() == (1.5 * 2 + 0.5 * 4) / 2


def test_the_one_hot_loss_is_the_weighted_cross_entropy() -> None:
    teachers = torch.stack([logits((0.5, 0.5), (0.25, 0.75)), logits((0.125, 0.875), (0.5, 0.5))])
    weights = torch.tensor([[0.75, 0.5], [0.25, 0.5]], dtype=torch.float64)
    by_hand = (0.75 * math.log(2) + 0.25 * math.log(8) + 0.5 * math.log(4) + 0.5 * math.log(2)) / 2
    assert one_hot_loss(teachers, torch.tensor([0, 0]), weights).item() == pytest.approx(by_hand, rel=1e-14)


def test_the_adversarial_loss_counts_where_teacher_and_student_agree() -> None:
    teachers = torch.stack([logits((0.75, 0.25), (0.75, 0.25))])
    student = logits((0.5625, 0.4375), (0.25, 0.75))  # it agrees on the first image alone
    by_hand = 0.75 * math.log(0.75 / 0.5625) + 0.25 * math.log(0.25 / 0.4375)
    found = adversarial_loss(teachers, student, torch.ones(1, 2, dtype=torch.float64))
    assert found.item() == pytest.approx(-by_hand / 2, rel=1e-12)


def test_the_distillation_loss_is_a_mean_over_all_images_with_temperature() -> None:
    teacher, student = logits((0.75, 0.25)), logits((0.5, 0.5))
    alone = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert distillation_loss(teacher, student).item() == pytest.approx(alone, rel=1e-12)
    same = logits((0.5, 0.5), (0.25, 0.75))
    assert distillation_loss(torch.cat([teacher, same]), torch.cat([student, same])).item() == pytest.approx(
        alone / 3, rel=1e-12
    )
    cooled = distillation_loss(2 * teacher, 2 * student, temperature=2.0)
    assert cooled.item() == pytest.approx(4 * alone, rel=1e-12)


# -- what layers see --


def network(*layers: nn.Module) -> Network:
    model = nn.Sequential(*layers).eval()
    return Network(model, Facts({entry.key: entry for entry in entries(model)}, frozenset()))


def test_the_gap_is_the_distance_of_means_and_variances_at_every_tracker() -> None:
    made = network(StatTracker(2), nn.ReLU(), StatTracker(2))
    tree = model_state(made.model)
    tree["0.running_mean"], tree["0.running_var"] = torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    tree["2.running_mean"], tree["2.running_var"] = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])
    x = torch.tensor([[1.0, -4.0], [3.0, -4.0]])  # means 2, -4; variances 1, 0; behind the ReLU 2, 0 and 1, 0
    watched = made.watched("tracker")
    with seen_by(made, watched) as seen:
        made(tree, x)
    assert gap(made, watched, tree, seen).item() == pytest.approx(math.sqrt(4 + 16) + math.sqrt(0 + 1))
    assert made.watched("bn") == made.watched("none") == ()


@pytest.mark.parametrize(("shape", "axis"), [((6, 3), 1), ((4, 3, 5, 2), 1), ((2, 5, 3), -1)])
def test_the_slope_of_moments_is_that_of_torch_s_own(shape: tuple[int, ...], axis: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    others = [each for each in range(x.dim()) if each != axis % x.dim()]
    expected = torch.stack([x.mean(others), x.var(others, correction=0)])
    found, weights = moments(x, axis), torch.randn(2, 3, dtype=torch.float64)
    assert torch.allclose(found, expected, atol=1e-14)
    (slope,) = torch.autograd.grad((weights * expected).sum(), x)
    (own,) = torch.autograd.grad((weights * found).sum(), x)
    assert torch.allclose(own, slope, atol=1e-14)


def test_where_statistics_are_met_the_gap_is_none_and_level() -> None:
    made = network(StatTracker(2))
    x = torch.tensor([[1.0, -4.0], [3.0, -4.0]], requires_grad=True)
    tree = model_state(made.model)
    tree["0.running_mean"], tree["0.running_var"] = torch.tensor([2.0, -4.0]), torch.tensor([1.0, 0.0])
    watched = made.watched("tracker")
    with seen_by(made, watched) as seen:
        made(tree, x)
    found = gap(made, watched, tree, seen)
    assert found.item() == 0
    assert torch.autograd.grad(found, x)[0].tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_batch_norms_are_watched_at_their_input() -> None:
    made = network(nn.BatchNorm1d(2), StatTracker(2))
    tree = {**model_state(made.model), "0.running_mean": torch.tensor([3.0, 4.0])}
    x = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    with seen_by(made, made.watched("bn")) as seen:
        made(tree, x)
    assert gap(made, made.watched("bn"), tree, seen).item() == 5.0


def test_a_batch_norm_without_statistics_uses_the_batch_and_leaves_no_trace() -> None:
    made = network(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    tree = model_state(made.model)
    kept = {key: value.clone() for key, value in tree.items()}
    x = torch.randn(8, 2)
    known = {key: value for key, value in tree.items() if not key.startswith("1")}
    assert made.mode_of(tree) == "still"
    assert made.mode_of(known) == "batch"
    out = made(tree, x, "batch")
    assert torch.allclose(out.mean(0), torch.zeros(2), atol=1e-6)
    assert all(kept[key].equal(tree[key]) for key in tree)
    assert not any(module.training for module in made.model.modules())


def test_random_layers_draw_from_the_key_and_nowhere_else() -> None:
    made = network(nn.Linear(4, 64), KeyedDropout(0.5), nn.Hardtanh())
    number_keyed_layers(made.model)
    tree, x = model_state(made.model), torch.ones(2, 4)
    before = torch.random.get_rng_state()
    first, again, other = (made(tree, x, "train", rng.key(seed)) for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)
    assert torch.random.get_rng_state().equal(before)


def test_a_network_as_narrow_as_the_clients_is_near_the_wide_one_and_answers_as_wide() -> None:
    torch.manual_seed(0)
    wide = network(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), StatTracker(8), nn.Flatten(), nn.Linear(8 * 16, 3))
    narrow = replace(wide, narrow=torch.bfloat16)
    tree, x = model_state(wide.model), torch.randn(16, 1, 6, 6)
    for mode in ("still", "batch", "train"):
        expected, found = wide(tree, x, mode, rng.key(0)), narrow(tree, x, mode, rng.key(0))
        assert found.dtype == torch.float32
        assert not found.equal(expected)
        assert torch.allclose(found, expected, atol=0.02)
    watched = wide.watched("tracker")
    gaps: list[Tensor] = []
    for made in (wide, narrow):
        with seen_by(made, watched) as seen:
            made(tree, x)
        gaps.append(gap(made, watched, tree, seen))
    assert gaps[0].dtype == gaps[1].dtype == torch.float32
    assert gaps[1].item() == pytest.approx(gaps[0].item(), rel=0.01)


# -- guard --


def test_the_guard_leaves_out_what_is_not_finite_or_three_times_the_mean() -> None:
    guard = LossGuard()
    for _ in range(9):
        assert guard("a", torch.tensor(1.0)).item() == 1.0
    assert guard("a", torch.tensor(4.0)).item() == 4.0  # nine values are too few to judge
    assert guard("a", torch.tensor(3.95)).item() == 0.0  # three times 1.3 is 3.9
    assert guard("a", torch.tensor(3.85)).item() == torch.tensor(3.85).item()
    assert guard("a", torch.tensor(math.nan)).item() == 0.0
    assert guard("a", torch.tensor(math.inf)).item() == 0.0
    assert guard("b", torch.tensor(100.0)).item() == 100.0
    assert len(guard.accepted["a"]) == 11


def test_the_guard_remembers_the_last_twenty_and_judges_by_size() -> None:
    guard = LossGuard()
    for value in range(30):
        guard("a", torch.tensor(-1.0 - value / 100))
    assert guard.accepted["a"] == [pytest.approx(-1.0 - value / 100) for value in range(10, 30)]
    assert guard("a", torch.tensor(-5.0)).item() == 0.0


def test_what_the_guard_leaves_out_has_no_gradient() -> None:
    x = torch.tensor(math.inf, requires_grad=True)
    assert not LossGuard()("a", x).requires_grad


# -- pool and labels --


def test_the_pool_keeps_the_newest_as_bytes() -> None:
    pool = ImagePool(3, (1, 1, 1), CPU)
    pool.add(torch.tensor([0.0, 0.2, 0.4]).view(3, 1, 1, 1), torch.tensor([0, 1, 1]))
    pool.add(torch.tensor([1.0, 0.6]).view(2, 1, 1, 1), torch.tensor([2, 0]))
    assert pool.labels.tolist() == [1, 2, 0]
    assert pool.images.flatten().tolist() == [102, 255, 153]


def test_images_are_drawn_by_label_or_else_any() -> None:
    pool = ImagePool(100, (1, 1, 1), CPU)
    labels = torch.arange(60) % 3
    pool.add((labels / 255).view(-1, 1, 1, 1), labels)  # an image shows its label
    wanted = torch.tensor([0, 1, 2] * 50)
    drawn = pool.draw(rng.key(1), wanted, 4)
    assert (drawn.flatten() * 255).round().long().equal(wanted)
    lost = pool.draw(rng.key(1), torch.full((200,), 3), 4)
    assert set((lost.flatten() * 255).round().int().tolist()) == {0, 1, 2}
    assert drawn.equal(pool.draw(rng.key(1), wanted, 4))


def test_several_keys_draw_as_each_does_alone() -> None:
    pool = ImagePool(100, (1, 6, 6), CPU)
    pool.add(torch.rand(60, 1, 6, 6), torch.arange(60) % 3)
    keys, proportions = rng.key(1, torch.arange(2)), torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]])
    labels = draw_labels(keys, proportions, 20)
    images = pool.draw(rng.key(keys, "images"), labels, 3)
    inputs = Inputs("crop(2)+flip", (0.5,), (0.2,))(images, rng.key(keys, "augment"))
    for row, own in enumerate(proportions):
        key = rng.key(1, row)
        assert draw_labels(key, own, 20).equal(labels[row])
        assert pool.draw(rng.key(key, "images"), labels[row], 3).equal(images[row])
        assert Inputs("crop(2)+flip", (0.5,), (0.2,))(images[row], rng.key(key, "augment")).equal(inputs[row])


def test_labels_come_in_their_proportions() -> None:
    labels = draw_labels(rng.key(3), torch.tensor([0.5, 0.0, 0.25, 0.25]), 4000)
    shares = torch.bincount(labels, minlength=4) / 4000
    assert shares[1] == 0
    assert torch.allclose(shares, torch.tensor([0.5, 0.0, 0.25, 0.25]), atol=0.03)


# -- generator --


def test_images_have_their_shape_and_lie_between_0_and_1() -> None:
    for shape in ((3, 32, 32), (1, 28, 28), (2, 6, 9)):
        images = images_of(bare_generator(8, 4, shape), first_parameters(8, 4, shape, 0), torch.randn(5, 8))
        assert images.shape == (5, *shape)
        assert images.min() >= 0
        assert images.max() <= 1


def test_the_published_generator_has_its_size() -> None:
    found = {key: tuple(value.shape) for key, value in first_parameters(256, 128, (3, 32, 32), 0).items()}
    assert found["linear.weight"] == (256 * 8 * 8, 256)
    convs = [shape for shape in found.values() if len(shape) == 4]
    assert convs == [(256, 256, 3, 3), (128, 256, 3, 3), (3, 128, 3, 3)]


def test_the_first_parameters_are_a_function_of_the_seed_and_leave_torch_s_generator() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (first_parameters(4, 2, (1, 8, 8), seed)["linear.weight"] for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)
    assert torch.random.get_rng_state().equal(before)


def test_a_reptile_step_is_a_step_of_adam_towards_the_fast_copy() -> None:
    parameters = {"a": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    fast = {"a": torch.tensor([0.5, 2.5], dtype=torch.float64)}
    moved, buffers = reptile(parameters, fast, fresh_buffers(parameters), lr=0.1)
    # Adam's first step is lr * sign of the gradient, which is G - G' = (0.5, -0.5).
    assert torch.allclose(moved["a"], torch.tensor([0.9, 2.1], dtype=torch.float64), atol=1e-7)
    assert buffers["exp_avg:a"].tolist() == [0.25, -0.25]  # beta1 is 0.5
    assert torch.allclose(buffers["exp_avg_sq:a"], torch.tensor([0.00025, 0.00025], dtype=torch.float64))
    again, _ = reptile(moved, fast, buffers, lr=0.1)
    first, second = 0.5 * 0.25 + 0.5 * 0.4, 0.999 * 0.00025 + 0.001 * 0.4**2
    step = 0.1 / (1 - 0.5**2) * first / (math.sqrt(second / (1 - 0.999**2)) + 1e-8)
    assert again["a"][0].item() == pytest.approx(moved["a"][0].item() - step, rel=1e-8)


# -- synthesis and distillation --


def teachers() -> tuple[Network, list[Teacher]]:
    made = network(nn.Flatten(), nn.Linear(16, 3), StatTracker(3))
    tree = model_state(made.model)
    return made, [
        Teacher(0, {**tree, "1.bias": torch.tensor([3.0, 0.0, 0.0])}, torch.tensor([1.0, 0.0, 0.0])),
        Teacher(1, {**tree, "1.bias": torch.tensor([0.0, 3.0, 0.0])}, torch.tensor([0.0, 1.0, 0.0])),
    ]


def test_synthesis_is_a_function_of_its_key_and_changes_nothing_it_was_given() -> None:
    made, several = teachers()
    settings = Settings(batch=8, latent=4, width=2, crop=1)
    parameters = first_parameters(4, 2, (1, 4, 4), 0)
    kept = {key: value.clone() for key, value in parameters.items()}

    def play(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        cast = Cast(made, several, several[0].tree)
        generator = bare_generator(4, 2, (1, 4, 4))
        found = synthesise(
            settings, cast, generator, parameters, Inputs("crop(1)"), LossGuard(), rng.key(seed), adversarial=True
        )
        assert len(found.losses) == 2
        assert found.losses[0].keys() == {"feature", "one_hot", "adversarial"}
        return found.images, found.labels, found.fast["linear.weight"]

    first, again, other = play(1), play(1), play(2)
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert not first[0].equal(other[0])
    assert set(first[1].tolist()) <= {0, 1}  # the classes of the teachers
    assert all(kept[key].equal(parameters[key]) for key in kept)
    assert not first[2].equal(parameters["linear.weight"])


def test_narrow_synthesis_makes_nearly_the_same_images() -> None:
    made, several = teachers()
    settings = Settings(batch=8, latent=4, width=4, crop=1)
    parameters = first_parameters(4, 4, (1, 4, 4), 0)
    found = [
        synthesise(
            settings,
            Cast(replace(made, narrow=narrow), several, several[0].tree),
            bare_generator(4, 4, (1, 4, 4)),
            parameters,
            Inputs("crop(1)"),
            LossGuard(),
            rng.key(1),
            adversarial=True,
        )
        for narrow in (None, torch.bfloat16)
    ]
    assert found[1].images.dtype == torch.float32
    assert not found[0].images.equal(found[1].images)
    assert torch.allclose(found[0].images, found[1].images, atol=0.05)
    assert found[1].losses[0] == pytest.approx(found[0].losses[0], rel=0.05)
    for value in found[1].fast.values():
        assert value.dtype == torch.float32
        assert value.isfinite().all()


def test_distillation_trains_its_keys_alone_towards_the_teachers() -> None:
    made, several = teachers()
    student = model_state(made.model)
    settings = Settings(kd_batch=4, kd_steps=5, kd_lr=0.05, kd_decay=0.0)

    def draw(key: Tensor, labels: Tensor) -> Tensor:
        return rng.uniform(key, (labels.shape[-1], 1, 4, 4))

    found = distil(settings, made, several[:1], student, ["1.bias"], draw, LossGuard(), rng.key(1))
    assert found.trained.keys() == {"1.bias"}
    assert found.losses[-1] < found.losses[0]
    moved = found.trained["1.bias"] - student["1.bias"]
    assert moved[0] > 0 > moved[1]
    assert student["2.running_mean"].tolist() == [0.0, 0.0, 0.0]  # its statistics were thrown away


# -- teachers --


def test_the_newest_teachers_are_kept_and_beliefs_hold_for_older_models() -> None:
    old = [Teacher(client, {}, torch.tensor([0.5, 0.5])) for client in (0, 1, 2)]
    found = with_teacher(old, Teacher(1, {}, torch.tensor([1.0, 0.0])), most=3)
    assert [each.client for each in found] == [1, 0, 1]
    assert [each.proportions.tolist() for each in found] == [[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]]


def test_a_probe_is_the_mean_softmax_and_a_belief_the_mean_of_probes() -> None:
    made = network(nn.Identity(), nn.Linear(2, 2, bias=False))
    tree = {"1.weight": torch.eye(2)}
    x = torch.tensor([[0.8 * math.log(3), 0.0], [0.0, 0.0]])
    found = probe(made, tree, "still", x, temperature=0.8)
    assert torch.allclose(found, torch.tensor([(0.75 + 0.5) / 2, (0.25 + 0.5) / 2], dtype=torch.float64), atol=1e-7)
    twice = Belief(torch.zeros(2)).after(torch.tensor([1.0, 0.0])).after(torch.tensor([0.5, 0.5]))
    assert twice.proportions.tolist() == [0.75, 0.25]
    assert twice.uploads == 2


# -- options --


@pytest.mark.parametrize(
    ("schedule", "staleness", "beta"),
    [
        ("cosine", 0, 0.0),
        ("cosine", 75, 0.5),
        ("cosine", 50, 0.25),
        ("cosine", 151, 1.0),
        ("constant", 0, 0.5),
        ("linear", 100, 0.5),
        ("linear", 300, 1.0),
        ("exponential", 200, 1 - math.exp(-1)),
        ("stepwise", 37, 0.0),
        ("stepwise", 38, 0.25),
        ("stepwise", 149, 0.75),
        ("stepwise", 150, 1.0),
    ],
)
def test_the_share_of_distillation_rises_with_staleness(schedule: str, staleness: int, beta: float) -> None:
    revise = parse(f"fedrevive(schedule={schedule})").revise
    assert isinstance(revise, Revive)
    assert revise.settings.beta(staleness) == pytest.approx(beta, abs=1e-15)


def test_the_defaults_are_those_published_for_cifar_10() -> None:
    strategy = parse("fedrevive")
    assert isinstance(strategy.revise, Revive)
    assert strategy.revise.settings == Settings()
    assert (strategy.buffer, strategy.rate) == (1, 0.1)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("steps=0", "steps=0 is out of range; give 1 or more"),
        ("kd_lr=0.0", "kd_lr=0.0 is out of range; give a number above 0"),
        ("feature=-1.0", "feature=-1.0 is out of range; give 0 or more"),
        ("share=1.5", "share=1.5 is out of range; give 0 up to 1"),
    ],
)
def test_an_option_out_of_range_is_refused_in_one_line(option: str, text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(f"fedrevive({option})")
    assert str(refusal.value) == f"'fedrevive({option})': {text}"


def test_a_student_trains_with_statistics_that_are_held_where_clients_do() -> None:
    made = network(nn.BatchNorm1d(2))
    tree = {**model_state(made.model), "0.running_mean": torch.tensor([1.0, 2.0])}
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    held = replace(made, hold=frozenset({Kind.STATISTIC}))
    assert held(tree, x, "train", rng.key(0)).equal(made(tree, x, "still"))
    assert not made(tree, x, "train", rng.key(0)).equal(made(tree, x, "still"))
