"""Standalone: every client trains alone; nothing is exchanged."""

from fednorm.method import Part
from fednorm.pieces.changes import keep, policy_claims
from fednorm.registry import register
from fednorm.state import Kind


@register(
    "standalone",
    paper="baseline",
    summary="every client trains its own model on its own data; nothing is sent",
)
def standalone() -> Part:
    return Part(keep(**dict.fromkeys(Kind, "local")), claims=policy_claims(*Kind))
