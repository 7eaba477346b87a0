"""Carries a running worker's events to the ledger: text in small batches, tool records one by one.

Must never reorder events, lose one in between, or hold a worker back for text that fits its bound: only a tool
record is waited for, and text only while the ledger is slower than the worker.
"""

import asyncio
import contextlib
from typing import Any

import structlog
from tenacity import AsyncRetrying, RetryCallState, stop_after_delay, stop_never, wait_exponential_jitter

from ledger.client import LedgerClient
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.messages import Claim, EmitEvents, EventKind, WorkerEvent

FLUSH_INTERVAL_S = 0.05
BATCH_EVENTS_MAX = 200
CLOSE_TIMEOUT_S = 2.0
# Pieces of text become one event up to this size, and a worker is held back while more than the other waits.
EVENT_CHARS_MAX = 16 * 1024
WAITING_CHARS_MAX = 256 * 1024
# What an event weighs beside its text, so that many small ones count too.
EVENT_CHARS_BASE = 100
# A ledger that fails in itself may do better the next time, but a call that it always fails at must end.
INTERNAL_TRIES_MAX = 4

log = structlog.get_logger()


def _may_be_repeated(state: RetryCallState) -> bool:
    error = state.outcome.exception() if state.outcome is not None else None
    if not isinstance(error, MeshError):
        return False
    return error.retryable or (error.code is ErrorCode.INTERNAL and state.attempt_number < INTERNAL_TRIES_MAX)


def until_accepted(*, patience_s: float | None = None) -> AsyncRetrying:
    """Return the loop that repeats a ledger call while the ledger is away; the last error is raised in the end.

    Args:
        patience_s: how long to repeat; None for as long as the caller is not cancelled.
    """
    return AsyncRetrying(
        retry=_may_be_repeated,
        stop=stop_never if patience_s is None else stop_after_delay(patience_s),
        wait=wait_exponential_jitter(multiplier=0.1, max=2.0, jitter=0.2),
        reraise=True,
    )


def _chars(event: WorkerEvent) -> int:
    said = event.data.get("text") or event.data.get("note")
    return EVENT_CHARS_BASE + (len(said) if isinstance(said, str) else 0)


def _joined(earlier: WorkerEvent, later: WorkerEvent) -> WorkerEvent | None:
    """Return two neighbours as one, where that loses nothing that anybody waits for."""
    if earlier.kind is EventKind.DELTA and later.kind is EventKind.DELTA:
        text = earlier.data["text"] + later.data["text"]
        return WorkerEvent(kind=later.kind, data={"text": text}) if len(text) <= EVENT_CHARS_MAX else None
    # Of how far the work is, only the newest word counts.
    return later if earlier.kind is EventKind.PROGRESS and later.kind is EventKind.PROGRESS else None


class EventPump:
    """The event queue of one attempt."""

    def __init__(self, ledger: LedgerClient, claim: Claim, node_id: str) -> None:
        self._ledger = ledger
        self._claim = claim
        self._node_id = node_id
        self._waiting: list[WorkerEvent] = []
        self._waiting_chars = 0
        # Kept until the ledger has it, so that a cancelled flush leaves no gap: the next one sends it again.
        self._batch: EmitEvents | None = None
        self._batches = 0
        self._sending = asyncio.Lock()
        self._timer: asyncio.Task[None] | None = None
        self.failure: MeshError | None = None

    async def put(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Queue an event; it leaves with the next batch. Pieces of text that follow each other become one, and of
        progress the newest counts.

        Raises: MeshError `stale_epoch` when this attempt is no longer the thread's.
        """
        if self.failure is not None:
            if self.failure.code is ErrorCode.STALE_EPOCH:
                raise self.failure
            return
        self._append(WorkerEvent(kind=kind, data=data))
        if self._timer is None or self._timer.done():
            self._timer = asyncio.create_task(self._flush_soon())
        if self._waiting_chars > WAITING_CHARS_MAX:
            with contextlib.suppress(MeshError):  # the next `put` tells
                await self.flush()

    def _append(self, event: WorkerEvent) -> None:
        last = self._waiting[-1] if self._waiting else None
        if last is not None and (joined := _joined(last, event)) is not None:
            self._waiting_chars -= _chars(last)
            self._waiting.pop()
            event = joined
        self._waiting_chars += _chars(event)
        self._waiting.append(event)

    async def put_and_wait(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Queue an event and return when the ledger has committed it, and all before it.

        Raises: MeshError `stale_epoch` when this attempt is no longer the thread's, or what the ledger has against
            the event.
        """
        self._append(WorkerEvent(kind=kind, data=data))
        await self.flush()

    async def flush(self) -> None:
        """Send what waits.

        Raises: MeshError when the ledger refused for good.
        """
        async with self._sending:
            while self.failure is None and (self._batch is not None or self._waiting):
                message = self._batch = self._batch or self._next_batch()
                try:
                    async for attempt in until_accepted():
                        with attempt:
                            await self._ledger.emit(self._claim.intent_id, message)
                except MeshError as error:
                    self.failure = error
                    self._waiting.clear()
                self._batch = None
        if self.failure is not None:
            raise self.failure

    def _next_batch(self) -> EmitEvents:
        events = self._waiting[:BATCH_EVENTS_MAX]
        del self._waiting[:BATCH_EVENTS_MAX]
        self._waiting_chars = sum(map(_chars, self._waiting))
        self._batches += 1
        return EmitEvents(node_id=self._node_id, epoch=self._claim.epoch, events=events, batch_number=self._batches)

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
