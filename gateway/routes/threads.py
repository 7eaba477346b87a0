"""Threads: their state, turns, pins, imported history, events, and erasing them.

Must never show a thread to another tenant: to him it does not exist.
"""

from typing import Annotated

from fastapi import APIRouter, Header, Query
from pydantic import BaseModel
from starlette.responses import Response

from gateway.auth import CallerOf
from gateway.body import ImportRoute, TenantRoute
from gateway.routes.parameters import Cursor, GatewayOf, Id, Limit, NewThreadId, Page, PinKey
from gateway.sse import EVENT_STREAM, resume_point, stream_events
from mesh.contract.api import ImportMessages, OwnerBody, PinBody, PinView, ThreadView, TurnView

router = APIRouter(tags=["threads"], route_class=TenantRoute)
import_router = APIRouter(tags=["threads"], route_class=ImportRoute)


class Imported(BaseModel):
    """What became of an import. `skipped`: their `id` was known already."""

    imported: int
    skipped: int
    turn_count: int


@router.get("/threads", summary="List threads, newest first")
async def list_threads(
    caller: CallerOf, gateway: GatewayOf, cursor: Cursor = None, limit: Limit = 50
) -> Page[ThreadView]:
    """Return a page of the caller's threads."""
    items, following = await gateway.ledger.threads.list(caller.tenant_id, cursor=cursor, limit=limit)
    return Page(items=items, next=following)


@router.put(
    "/threads",
    summary="Get or create a thread by owner",
    responses={201: {"model": ThreadView, "description": "Made now"}},
)
async def put_thread(body: OwnerBody, response: Response, caller: CallerOf, gateway: GatewayOf) -> ThreadView:
    """Return the thread of a channel's conversation; 201 when it was made now."""
    thread, is_new = await gateway.ledger.threads.get_or_create_by_owner(caller.tenant_id, body)
    if is_new:
        response.status_code = 201
    response.headers["Location"] = f"/threads/{thread.thread_id}"
    return thread


@router.get("/threads/{thread_id}", summary="Look at a thread")
async def get_thread(thread_id: Id, caller: CallerOf, gateway: GatewayOf) -> ThreadView:
    """Return a thread's state."""
    return await gateway.ledger.threads.get(caller.tenant_id, thread_id)


@router.delete("/threads/{thread_id}", status_code=204, summary="Erase a thread")
async def delete_thread(thread_id: Id, caller: CallerOf, gateway: GatewayOf) -> None:
    """Erase a thread and all that came from it, in one transaction; 409 while an intent of it is unfinished."""
    await gateway.ledger.threads.delete(caller.tenant_id, thread_id)


@router.get("/threads/{thread_id}/turns", summary="Read the raw turns, oldest first")
async def turns(
    thread_id: Id, caller: CallerOf, gateway: GatewayOf, cursor: Cursor = None, limit: Limit = 50
) -> Page[TurnView]:
    """Return a page of turns as they were committed."""
    items, following = await gateway.ledger.threads.turns(caller.tenant_id, thread_id, cursor=cursor, limit=limit)
    return Page(items=items, next=following)


@import_router.post("/threads/{thread_id}/messages", summary="Import history")
async def import_messages(
    thread_id: NewThreadId, body: ImportMessages, caller: CallerOf, gateway: GatewayOf
) -> Imported:
    """Append up to 200 messages; pairs become turns, an unknown thread is made, known ids are skipped."""
    counts = await gateway.ledger.threads.import_messages(caller.tenant_id, thread_id, body)
    return Imported.model_validate(counts)


@router.get(
    "/threads/{thread_id}/events",
    summary="Follow a thread",
    response_class=Response,
    responses={200: EVENT_STREAM},
)
async def thread_events(
    thread_id: Id,
    caller: CallerOf,
    gateway: GatewayOf,
    after: Annotated[int, Query(ge=0, le=2**63 - 1, description="Begin after this event number")] = 0,
    last_event_id: Annotated[str | None, Header(description="Resume after this event; wins over `after`")] = None,
) -> Response:
    """Stream a thread's events from its first one, or from where the client stopped, for as long as it listens."""
    number, _ = resume_point(last_event_id, after)
    await gateway.ledger.threads.get(caller.tenant_id, thread_id)
    return await stream_events(gateway, caller.tenant_id, thread_id, after=number)


@router.get("/threads/{thread_id}/pins", summary="List pinned facts")
async def list_pins(thread_id: Id, caller: CallerOf, gateway: GatewayOf) -> Page[PinView]:
    """Return every pin of the thread."""
    return Page(items=await gateway.ledger.threads.pins(caller.tenant_id, thread_id))


@router.get("/threads/{thread_id}/pins/{key}", summary="Read a pinned fact")
async def get_pin(thread_id: Id, key: PinKey, caller: CallerOf, gateway: GatewayOf) -> PinView:
    """Return one pin."""
    return await gateway.ledger.threads.get_pin(caller.tenant_id, thread_id, key)


@router.put("/threads/{thread_id}/pins/{key}", summary="Pin a fact")
async def put_pin(thread_id: Id, key: PinKey, body: PinBody, caller: CallerOf, gateway: GatewayOf) -> PinView:
    """Set a pin: every context of the thread carries it word for word."""
    return await gateway.ledger.threads.put_pin(caller.tenant_id, thread_id, key, body.text)


@router.delete("/threads/{thread_id}/pins/{key}", status_code=204, summary="Unpin a fact")
async def delete_pin(thread_id: Id, key: PinKey, caller: CallerOf, gateway: GatewayOf) -> None:
    """Remove a pin."""
    await gateway.ledger.threads.delete_pin(caller.tenant_id, thread_id, key)
