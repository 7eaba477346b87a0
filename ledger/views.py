"""Rows of the ledger as the public API shows them.

Must never show one tenant's row for another's question: the queries have filtered, this only shapes.
"""

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from ledger.store import Row
from ledger.times import to_time
from mesh.contract.api import (
    AttemptView,
    AwardView,
    ErrorView,
    EventView,
    IntentView,
    LoserView,
    MessageView,
    PinView,
    ThreadView,
    TurnView,
)
from mesh.contract.messages import Award, PriceParts
from mesh.contract.states import State

_THREAD_STATUS = {None: "idle", "ready": "queued", "running": "running", "waiting": "waiting"}


def _links(intent_id: str, thread_id: str) -> dict[str, str]:
    intent, thread = quote(intent_id, safe=""), quote(thread_id, safe="")
    return {
        "self": f"/intents/{intent}",
        "events": f"/intents/{intent}/events",
        "cancel": f"/intents/{intent}/cancel",
        "thread": f"/threads/{thread}",
    }


def award_row(award: Award) -> dict[str, Any]:
    """Return an award as it is stored with the intent."""
    losers = [{"node_id": loser.node_id, "price": loser.price, "reason": loser.reason} for loser in award.losers]
    return {
        "node_id": award.node_id,
        "price": award.price,
        "parts": award.parts.model_dump(),
        "losers": losers,
        "awarded_at_ms": award.awarded_at_ms,
    }


def _award(row: dict[str, Any] | None) -> AwardView | None:
    if row is None:
        return None
    return AwardView(
        node_id=row["node_id"],
        price=row["price"],
        parts=PriceParts.model_validate(row["parts"]),
        losers=[LoserView.model_validate(loser) for loser in row["losers"]],
        awarded_at=to_time(row["awarded_at_ms"]),
    )


def attempt_view(row: Row) -> AttemptView:
    """Shape a row of `attempts`."""
    return AttemptView(
        attempt=row["attempt"],
        epoch=row["epoch"],
        node_id=row["node_id"],
        started_at=to_time(row["started_at_ms"]),
        ended_at=to_time(row["ended_at_ms"]),
        cause=row["cause"],
        detail=row["detail"],
        stdout=row["stdout"],
        stderr=row["stderr"],
        is_log_truncated=row["is_log_truncated"],
    )


def intent_view(row: Row, attempts: Sequence[Row] = (), result: Row | None = None) -> IntentView:
    """Shape a row of `intents`, its attempts (oldest first) and its row of `results`."""
    usage = (
        result["usage"] if result is not None else next((a["usage"] for a in reversed(attempts) if a["usage"]), None)
    )
    partial_turn = next((a["settled_turn_number"] for a in reversed(attempts)), None)
    is_retrying = row["state"] == State.READY and row["attempt"] > 0
    return IntentView(
        intent_id=row["intent_id"],
        thread_id=row["thread_id"],
        type=row["type"],
        status=State(row["state"]),
        seq=row["seq"],
        payload=row["payload"],
        metadata=row["metadata"],
        priority=row["priority"],
        budget=row["budget"],
        on_busy=row["on_busy"],
        parent_intent_id=row["parent_intent_id"],
        attempt=row["attempt"],
        max_attempts=row["max_attempts"],
        epoch=row["epoch"],
        is_cancel_requested=row["cancel_cause"] is not None,
        node_id=row["node_id"],
        award=_award(row["award"]),
        attempts=[attempt_view(attempt) for attempt in attempts],
        result=None if result is None else json.loads(result["result"]),
        error=None if row["error"] is None else ErrorView.model_validate(row["error"]),
        turn_number=partial_turn if result is None else result["turn_number"],
        usage=usage,
        receipt=row["receipt"],
        not_before=to_time(row["not_before_ms"]),
        deadline=to_time(row["deadline_ms"]),
        next_attempt_at=to_time(row["available_at_ms"]) if is_retrying else None,
        created_at=to_time(row["created_at_ms"]),
        started_at=to_time(row["started_at_ms"]),
        finished_at=to_time(row["finished_at_ms"]),
        links=_links(row["intent_id"], row["thread_id"]),
    )


def pin_view(row: Row) -> PinView:
    """Shape a row of `pins`."""
    return PinView(
        key=row["key"],
        text=row["text"],
        source_turn=row["source_turn"],
        created_at=to_time(row["created_at_ms"]),
        updated_at=to_time(row["updated_at_ms"]),
    )


def thread_view(row: Row, pins: Sequence[Row]) -> ThreadView:
    """Shape a row of `threads` (with `head_state`) and its pins."""
    return ThreadView(
        thread_id=row["thread_id"],
        channel=row["channel"],
        external_id=row["external_id"],
        url=row["url"],
        title=row["title"],
        status=_THREAD_STATUS[row["head_state"]],
        message_count=row["message_count"],
        turn_count=row["turn_count"],
        last_plan=row["last_plan"],
        last_tool_calls=row["last_tool_calls"] or {},
        contextual_memory=row["contextual_memory"] or {},
        pins=[pin_view(pin) for pin in pins],
        summary=row["summary"],
        boundaries=row["boundaries"] or [],
        last_node_id=row["last_node_id"],
        created_at=to_time(row["created_at_ms"]),
        updated_at=to_time(row["updated_at_ms"]),
    )


def message_view(row: Row) -> MessageView:
    """Shape a row of `messages`."""
    return MessageView(
        message_id=row["message_id"],
        role=row["role"],
        name=row["name"],
        content=row["content"],
        tool_calls=row["tool_calls"],
        tool_call_id=row["tool_call_id"],
        at=to_time(row["at_ms"]),
        tokens=row["tokens"],
    )


def turn_view(row: Row, messages: Sequence[Row]) -> TurnView:
    """Shape a row of `turns` and its messages in order."""
    return TurnView(
        turn_number=row["turn_number"],
        intent_id=row["intent_id"],
        mark=row["mark"],
        created_at=to_time(row["created_at_ms"]),
        messages=[message_view(message) for message in messages],
    )


def event_view(row: Row) -> EventView:
    """Shape a row of `events`."""
    return EventView(
        number=row["number"],
        kind=row["kind"],
        thread_id=row["thread_id"],
        intent_id=row["intent_id"],
        data=row["data"],
        at=to_time(row["at_ms"]),
    )
