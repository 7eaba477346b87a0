"""Carries a running worker's events to the ledger: text in small batches, tool records one by one.

Must never reorder events, and never hold a worker back for text: only a tool record is waited for.
"""

import asyncio
import contextlib
from typing import Any

import structlog
from tenacity import AsyncRetrying, retry_if_exception, wait_exponential_jitter

from ledger.client import LedgerClient
from mesh.contract.errors import MeshError
from mesh.contract.messages import Claim, EmitEvents, EventKind, WorkerEvent

FLUSH_INTERVAL_S = 0.05
BATCH_EVENTS_MAX = 200
CLOSE_TIMEOUT_S = 2.0

log = structlog.get_logger()


def is_retryable(error: BaseException) -> bool:
    """Whether the ledger may accept the same call later."""
    return isinstance(error, MeshError) and error.retryable


def until_accepted() -> AsyncRetrying:
    """Return the loop that repeats a ledger call while the ledger is away; the lease's end cancels it."""
    return AsyncRetrying(
        retry=retry_if_exception(is_retryable),
        wait=wait_exponential_jitter(initial=0.1, max=2.0, jitter=0.2),
        reraise=True,
    )


class EventPump:
    """The event queue of one attempt."""

    def __init__(self, ledger: LedgerClient, claim: Claim, node_id: str) -> None:
        self._ledger = ledger
        self._claim = claim
        self._node_id = node_id
        self._waiting: list[WorkerEvent] = []
        self._sending = asyncio.Lock()
        self._timer: asyncio.Task[None] | None = None
        self._batches = 0
        self.failure: MeshError | None = None

    def put(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Queue an event; it leaves with the next batch. Pieces of text that follow each other become one."""
        last = self._waiting[-1] if self._waiting else None
        if kind is EventKind.DELTA and last is not None and last.kind is EventKind.DELTA:
            self._waiting[-1] = WorkerEvent(kind=kind, data={"text": last.data["text"] + data["text"]})
        else:
            self._waiting.append(WorkerEvent(kind=kind, data=data))
        if self._timer is None or self._timer.done():
            self._timer = asyncio.create_task(self._flush_soon())

    async def put_and_wait(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Queue an event and return when the ledger has committed it, and all before it.

        Raises: MeshError `stale_epoch` when this attempt is no longer the thread's.
        """
        self._waiting.append(WorkerEvent(kind=kind, data=data))
        await self.flush()

    async def flush(self) -> None:
        """Send what waits.

        Raises: MeshError when the ledger refused for good.
        """
        async with self._sending:
            while self._waiting and self.failure is None:
                batch = self._waiting[:BATCH_EVENTS_MAX]
                del self._waiting[:BATCH_EVENTS_MAX]
                self._batches += 1
                message = EmitEvents(
                    node_id=self._node_id, epoch=self._claim.epoch, events=batch, batch_number=self._batches
                )
                try:
                    async for attempt in until_accepted():
                        with attempt:
                            await self._ledger.emit(self._claim.intent_id, message)
                except MeshError as error:
                    self.failure = error
        if self.failure is not None:
            raise self.failure

    async def _flush_soon(self) -> None:
        await asyncio.sleep(FLUSH_INTERVAL_S)
        try:
            await self.flush()
        except MeshError as error:
            log.warning("events_refused", intent_id=self._claim.intent_id, code=error.code)

    async def close(self) -> None:
        """Send what still waits, for a moment: the outcome holds the whole text, so a ledger that is away loses nothing."""
        with contextlib.suppress(MeshError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.flush()
        if self._timer is not None:
            self._timer.cancel()
            await asyncio.gather(self._timer, return_exceptions=True)
