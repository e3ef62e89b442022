"""Slow affine: gamma and beta of norms learn at a fraction of the learning rate, so clients' norms drift less."""

from fednorm.core.method import Facts, Numbers, Part
from fednorm.core.registry import register
from fednorm.core.state import Kind, Tree
from fednorm.core.step import Carry
from fednorm.pieces.changes import add_transform


def slowed(grads: Tree, carry: Carry, numbers: Numbers, facts: Facts) -> Tree:
    factor = {key: numbers["slow.factor"] for key, entry in facts.entries.items() if entry.kind is Kind.AFFINE}
    return {key: grad * factor.get(key, 1.0) for key, grad in grads.items()}


@register("slow-affine", paper="docs/adding_a_method.md", summary="train gamma and beta of norms more slowly")
def slow_affine(factor: float = 0.1) -> Part:
    return Part(add_transform(slowed, **{"slow.factor": factor}), claims=frozenset({"choice:the affine's pace"}))


if __name__ == "__main__":
    import fednorm

    print(fednorm.run(method="slow-affine(factor=0.2)+fixbn", rounds=2, train_limit=500))
