"""What a client keeps between exchanges, so that nothing it did for a server that did not take it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fednorm.core.state import Tree
from fednorm.errors import StateError


@dataclass(frozen=True)
class ClientState:
    """What a client keeps: how many batches of its life it has used, and its local entries."""

    steps: int = 0
    tree: Tree = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True, kw_only=True)
class Mine:
    """A client's own state in two generations: the one the server knows of, and the one of its last answer.

    An answer may be refused, come late or be lost. So what a client did counts only when the next request names it:
    until then both generations are kept, and the work begins again from the accepted one.
    """

    accepted: ClientState = field(default_factory=ClientState)
    exchange: int = 0
    """number of the exchange that `accepted` is the state after; 0 before the first"""
    pending: ClientState | None = None
    pending_exchange: int = 0

    def as_of(self, exchange: int) -> Mine:
        """The state after the exchange that the server names as the last it accepted."""
        if exchange == self.exchange:
            return Mine(accepted=self.accepted, exchange=self.exchange)
        if self.pending is not None and exchange == self.pending_exchange:
            return Mine(accepted=self.pending, exchange=exchange)
        raise StateError(
            f"the server goes on from this client's exchange {exchange}, but its state is that of exchange "
            f"{self.exchange}; bring back the state it had, or let it start anew (lost_state='anew')"
        )

    def answered(self, exchange: int, state: ClientState) -> Mine:
        """With the state after an answer that the server may still refuse."""
        return Mine(accepted=self.accepted, exchange=self.exchange, pending=state, pending_exchange=exchange)
