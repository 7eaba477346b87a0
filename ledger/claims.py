"""Claims: the nodes' side of the ledger, where the fence stands.

Every write carries the epoch that the claim minted, and touches nothing when the epoch is stale.
Must never mint an epoch outside the claim's transaction, and never judge a lease by a clock other than the
database's.
"""

from collections.abc import Sequence

from mesh.contract.messages import (
    Claim,
    Claimable,
    ClaimRequest,
    CommitResult,
    EmitEvents,
    FailAttempt,
    Heartbeat,
    HeartbeatReply,
    Settled,
)


class Claims:
    """What nodes do with intents."""

    async def claim(self, intent_id: str, request: ClaimRequest) -> Claim:
        """Take a ready intent: epoch and attempt plus one, lease begun, context built.

        Raises: MeshError `not_found`, `not_claimable` (extra: state; somebody else has it, or it is not due).
        """
        raise NotImplementedError

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Renew a node's leases and tell it what to cancel."""
        raise NotImplementedError

    async def emit(self, intent_id: str, batch: EmitEvents) -> None:
        """Append a running worker's events; tool calls enter the write-ahead log.

        Raises: MeshError `stale_epoch`, `invalid_request`.
        """
        raise NotImplementedError

    async def commit(self, intent_id: str, outcome: CommitResult) -> Settled:
        """Commit a result and its turn, exactly once; the same epoch again gets the same answer.

        Raises: MeshError `stale_epoch`; `invalid_json`, `invalid_request` or `too_large`, none of them retryable,
            when the outcome itself can never be stored: the node then fails the attempt as `result_invalid`.
        """
        raise NotImplementedError

    async def fail(self, intent_id: str, outcome: FailAttempt) -> Settled:
        """Settle an attempt without a result: retry, failed, dead, cancelled or expired.

        Raises: MeshError `stale_epoch`.
        """
        raise NotImplementedError

    async def claimable(self, node_id: str, capabilities: Sequence[str], limit: int) -> Claimable:
        """Return ready intents for a node that polls, the tenants' best in turn."""
        raise NotImplementedError
