"""The ledger over HTTP, for nodes, and its embedder for gateways that run beside it.

Must never retry by itself: whoever calls knows what a lost answer means.
"""

from collections.abc import Sequence
from typing import Any

from mesh.contract.messages import (
    Claim,
    Claimable,
    ClaimRequest,
    CommitResult,
    EmitEvents,
    FailAttempt,
    Heartbeat,
    HeartbeatReply,
    NodeWelcome,
    RegisterNode,
    Settled,
)


class LedgerClient:
    """The nodes' side of the ledger. Every method raises MeshError: the ledger's own, or `unavailable`."""

    def __init__(self, base_url: str, token: str | None, *, timeout_s: float = 5.0) -> None:
        raise NotImplementedError

    async def register(self, request: RegisterNode) -> NodeWelcome:
        """PUT /nodes/{id}."""
        raise NotImplementedError

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """POST /nodes/{id}/heartbeat."""
        raise NotImplementedError

    async def claimable(self, node_id: str, capabilities: Sequence[str], limit: int) -> Claimable:
        """GET /claimable."""
        raise NotImplementedError

    async def claim(self, intent_id: str, request: ClaimRequest) -> Claim:
        """POST /intents/{id}/claim."""
        raise NotImplementedError

    async def emit(self, intent_id: str, batch: EmitEvents) -> None:
        """POST /intents/{id}/events."""
        raise NotImplementedError

    async def commit(self, intent_id: str, outcome: CommitResult) -> Settled:
        """POST /intents/{id}/commit."""
        raise NotImplementedError

    async def fail(self, intent_id: str, outcome: FailAttempt) -> Settled:
        """POST /intents/{id}/fail."""
        raise NotImplementedError

    async def embed(self, texts: Sequence[str], *, timeout_s: float = 5.0) -> tuple[Any, str]:
        """POST /embed: unit vectors, float32[n, dimension], and the model's id."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close the connections."""
        raise NotImplementedError


class RemoteEmbedder:
    """The ledger's embedder as a port (contract.ports.Embedder)."""

    def __init__(self, client: LedgerClient) -> None:
        raise NotImplementedError
