"""Intents: submit, look, cancel, replay.

Must never answer 2xx to a submission before the ledger has committed it.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway import metrics
from gateway.auth import CallerOf
from gateway.body import TenantRoute
from gateway.routes.parameters import Cursor, GatewayOf, Id, Limit, Page
from gateway.sse import EVENT_STREAM, resume_point, stream_events
from gateway.waiting import wait_for_outcome
from mesh.contract.api import ErrorView, IntentView, SubmitIntent
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.states import TERMINAL, State

router = APIRouter(tags=["intents"], route_class=TenantRoute)


class Accepted(BaseModel):
    """The intent is durable. `seq` is its place in the thread; `status` is where it stands now."""

    intent_id: str
    thread_id: str
    status: State
    seq: int
    links: dict[str, str]


class Finished(Accepted):
    """The intent has ended, and how."""

    result: Any = None
    error: ErrorView | None = None
    turn_number: int | None = None
    usage: dict[str, Any] | None = None


class Cancelled(BaseModel):
    """`cancelled` at once, or `cancel_requested` of the node that runs it."""

    status: Literal["cancelled", "cancel_requested"]


_REPLAYED_HEADER = {
    "Idempotency-Replayed": {
        "description": "true when this Idempotency-Key was known: nothing new was made",
        "schema": {"type": "string", "enum": ["true"]},
    },
    "Location": {"description": "The intent", "schema": {"type": "string"}},
}
_SUBMIT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": Finished,
        "description": "Finished within `wait`; or, with Accept: text/event-stream, the intent's events until it ends",
        "headers": _REPLAYED_HEADER,
        "content": EVENT_STREAM["content"],
    },
    202: {"description": "Accepted: durable, not finished yet", "headers": _REPLAYED_HEADER},
}


def _wants_stream(request: Request) -> bool:
    accepted = {part.partition(";")[0].strip().lower() for part in request.headers.get("accept", "").split(",")}
    return "text/event-stream" in accepted and "application/json" not in accepted


def _answer(intent: IntentView, headers: dict[str, str]) -> Response:
    """200 with the outcome for an intent that has ended, else 202."""
    is_over = intent.status in TERMINAL
    shape = Finished if is_over else Accepted
    body = shape.model_validate(intent.model_dump(include=set(shape.model_fields)))
    return Response(body.model_dump_json(), 200 if is_over else 202, headers, media_type="application/json")


def _check_wait(wait: float, wait_max_s: float) -> None:
    if wait > wait_max_s:
        raise MeshError(
            ErrorCode.INVALID_REQUEST,
            f"waits longer than {wait_max_s:g} s are not possible here",
            field="query.wait",
            hint="wait shorter, then ask GET /intents/{id} or follow its events",
        )


@router.post(
    "/intent",
    status_code=202,
    response_model=Accepted,
    responses=_SUBMIT_RESPONSES,
    summary="Submit an intent",
)
async def submit(
    request: Request,
    body: SubmitIntent,
    caller: CallerOf,
    gateway: GatewayOf,
    wait: Annotated[float, Query(ge=0, allow_inf_nan=False, description="Seconds to wait for the outcome")] = 0,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=255,
            pattern=r"^[\x20-\x7e]+$",
            description="The same key and body again answer with the same intent",
        ),
    ] = None,
) -> Response:
    """Make an intent durable, and wait for its outcome or stream its events if asked to.

    The caller may go away at any time: the intent runs on, and the same Idempotency-Key finds it again.
    """
    _check_wait(wait, gateway.settings.wait_max_s)
    capability = await gateway.catalogue.admit(body.type, body.payload)
    submitted = await gateway.ledger.intents.submit(
        caller.tenant_id, body, capability=capability, idempotency_key=idempotency_key
    )
    metrics.INTENTS_SUBMITTED.labels(str(submitted.is_replay).lower()).inc()
    intent = submitted.intent
    headers = {"Location": f"/intents/{intent.intent_id}"}
    if submitted.is_replay:
        headers["Idempotency-Replayed"] = "true"
    if _wants_stream(request):
        return await stream_events(gateway, caller.tenant_id, intent.thread_id, intent=intent, headers=headers)
    if wait > 0:
        intent = await wait_for_outcome(gateway, request, caller.tenant_id, intent, wait)
    return _answer(intent, headers)


@router.get("/intents", summary="List intents, newest first")
async def list_intents(
    caller: CallerOf,
    gateway: GatewayOf,
    status: Annotated[State | None, Query()] = None,
    type: Annotated[str | None, Query(max_length=64)] = None,
    thread_id: Annotated[str | None, Query(max_length=128)] = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> Page[IntentView]:
    """Return a page of the caller's intents."""
    items, following = await gateway.ledger.intents.list(
        caller.tenant_id, status=status, type=type, thread_id=thread_id, cursor=cursor, limit=limit
    )
    return Page(items=items, next=following)


@router.get("/intents/{intent_id}", summary="Look at an intent")
async def get_intent(intent_id: Id, caller: CallerOf, gateway: GatewayOf) -> IntentView:
    """Return state, attempts, award, result or error, usage and times."""
    return await gateway.ledger.intents.get(caller.tenant_id, intent_id)


@router.post("/intents/{intent_id}/cancel", summary="Cancel an intent")
async def cancel(intent_id: Id, caller: CallerOf, gateway: GatewayOf) -> Cancelled:
    """Cancel at once what does not run, and ask the node of what does; a terminal one is 409 with its state."""
    return Cancelled(status=await gateway.ledger.intents.cancel(caller.tenant_id, intent_id))


@router.post("/intents/{intent_id}/replay", status_code=202, summary="Run a failed or dead intent again")
async def replay(intent_id: Id, caller: CallerOf, gateway: GatewayOf) -> Accepted:
    """Queue it at the end of its thread, with a new budget of attempts; the old attempts stay on record."""
    intent = await gateway.ledger.intents.replay(caller.tenant_id, intent_id)
    return Accepted.model_validate(intent.model_dump(include=set(Accepted.model_fields)))


@router.get(
    "/intents/{intent_id}/events",
    summary="Follow an intent until it ends",
    response_class=Response,
    responses={200: EVENT_STREAM, 204: {"description": "Resumed at the end of an intent that is over"}},
)
async def intent_events(
    intent_id: Id,
    caller: CallerOf,
    gateway: GatewayOf,
    after: Annotated[int, Query(ge=0, le=2**63 - 1, description="Begin after this event number")] = 0,
    last_event_id: Annotated[str | None, Header(description="Resume after this event; wins over `after`")] = None,
) -> Response:
    """Stream the intent's events from its first one, or from where the client stopped."""
    number, is_resuming = resume_point(last_event_id, after)
    intent = await gateway.ledger.intents.get(caller.tenant_id, intent_id)
    return await stream_events(
        gateway, caller.tenant_id, intent.thread_id, after=number, intent=intent, is_resuming=is_resuming
    )
