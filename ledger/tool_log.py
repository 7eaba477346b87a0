"""The write-ahead log of tool effects, and the events of running workers that carry it.

A call is `started` before its effect and `finished` after it. When a new attempt begins, what is still `started`
becomes `uncertain`: perhaps it happened. Must never forget that, and never turn `uncertain` into anything else.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.locked_thread import LockedThread
from ledger.models import attempts, now_ms, tool_calls
from ledger.outcomes import cleaned
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.messages import EmitEvents, EventKind, ToolRecord, WorkerEvent

EMITTED = frozenset({EventKind.DELTA, EventKind.PROGRESS, EventKind.TOOL_STARTED, EventKind.TOOL_FINISHED})
TEXT_CHARS_MAX = 200


def _named(data: Mapping[str, Any], key: str, kind: EventKind) -> str:
    value = data.get(key)
    if not isinstance(value, str) or not 1 <= len(value) <= TEXT_CHARS_MAX:
        raise MeshError(
            ErrorCode.INVALID_REQUEST, f"{kind} needs {key}, a text of 1 to {TEXT_CHARS_MAX} characters", field=key
        )
    return value


def clean_events(events: Sequence[WorkerEvent]) -> list[WorkerEvent]:
    """Return a worker's events as they can be stored.

    Raises: MeshError `invalid_request`, `invalid_json` or `too_large`.
    """
    kept = []
    for event in events:
        if event.kind not in EMITTED:
            raise MeshError(ErrorCode.INVALID_REQUEST, f"a worker cannot say {event.kind}", field="kind")
        data, _ = cleaned(event.data, field=f"{event.kind}")
        if event.kind in (EventKind.TOOL_STARTED, EventKind.TOOL_FINISHED):
            _named(data, "call_id", event.kind)
        if event.kind is EventKind.TOOL_STARTED:
            _named(data, "name", event.kind)
        kept.append(WorkerEvent(kind=event.kind, data=data))
    return kept


async def is_new_batch(connection: AsyncConnection, intent_id: str, batch: EmitEvents) -> bool:
    """Note a batch of events under its thread's lock, and return whether it was not stored before."""
    if batch.batch_number == 0:
        return True
    noted = await connection.execute(
        update(attempts)
        .where(
            attempts.c.intent_id == intent_id,
            attempts.c.epoch == batch.epoch,
            attempts.c.batch_number < batch.batch_number,
        )
        .values(batch_number=batch.batch_number)
    )
    return noted.rowcount == 1


async def write_calls(
    connection: AsyncConnection, thread: LockedThread, intent_id: str, attempt: int, events: Sequence[WorkerEvent]
) -> None:
    """Write the tool calls among a batch of events.

    Raises: MeshError `invalid_request` for a call that ends without having begun, or begins twice.
    """
    for event in events:
        call_id = event.data.get("call_id")
        this = (tool_calls.c.intent_id == intent_id, tool_calls.c.attempt == attempt, tool_calls.c.call_id == call_id)
        if event.kind is EventKind.TOOL_STARTED:
            begun = (await connection.execute(select(tool_calls.c.call_id).where(*this))).one_or_none()
            if begun is not None:
                raise MeshError(ErrorCode.INVALID_REQUEST, f"the tool call {call_id!r} began twice", field="call_id")
            row = {
                "intent_id": intent_id,
                "attempt": attempt,
                "call_id": call_id,
                "tenant_id": thread.tenant_id,
                "name": event.data["name"],
                "arguments": json.dumps(event.data.get("arguments"), ensure_ascii=False),
                "status": "started",
                "started_at_ms": thread.now_ms,
            }
            await connection.execute(insert(tool_calls), row)
        elif event.kind is EventKind.TOOL_FINISHED:
            result = json.dumps(event.data.get("result"), ensure_ascii=False)
            done = update(tool_calls).where(*this, tool_calls.c.status == "started")
            changed = await connection.execute(done.values(status="finished", result=result, finished_at_ms=now_ms()))
            if changed.rowcount != 1:
                raise MeshError(
                    ErrorCode.INVALID_REQUEST, f"the tool call {call_id!r} ended without having begun", field="call_id"
                )


async def begin_attempt(connection: AsyncConnection, tenant_id: str, intent_id: str, attempt: int) -> list[ToolRecord]:
    """Mark what earlier attempts left open as uncertain, and return all that they did, in order."""
    await connection.execute(
        update(tool_calls)
        .where(tool_calls.c.intent_id == intent_id, tool_calls.c.attempt < attempt, tool_calls.c.status == "started")
        .values(status="uncertain")
    )
    statement = (
        select(tool_calls)
        .where(tool_calls.c.intent_id == intent_id, tool_calls.c.tenant_id == tenant_id)
        .order_by(tool_calls.c.attempt, tool_calls.c.started_at_ms, tool_calls.c.call_id)
    )
    rows = (await connection.execute(statement)).mappings()
    return [
        ToolRecord(
            call_id=row["call_id"],
            name=row["name"],
            arguments=json.loads(row["arguments"]),
            status=row["status"],
            result=None if row["result"] is None else json.loads(row["result"]),
            attempt=row["attempt"],
        )
        for row in rows
    ]
