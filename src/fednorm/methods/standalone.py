"""Standalone: every client trains alone; nothing is exchanged."""

from fednorm.core.method import Part
from fednorm.core.registry import register
from fednorm.core.state import Kind
from fednorm.pieces.changes import keep, policy_claims


@register(
    "standalone",
    paper="baseline",
    summary="every client trains its own model on its own data; nothing is sent",
)
def standalone() -> Part:
    return Part(keep(**dict.fromkeys(Kind, "local")), claims=policy_claims(*Kind))
