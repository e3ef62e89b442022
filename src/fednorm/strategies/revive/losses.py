"""FedRevive's losses, as functions of logits and weights: k is a teacher, j an image, n images in all."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

_LEAST = 1e-8


def teacher_weights(proportions: Tensor, labels: Tensor) -> Tensor:
    """W_k(y_j) = q_k(y_j) / sum_t q_t(y_j), from the teachers' class proportions (K, C): (K, n).

    >>> import torch
    >>> teacher_weights(torch.tensor([[0.75, 0.25], [0.25, 0.75]]), torch.tensor([0, 0, 1]))
    tensor([[0.7500, 0.7500, 0.2500],
            [0.2500, 0.2500, 0.7500]])
    """
    return (proportions / proportions.sum(0).clamp_min(_LEAST))[:, labels]


def feature_loss(gaps: Tensor, weights: Tensor) -> Tensor:
    """(1/n) sum_k [sum_j W_k(y_j)] gap_k, from each teacher's distance of statistics (K,) and the weights (K, n)."""
    return (weights.sum(1) * gaps).sum() / weights.shape[1]


def one_hot_loss(teachers: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """(1/n) sum_j sum_k W_k(y_j) CE(m_k(x_j), y_j), from the teachers' logits (K, n, C)."""
    count = len(teachers)
    each = functional.cross_entropy(teachers.flatten(0, 1), labels.repeat(count), reduction="none")
    return (weights * each.view(count, -1)).sum() / weights.shape[1]


def adversarial_loss(teachers: Tensor, student: Tensor, weights: Tensor) -> Tensor:
    """-(1/n) sum_j sum_k W_k(y_j) 1[argmax s = argmax m_k] KL(m_k || s): images on which the student is least sure."""
    agree = teachers.argmax(-1) == student.argmax(-1)
    return -(weights * agree * divergence(teachers, student)).sum() / weights.shape[1]


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(softmax(teacher) || softmax(student)) of each image, over the last axis of logits that broadcast."""
    own, other = functional.log_softmax(teacher, -1), functional.log_softmax(student, -1)
    return (own.exp() * (own - other)).sum(-1)


def distillation_loss(teachers: Tensor, students: Tensor, temperature: float = 1.0) -> Tensor:
    """sum_k KL(softmax(m_k/T) || softmax(s/T)) T^2 over all images, by their number, from logits (n, C)."""
    each = divergence(teachers / temperature, students / temperature)
    return each.sum() * temperature**2 / len(each)
