"""How an intent leaves a state while its thread is locked; used by callers, nodes and the sweeper alike.

Must never be called with a row that was read before the thread's lock was taken.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, case, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.aftermath import ANNOUNCED, Aftermath, announcement
from ledger.decisions import Verdict
from ledger.locked_thread import LockedThread
from ledger.models import attempts, intents
from ledger.store import Row
from ledger.times import to_text
from ledger.turns import PreparedMessage, insert_turns
from mesh.contract.api import ErrorView
from mesh.contract.errors import Cause
from mesh.contract.messages import AttemptLog, EventKind, Usage
from mesh.contract.states import HEAD, Event, State, advance

# The columns that settling needs.
SETTLED = tuple(
    intents.c[name]
    for name in (
        *ANNOUNCED,
        "seq",
        "state",
        "epoch",
        "max_attempts",
        "attempts_per_run",
        "node_id",
        "lease_until_ms",
        "cancel_cause",
        "deadline_ms",
        "not_before_ms",
        "payload",
    )
)
_KINDS = {
    Event.FAIL: EventKind.INTENT_FAILED,
    Event.BURY: EventKind.INTENT_DEAD,
    Event.CANCEL: EventKind.INTENT_CANCELLED,
    Event.EXPIRE: EventKind.INTENT_EXPIRED,
}
_HINTS = {
    Cause.MODEL_NOT_CONFIGURED: "set INTENTMESH_LLM_BASE_URL and INTENTMESH_LLM_MODEL on the nodes, then replay it",
    Cause.OOM_KILLED: "raise limits.memory_mb in the capability's template.yaml, then replay it",
    Cause.TIMED_OUT: "raise limits.timeout_s in the capability's template.yaml, then replay it",
    Cause.DEADLINE_PASSED: "submit it again with a later deadline; when no attempt was made, with a higher budget too",
    Cause.HANDLER_FAILED: "GET /intents/{id} holds each attempt's log; mend the handler, then replay it",
    Cause.WORKER_CRASHED: "GET /intents/{id} holds each attempt's log; mend the handler, then replay it",
    Cause.NO_RESULT: "let the program write a result frame before it ends, then replay it",
    Cause.FRAME_TOO_LARGE: "keep what is large elsewhere and return where it is, then replay it",
    Cause.RESULT_INVALID: "let the handler return JSON, then replay it",
    Cause.SPAWN_FAILED: "run 'intentmesh capability check' on the capability, mend it, then replay the intent",
}


def in_state(*states: State) -> ColumnElement[bool]:
    """Return `state IN (…)` with the states written out, so that the partial indexes are used."""
    return intents.c.state.in_([literal_column(f"'{state}'") for state in states])


async def read_locked(connection: AsyncConnection, thread: LockedThread, intent_id: str) -> Row | None:
    """Return an intent of a locked thread: nobody changes its state until the transaction ends."""
    statement = select(*SETTLED).where(intents.c.intent_id == intent_id, intents.c.tenant_id == thread.tenant_id)
    return (await connection.execute(statement)).mappings().one_or_none()


async def promote_next(
    connection: AsyncConnection, thread: LockedThread, aftermath: Aftermath, *, announce_again_ms: int
) -> None:
    """Make the oldest waiting intent of a thread that has lost its head the head."""
    oldest = (
        select(intents.c.intent_id)
        .where(
            intents.c.tenant_id == thread.tenant_id, intents.c.thread_id == thread.thread_id, in_state(State.ACCEPTED)
        )
        .order_by(intents.c.seq)
        .limit(1)
        .scalar_subquery()
    )
    available, now_ms = intents.c.available_at_ms, thread.now_ms
    statement = (
        update(intents)
        .where(intents.c.intent_id == oldest)
        .values(
            state=advance(State.ACCEPTED, Event.REACH_HEAD),
            # Due already: announced right after this transaction, and by the sweeper only if nobody took it.
            announce_after_ms=case((available <= now_ms, now_ms + announce_again_ms), else_=available),
        )
        .returning(*(intents.c[name] for name in ANNOUNCED))
    )
    row = (await connection.execute(statement)).mappings().one_or_none()
    thread.change(head_intent_id=None if row is None else row["intent_id"])
    if row is not None and row["available_at_ms"] <= thread.now_ms:
        aftermath.announced.append(announcement(row))


def error_of(cause: Cause, detail: str, hint: str | None = None) -> ErrorView:
    """Return why there is no result, with the next step: the worker's own, or the usual one where one is known."""
    return ErrorView(code=str(cause), detail=detail, hint=hint or _HINTS.get(cause))


async def settle(
    connection: AsyncConnection,
    thread: LockedThread,
    intent: Row,
    verdict: Verdict,
    detail: str,
    aftermath: Aftermath,
    *,
    announce_again_ms: int,
    partial: Sequence[PreparedMessage] = (),
    hint: str | None = None,
) -> tuple[State, int | None]:
    """Carry out a verdict: the intent's row, the partial turn, events, the next head. The caller flushes the thread.

    Args:
        partial: the messages of a turn that was stopped after it had said something; empty for none.

    Returns: the new state, and the number of the partial turn.
    """
    state = advance(State(intent["state"]), verdict.event)
    intent_id: str = intent["intent_id"]
    values: dict[str, Any] = {
        "state": state,
        "lease_until_ms": None,
        "max_attempts": intents.c.max_attempts + verdict.extra_attempts,
    }
    if state is State.READY:
        due = thread.now_ms + verdict.delay_ms
        is_due = verdict.delay_ms == 0
        values |= {"available_at_ms": due, "announce_after_ms": due + announce_again_ms if is_due else due}
        retry = {
            "attempt": intent["attempt"],
            "cause": verdict.cause,
            "detail": detail,
            "next_attempt_at": to_text(due),
        }
        thread.append(EventKind.INTENT_RETRYING, intent_id, retry)
        if is_due:
            aftermath.announced.append(announcement(intent))
    else:
        error = error_of(verdict.cause, detail, hint).model_dump()
        values |= {"error": error, "finished_at_ms": thread.now_ms}
        thread.append(_KINDS[verdict.event], intent_id, {**error, "attempt": intent["attempt"]})
    changed = await connection.execute(
        update(intents)
        .where(intents.c.intent_id == intent_id, intents.c.epoch == intent["epoch"], intents.c.state == intent["state"])
        .values(**values)
    )
    assert changed.rowcount == 1, "an intent changed its state without its thread's lock"

    turn_number = None
    if partial and verdict.mark is not None:
        turn_number = await _commit_partial(connection, thread, intent_id, partial, verdict.mark)
    is_terminal = state is not State.READY
    if is_terminal and intent["state"] in HEAD:
        await promote_next(connection, thread, aftermath, announce_again_ms=announce_again_ms)
    if intent["state"] == State.READY:
        aftermath.forgotten.append(announcement(intent))
    aftermath.notices.append(thread.notice(intent_id, is_terminal=is_terminal))
    return state, turn_number


async def _commit_partial(
    connection: AsyncConnection, thread: LockedThread, intent_id: str, partial: Sequence[PreparedMessage], mark: str
) -> int:
    thread.turn_count += 1
    thread.message_count += len(partial)
    thread.change(turn_count=thread.turn_count, message_count=thread.message_count, updated_at_ms=thread.now_ms)
    await insert_turns(connection, thread, [partial], first_number=thread.turn_count, intent_id=intent_id, mark=mark)
    data = {"turn_number": thread.turn_count, "message_count": thread.message_count, "mark": mark}
    thread.append(EventKind.THREAD_UPDATED, intent_id, data)
    return thread.turn_count


async def end_attempt(
    connection: AsyncConnection,
    thread: LockedThread,
    intent_id: str,
    epoch: int,
    *,
    state: State,
    turn_number: int | None = None,
    cause: Cause | None = None,
    detail: str | None = None,
    usage: Usage | None = None,
    log: AttemptLog | None = None,
) -> None:
    """Close the row of the attempt that held `epoch`."""
    log = log or AttemptLog()
    await connection.execute(
        update(attempts)
        .where(attempts.c.intent_id == intent_id, attempts.c.epoch == epoch)
        .values(
            ended_at_ms=thread.now_ms,
            cause=cause,
            detail=detail,
            stdout=log.stdout,
            stderr=log.stderr,
            is_log_truncated=log.is_truncated,
            usage=None if usage is None else usage.model_dump(),
            settled_state=state,
            settled_turn_number=turn_number,
        )
    )
