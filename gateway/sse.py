"""A thread's event log as server-sent events. The event's id is the ledger's number, so resuming is reading on.

Must never skip a number, send one twice, or keep the ledger busy for a client that has gone.
"""

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.responses import Response
from starlette.types import Send

from gateway import metrics
from gateway.http_errors import problem
from gateway.state import Gateway
from mesh.backplane.notice_board import Watch
from mesh.contract.api import EventView, IntentView
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.messages import EventKind
from mesh.contract.states import TERMINAL

PAGE_MAX = 200
_ENDS = frozenset(
    {
        EventKind.RESULT_COMMITTED,
        EventKind.INTENT_FAILED,
        EventKind.INTENT_CANCELLED,
        EventKind.INTENT_EXPIRED,
        EventKind.INTENT_DEAD,
    }
)
_RETRY_MS = 1000
NUMBER_MAX = 2**63 - 1

EVENT_STREAM: dict[str, Any] = {
    "description": "Server-sent events: `id` is the event's number, `event` its kind, `data` the event as JSON",
    "content": {
        "text/event-stream": {
            "itemSchema": {
                "type": "object",
                "required": ["data"],
                "properties": {
                    "id": {"type": "string", "description": "Send it as Last-Event-ID to go on from here"},
                    "event": {"type": "string", "description": "The kind; `problem` ends a stream that cannot go on"},
                    "data": {
                        "type": "string",
                        "contentMediaType": "application/json",
                        "contentSchema": {"$ref": "#/components/schemas/EventView"},
                    },
                    "retry": {"type": "integer", "description": "Milliseconds"},
                },
            }
        },
    },
}


class EventStream(EventSourceResponse):
    """A response that closes its source as soon as the client goes, and not when memory is collected."""

    def __init__(self, source: AsyncIterator[bytes], headers: dict[str, str] | None = None) -> None:
        super().__init__(source, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})

    async def stream_response(self, send: Send) -> None:
        """Send chunk after chunk."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self.body_iterator) as source:  # type: ignore[type-var]
            async for chunk in source:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def resume_point(header: str | None, after: int) -> tuple[int, bool]:
    """Return the number after which to begin, and whether the client is resuming (header `Last-Event-ID`).

    Raises: MeshError `invalid_request`.
    """
    if not header:
        return after, False
    if not (header.isascii() and header.isdecimal() and len(header) <= 19 and int(header) <= NUMBER_MAX):
        raise MeshError(
            ErrorCode.INVALID_REQUEST,
            "this is not the number of an event",
            field="header.Last-Event-ID",
            hint="send the id of the last event that you have received",
        )
    return int(header), True


def _wire(event: EventView) -> bytes:
    return format_sse_event(data_str=event.model_dump_json(), event=event.kind, id=str(event.number))


class _Reader:
    """One client's place in one thread's log; with `intent`, only its events, and an end."""

    def __init__(
        self, gateway: Gateway, tenant_id: str, thread_id: str, number: int, intent: IntentView | None
    ) -> None:
        self._gateway = gateway
        self._tenant_id = tenant_id
        self._thread_id = thread_id
        self._number = number
        self._intent_id = intent.intent_id if intent else None
        self._is_over = intent is not None and intent.status in TERMINAL
        self._sent_at = time.monotonic()

    async def page(self) -> list[EventView]:
        return await self._gateway.ledger.events.after(
            self._tenant_id, self._thread_id, self._number, intent_id=self._intent_id, limit=PAGE_MAX
        )

    def _take(self, event: EventView) -> bytes:
        self._number = event.number
        self._sent_at = time.monotonic()
        if self._intent_id is not None:
            if event.kind in _ENDS:
                self._is_over = True
            elif event.kind == EventKind.INTENT_REPLAYED:
                self._is_over = False
        return _wire(event)

    async def run(self, watch: Watch) -> AsyncIterator[bytes]:
        settings = self._gateway.settings
        ends_at = time.monotonic() + settings.stream_max_s
        while not self._gateway.is_closing and time.monotonic() < ends_at:
            try:
                events = await self.page()
            except MeshError as error:
                if not error.retryable:
                    yield format_sse_event(event="problem", data_str=bytes(problem(error).body).decode())
                    return
                events = []
            else:
                for event in events:
                    yield self._take(event)
                if len(events) == PAGE_MAX:
                    continue
                if self._is_over:
                    return
            if time.monotonic() - self._sent_at >= settings.ping_interval_s:
                self._sent_at = time.monotonic()
                yield KEEPALIVE_COMMENT
            await watch.wait(min(self._gateway.poll_interval_s, settings.ping_interval_s))


async def _stream(gateway: Gateway, reader: _Reader, tenant_id: str, thread_id: str) -> AsyncIterator[bytes]:
    with gateway.streams.take(tenant_id), metrics.STREAMS_OPEN.track_inprogress():
        async with gateway.board.watch(tenant_id, thread_id) as watch, aclosing(reader.run(watch)) as chunks:  # type: ignore[type-var]
            yield format_sse_event(retry=_RETRY_MS)
            async for chunk in chunks:
                yield chunk


async def stream_events(
    gateway: Gateway,
    tenant_id: str,
    thread_id: str,
    *,
    after: int = 0,
    intent: IntentView | None = None,
    is_resuming: bool = False,
    headers: dict[str, str] | None = None,
) -> Response:
    """Return the stream of a thread's events, or of one intent's, which ends with the intent.

    A client that resumes a stream which has nothing more to say gets 204, which tells a browser to stay away.
    Raises: MeshError `not_found`, `too_many_requests`, before anything is sent.
    """
    reader = _Reader(gateway, tenant_id, thread_id, after, intent)
    if is_resuming and intent is not None and intent.status in TERMINAL and not await reader.page():
        return Response(status_code=204)
    with gateway.streams.take(tenant_id):  # a refusal must come before the answer has begun
        return EventStream(_stream(gateway, reader, tenant_id, thread_id), headers)
