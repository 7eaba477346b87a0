"""Intents as callers see them: submit, look, cancel, replay.

Must never decide by a value read before the thread row's lock was taken, and never change a terminal state
(replay aside, which a person asks for).
"""

import builtins
import hashlib
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import and_, func, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import cursors
from ledger.aftermath import Aftermath, Herald, announcement
from ledger.context import ContextService
from ledger.decisions import STOPPED, Verdict
from ledger.locked_thread import COUNTERS, LockedThread
from ledger.models import attempts, intents, now_ms, results, threads
from ledger.settings import LedgerSettings
from ledger.settling import promote_next, read_locked, settle
from ledger.store import Row, Store
from ledger.times import to_ms
from ledger.turns import user_text
from ledger.views import intent_view
from mesh.contract import canonical_json
from mesh.contract.api import IntentView, SubmitIntent
from mesh.contract.errors import Cause, ErrorCode, MeshError, not_found
from mesh.contract.ids import new_id
from mesh.contract.messages import EventKind
from mesh.contract.states import TERMINAL, Event, State, advance
from mesh.contract.template import Template

CancelOutcome = Literal["cancelled", "cancel_requested"]

KEY_CHARS_MAX = 255
# A busy thread is asked about again after this long.
BUSY_RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class Submitted:
    """What became of a submission. `is_replay`: the idempotency key was known, nothing new was made."""

    intent: IntentView
    is_replay: bool


@dataclass(frozen=True)
class _Submission:
    """A request with all that is decided before the transaction."""

    tenant_id: str
    intent_id: str
    thread_id: str
    request: SubmitIntent
    capability: Template
    idempotency_key: str | None
    request_sha256: str
    not_before_ms: int | None
    deadline_ms: int | None


def _prepare(tenant_id: str, request: SubmitIntent, capability: Template, key: str | None) -> _Submission:
    if key is not None and (not 1 <= len(key) <= KEY_CHARS_MAX or canonical_json.clean_text(key) != key):
        raise MeshError(
            ErrorCode.INVALID_REQUEST,
            f"an idempotency key has 1 to {KEY_CHARS_MAX} characters, and no NUL",
            field="Idempotency-Key",
        )
    not_before_ms = None if request.not_before is None else to_ms(request.not_before, field="not_before")
    deadline_ms = None if request.deadline is None else to_ms(request.deadline, field="deadline")
    if not_before_ms is not None and deadline_ms is not None and deadline_ms <= not_before_ms:
        raise MeshError(ErrorCode.INVALID_REQUEST, "the deadline lies before not_before", field="deadline")
    canonical = canonical_json.dumps(request.model_dump(mode="json"))
    return _Submission(
        tenant_id=tenant_id,
        intent_id=new_id(),
        thread_id=request.thread_id or new_id(),
        request=request,
        capability=capability,
        idempotency_key=key,
        request_sha256=hashlib.sha256(canonical.encode()).hexdigest(),
        not_before_ms=not_before_ms,
        deadline_ms=deadline_ms,
    )


async def upsert_thread(
    connection: AsyncConnection, tenant_id: str, thread_id: str, *, events: int, seqs: int, head_intent_id: str | None
) -> LockedThread:
    """Lock a thread, made when new: `events` more events, `seqs` more places in its queue.

    Args:
        head_intent_id: becomes the head when there is none.
    """
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(threads).values(
        tenant_id=tenant_id,
        thread_id=thread_id,
        seq_count=seqs,
        event_count=events,
        head_intent_id=head_intent_id,
        created_at_ms=now_ms(),
        updated_at_ms=now_ms(),
    )
    statement = statement.on_conflict_do_update(
        index_elements=[threads.c.tenant_id, threads.c.thread_id],
        set_={
            "seq_count": threads.c.seq_count + seqs,
            "event_count": threads.c.event_count + events,
            "head_intent_id": func.coalesce(threads.c.head_intent_id, head_intent_id),
            "updated_at_ms": now_ms(),
        },
    )
    returning = statement.returning(*COUNTERS, threads.c.updated_at_ms.label("now_ms"))
    row = (await connection.execute(returning)).mappings().one()
    return LockedThread(tenant_id, thread_id, row, events_reserved=events)


class Intents:
    """The callers' side of the ledger."""

    def __init__(self, store: Store, herald: Herald, context: ContextService, settings: LedgerSettings) -> None:
        self._store = store
        self._herald = herald
        self._context = context
        self._announce_again_ms = int(settings.announce_again_s * 1000)

    async def submit(
        self, tenant_id: str, request: SubmitIntent, *, capability: Template, idempotency_key: str | None = None
    ) -> Submitted:
        """Make an intent durable at the end of its thread's queue.

        Raises: MeshError `thread_busy` (on_busy reject), `idempotency_conflict`, `deadline_passed`,
            `invalid_request`, `not_found` (an unknown parent intent).
        """
        submission = _prepare(tenant_id, request, capability, idempotency_key)
        if capability.supports_multi_turn:  # the claim will ask for its embedding in a moment
            self._context.prepare(user_text(request.payload))
        tries = 0

        async def work(connection: AsyncConnection) -> tuple[Row | None, Aftermath]:
            nonlocal tries
            tries += 1
            # After a lost reply to COMMIT: perhaps it is there already.
            if tries > 1 and (row := await self._own(connection, submission)) is not None:
                return row, Aftermath()
            if idempotency_key is not None and await self._is_known(connection, submission):
                return None, Aftermath()
            return await self._insert(connection, submission)

        try:
            row, aftermath = await self._store.write(work, is_repeatable=True)
        except IntegrityError:
            # Two submissions with one key at once: the other one was first, and now it is there to be found.
            row, aftermath = await self._store.write(work, is_repeatable=True)
        if row is None:
            return Submitted(await self._by_key(submission), is_replay=True)
        await self._herald.tell(aftermath)
        return Submitted(intent_view(row), is_replay=False)

    @staticmethod
    async def _own(connection: AsyncConnection, submission: _Submission) -> Row | None:
        statement = select(intents).where(intents.c.intent_id == submission.intent_id)
        return (await connection.execute(statement)).mappings().one_or_none()

    @staticmethod
    async def _is_known(connection: AsyncConnection, submission: _Submission) -> bool:
        """Whether the key was used before, for the same request."""
        statement = select(intents.c.request_sha256).where(
            intents.c.tenant_id == submission.tenant_id, intents.c.idempotency_key == submission.idempotency_key
        )
        known = (await connection.execute(statement)).scalar_one_or_none()
        if known is not None and known != submission.request_sha256:
            raise MeshError(
                ErrorCode.IDEMPOTENCY_CONFLICT,
                "this idempotency key was used for another request",
                hint="use a new key for a new request",
                field="Idempotency-Key",
            )
        return known is not None

    async def _by_key(self, submission: _Submission) -> IntentView:
        async def work(connection: AsyncConnection) -> str | None:
            statement = select(intents.c.intent_id).where(
                intents.c.tenant_id == submission.tenant_id, intents.c.idempotency_key == submission.idempotency_key
            )
            return (await connection.execute(statement)).scalar_one_or_none()

        intent_id = await self._store.read(work)
        if intent_id is None:  # erased between the two transactions
            raise not_found("intent", submission.idempotency_key or "")
        return await self.get(submission.tenant_id, intent_id)

    async def _insert(self, connection: AsyncConnection, submission: _Submission) -> tuple[Row, Aftermath]:
        tenant_id, request = submission.tenant_id, submission.request
        aftermath = Aftermath()
        if request.parent_intent_id is not None:
            parent = select(intents.c.intent_id).where(
                intents.c.intent_id == request.parent_intent_id, intents.c.tenant_id == tenant_id
            )
            if (await connection.execute(parent)).scalar_one_or_none() is None:
                raise MeshError(
                    ErrorCode.NOT_FOUND,
                    f"there is no intent {request.parent_intent_id!r}",
                    field="parent_intent_id",
                    hint="name an intent of your own, or leave the field out",
                )
        thread = await upsert_thread(
            connection, tenant_id, submission.thread_id, events=1, seqs=1, head_intent_id=submission.intent_id
        )
        if submission.deadline_ms is not None and submission.deadline_ms <= thread.now_ms:
            raise MeshError(
                ErrorCode.DEADLINE_PASSED,
                "the deadline has passed already",
                field="deadline",
                hint="choose a later one",
            )
        is_head = thread.head_intent_id == submission.intent_id
        if not is_head and request.on_busy == "reject":
            raise MeshError(
                ErrorCode.THREAD_BUSY,
                "the thread has an unfinished intent",
                hint="wait for it, or say on_busy: enqueue, interrupt or rollback",
                retryable=True,
                retry_after_s=BUSY_RETRY_AFTER_S,
                extra={"intent_id": thread.head_intent_id},
            )
        row = self._row(submission, thread, State.READY if is_head else State.ACCEPTED)
        await connection.execute(insert(intents), row)
        discovered = {"type": request.type, "seq": row["seq"], "status": str(row["state"])}
        thread.append(EventKind.INTENT_DISCOVERED, submission.intent_id, discovered)
        if is_head and row["available_at_ms"] <= thread.now_ms:
            aftermath.announced.append(announcement(row))
        if not is_head and request.on_busy in ("interrupt", "rollback"):
            cause = Cause.INTERRUPTED if request.on_busy == "interrupt" else Cause.ROLLED_BACK
            head = await read_locked(connection, thread, str(thread.head_intent_id))
            assert head is not None, "a thread's head is one of its intents"
            await self._stop(connection, thread, head, cause, aftermath)
            if thread.head_intent_id == submission.intent_id:
                row |= {"state": State.READY}
        await thread.flush(connection)
        aftermath.notices.append(thread.notice(submission.intent_id))
        return row, aftermath

    def _row(self, submission: _Submission, thread: LockedThread, state: State) -> dict[str, Any]:
        request, capability = submission.request, submission.capability
        available = max(thread.now_ms, submission.not_before_ms or 0)
        is_due = available <= thread.now_ms
        return {
            "intent_id": submission.intent_id,
            "tenant_id": submission.tenant_id,
            "thread_id": submission.thread_id,
            "seq": thread.seq_count,
            "type": request.type,
            "state": state,
            "payload": request.payload,
            "metadata": request.metadata,
            "priority": request.priority,
            "budget": request.budget,
            "on_busy": request.on_busy,
            "parent_intent_id": request.parent_intent_id,
            "idempotency_key": submission.idempotency_key,
            "request_sha256": submission.request_sha256,
            "context_share": capability.context.model_dump() if capability.supports_multi_turn else None,
            "attempts_per_run": capability.limits.max_attempts,
            "attempt": 0,
            "max_attempts": capability.limits.max_attempts,
            "epoch": 0,
            "node_id": None,
            "cancel_cause": None,
            "available_at_ms": available,
            "announce_after_ms": available + (self._announce_again_ms if is_due else 0),
            "not_before_ms": submission.not_before_ms,
            "deadline_ms": submission.deadline_ms,
            "award": None,
            "receipt": None,
            "error": None,
            "created_at_ms": thread.now_ms,
            "started_at_ms": None,
            "finished_at_ms": None,
        }

    async def _stop(
        self,
        connection: AsyncConnection,
        thread: LockedThread,
        intent: Row,
        cause: Cause,
        aftermath: Aftermath,
    ) -> CancelOutcome:
        """Cancel an unfinished intent of a locked thread: at once, or by asking the node that runs it."""
        if intent["state"] != State.RUNNING:
            verdict = Verdict(Event.CANCEL, cause)
            await settle(
                connection,
                thread,
                intent,
                verdict,
                f"{STOPPED[cause]}, before it ran",
                aftermath,
                announce_again_ms=self._announce_again_ms,
            )
            return "cancelled"
        if intent["cancel_cause"] is None:  # the first cause stays
            await connection.execute(
                update(intents).where(intents.c.intent_id == intent["intent_id"]).values(cancel_cause=cause)
            )
            thread.append(EventKind.INTENT_CANCEL_REQUESTED, intent["intent_id"], {"cause": cause})
        aftermath.notices.append(thread.notice(intent["intent_id"], cancel_on_node=intent["node_id"]))
        return "cancel_requested"

    async def get(self, tenant_id: str, intent_id: str) -> IntentView:
        """Return one intent.

        Raises: MeshError `not_found`.
        """
        views, _ = await self._views(intents.c.intent_id == intent_id, tenant_id=tenant_id, limit=1)
        if not views:
            raise not_found("intent", intent_id)
        return views[0]

    async def list(
        self,
        tenant_id: str,
        *,
        status: State | None = None,
        type: str | None = None,
        thread_id: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> tuple[builtins.list[IntentView], str | None]:
        """Return a page of intents, newest first, and the cursor of the next page (None at the end).

        Raises: MeshError `invalid_request` for a cursor that is none.
        """
        conditions = []
        if status is not None:
            conditions.append(intents.c.state == status)
        if type is not None:
            conditions.append(intents.c.type == type)
        if thread_id is not None:
            conditions.append(intents.c.thread_id == thread_id)
        if cursor is not None:
            created, last_id = cursors.unwrap(cursor, int, str)
            same = and_(intents.c.created_at_ms == created, intents.c.intent_id < last_id)
            conditions.append(or_(intents.c.created_at_ms < created, same))
        return await self._views(*conditions, tenant_id=tenant_id, limit=cursors.bounded(limit))

    async def _views(
        self, *conditions: Any, tenant_id: str, limit: int
    ) -> tuple[builtins.list[IntentView], str | None]:
        found = (results.c.result, results.c.usage.label("result_usage"), results.c.turn_number)
        page = (
            select(intents, *found)
            .join_from(intents, results, intents.c.intent_id == results.c.intent_id, isouter=True)
            .where(intents.c.tenant_id == tenant_id, *conditions)
            .order_by(intents.c.created_at_ms.desc(), intents.c.intent_id.desc())
            .limit(limit + 1)
        )

        async def work(
            connection: AsyncConnection,
        ) -> tuple[builtins.list[Row], builtins.list[Row]]:
            rows: builtins.list[Row] = list((await connection.execute(page)).mappings())
            started = [row["intent_id"] for row in rows if row["epoch"] > 0]
            if not started:
                return rows, []
            tried = select(attempts).where(attempts.c.intent_id.in_(started), attempts.c.tenant_id == tenant_id)
            return rows, list((await connection.execute(tried.order_by(attempts.c.epoch))).mappings())

        rows, tried = await self._store.read(work)
        by_intent: dict[str, builtins.list[Row]] = {}
        for attempt in tried:
            by_intent.setdefault(attempt["intent_id"], []).append(attempt)
        views = []
        for row in rows[:limit]:
            result = None if row["result"] is None else {**row, "usage": row["result_usage"]}
            views.append(intent_view(row, by_intent.get(row["intent_id"], []), result))
        last = rows[limit - 1] if len(rows) > limit else None
        return views, None if last is None else cursors.wrap(last["created_at_ms"], last["intent_id"])

    async def cancel(self, tenant_id: str, intent_id: str) -> CancelOutcome:
        """Cancel at once what does not run, and ask the node of what does.

        Raises: MeshError `not_found`, `already_terminal` (extra: state).
        """

        async def work(connection: AsyncConnection) -> tuple[CancelOutcome, Aftermath]:
            thread = await LockedThread.take_of(connection, intent_id, tenant_id=tenant_id, events=1)
            intent = None if thread is None else await read_locked(connection, thread, intent_id)
            if thread is None or intent is None:
                raise not_found("intent", intent_id)
            if intent["state"] in TERMINAL:
                raise MeshError(
                    ErrorCode.ALREADY_TERMINAL,
                    f"the intent is {intent['state']} already",
                    hint="nothing is left to cancel; GET /intents/{id} tells how it ended",
                    extra={"state": intent["state"]},
                )
            aftermath = Aftermath()
            outcome = await self._stop(connection, thread, intent, Cause.CANCELLED, aftermath)
            await thread.flush(connection)
            return outcome, aftermath

        outcome, aftermath = await self._store.write(work)
        await self._herald.tell(aftermath)
        return outcome

    async def replay(self, tenant_id: str, intent_id: str) -> IntentView:
        """Queue a failed or dead intent again, at the end of its thread, with a new budget of attempts.

        Raises: MeshError `not_found`, `not_replayable` (extra: state), `deadline_passed`.
        """

        async def work(connection: AsyncConnection) -> Aftermath:
            thread = await LockedThread.take_of(
                connection, intent_id, tenant_id=tenant_id, events=1, seq_count=threads.c.seq_count + 1
            )
            intent = None if thread is None else await read_locked(connection, thread, intent_id)
            if thread is None or intent is None:
                raise not_found("intent", intent_id)
            if intent["state"] not in (State.FAILED, State.DEAD):
                raise MeshError(
                    ErrorCode.NOT_REPLAYABLE,
                    f"only a failed or dead intent can be replayed; this one is {intent['state']}",
                    hint="submit it as a new intent, with a new Idempotency-Key",
                    extra={"state": intent["state"]},
                )
            if intent["deadline_ms"] is not None and intent["deadline_ms"] <= thread.now_ms:
                raise MeshError(
                    ErrorCode.DEADLINE_PASSED, "its deadline has passed", hint="submit it again with a later deadline"
                )
            return await self._replay(connection, thread, intent)

        await self._herald.tell(await self._store.write(work))
        return await self.get(tenant_id, intent_id)

    async def _replay(self, connection: AsyncConnection, thread: LockedThread, intent: Row) -> Aftermath:
        aftermath = Aftermath()
        intent_id: str = intent["intent_id"]
        await connection.execute(
            update(intents)
            .where(intents.c.intent_id == intent_id)
            .values(
                state=advance(State(intent["state"]), Event.REPLAY),
                seq=thread.seq_count,
                # A new budget: whatever was left of the old one is not added.
                max_attempts=intent["attempt"] + intent["attempts_per_run"],
                error=None,
                cancel_cause=None,
                finished_at_ms=None,
                available_at_ms=thread.now_ms,
                announce_after_ms=thread.now_ms,
            )
        )
        thread.append(EventKind.INTENT_REPLAYED, intent_id, {"seq": thread.seq_count, "attempt": intent["attempt"]})
        if thread.head_intent_id is None:
            await promote_next(connection, thread, aftermath, announce_again_ms=self._announce_again_ms)
        await thread.flush(connection)
        aftermath.notices.append(thread.notice(intent_id))
        return aftermath
