"""What the mesh is told after a transaction: hints, sent when it is durable and not before.

Must never make a caller wait for longer than the port takes, and never make one fail: a lost hint is found by the
sweeper and by everyone's slow poll.
"""

import asyncio
from dataclasses import dataclass, field

import structlog

from ledger.store import Row
from mesh.contract.messages import Announcement, Notice
from mesh.contract.ports import MeshPort

log = structlog.get_logger()

# The columns of an intent that an announcement needs.
ANNOUNCED = (
    "tenant_id",
    "intent_id",
    "thread_id",
    "type",
    "priority",
    "budget",
    "created_at_ms",
    "attempt",
    "available_at_ms",
)


def announcement(intent: Row, *, weight: float = 1.0) -> Announcement:
    """Return what matching needs to know of an intent's row."""
    return Announcement(
        tenant_id=intent["tenant_id"],
        tenant_weight=weight,
        intent_id=intent["intent_id"],
        thread_id=intent["thread_id"],
        capability=intent["type"],
        priority=intent["priority"],
        accepted_at_ms=intent["created_at_ms"],
        budget=intent["budget"],
        attempt=intent["attempt"],
    )


@dataclass
class Aftermath:
    """Collected while a transaction runs; thrown away with it when it fails."""

    announced: list[Announcement] = field(default_factory=list)
    forgotten: list[Announcement] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)


class Herald:
    """Sends aftermaths through the port. `weights` holds the tenants whose share is not 1; the sweeper refreshes it."""

    def __init__(self, port: MeshPort) -> None:
        self.port = port
        self.weights: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def tell(self, aftermath: Aftermath) -> None:
        """Send it, even when the caller is cancelled meanwhile."""
        if not (aftermath.announced or aftermath.forgotten or aftermath.notices):
            return
        task = asyncio.create_task(self._send(aftermath))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    def weighted(self, announcements: list[Announcement]) -> list[Announcement]:
        """Fill in the tenants' weights."""
        return [
            item
            if (weight := self.weights.get(item.tenant_id)) is None
            else item.model_copy(update={"tenant_weight": weight})
            for item in announcements
        ]

    async def _send(self, aftermath: Aftermath) -> None:
        try:
            if aftermath.forgotten:
                await self.port.forget(aftermath.forgotten)
            if aftermath.announced:
                await self.port.announce(self.weighted(aftermath.announced))
            if aftermath.notices:
                await self.port.notify(aftermath.notices)
        except Exception:  # a port promises not to raise; a broken promise must not become the caller's error
            log.exception("ledger.port_raised")

    async def close(self) -> None:
        """Wait for what is under way."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))
