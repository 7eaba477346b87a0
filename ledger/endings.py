"""How attempts end: a commit, a failure, a lost lease, a passed deadline.

The order is always the same: clean and count outside the transaction, lock the thread, ask the fence, write.
Must never write a result without the fence's yes, and never let the sweeper's opinion of a clock count: the
database's does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.aftermath import Aftermath, Herald
from ledger.decisions import MARKS, STOPPED, Backoff, Verdict, judge
from ledger.fence import held_by, stale
from ledger.locked_thread import LockedThread
from ledger.models import attempts, events, intents, now_ms, results, threads
from ledger.outcomes import Outcome, cleaned_detail, cleaned_log, prepare_outcome, prepare_partial
from ledger.pin_rows import write_pins
from ledger.settings import LedgerSettings
from ledger.settling import end_attempt, promote_next, read_locked, settle
from ledger.store import Row, Store
from ledger.turns import PreparedMessage, insert_turns
from mesh.contract.errors import Cause, not_found
from mesh.contract.messages import AttemptLog, CommitResult, EventKind, FailAttempt, Settled, Usage
from mesh.contract.states import TERMINAL, Event, State, advance

LOST_DETAIL = "the node did not renew its lease: it stopped, or lost its way to the ledger"
DEADLINE_DETAIL = "the deadline passed before there was a result"


class _Refused(Exception):
    """The fence said no: whatever the transaction did is undone."""


class _RolledBack(Exception):
    """The result came after the caller asked for the turn to be rolled back."""


@dataclass(frozen=True)
class _Failure:
    """An attempt without a result, cleaned."""

    cause: Cause
    detail: str
    is_retryable: bool
    usage: Usage
    log: AttemptLog
    partial: list[PreparedMessage] = field(default_factory=list)
    hint: str | None = None


async def _insert_result(
    connection: AsyncConnection, thread: LockedThread, intent_id: str, commit: CommitResult, outcome: Outcome
) -> None:
    result = {
        "intent_id": intent_id,
        "tenant_id": thread.tenant_id,
        "epoch": commit.epoch,
        "turn_number": thread.turn_count,
        "result": outcome.result_text,
        "usage": commit.usage.model_dump(),
        "created_at_ms": thread.now_ms,
    }
    await connection.execute(insert(results), result)


class Endings:
    """Ends attempts, for nodes (`commit`, `fail`) and for the sweeper (`lose`, `expire`)."""

    def __init__(self, store: Store, herald: Herald, settings: LedgerSettings) -> None:
        self._store = store
        self._herald = herald
        self._announce_again_ms = int(settings.announce_again_s * 1000)
        self._backoff = Backoff(settings.retry_backoff_s, settings.retry_backoff_max_s)
        # Called after each commit that added messages: the indexer wakes.
        self.on_history: Callable[[], None] = lambda: None

    async def _facts(self, intent_id: str) -> Row:
        """Return what never changes while an epoch holds, and whether somebody wants it stopped."""
        columns = ("intent_id", "tenant_id", "thread_id", "payload", "attempt", "cancel_cause")

        async def work(connection: AsyncConnection) -> Row | None:
            statement = select(*(intents.c[name] for name in columns)).where(intents.c.intent_id == intent_id)
            return (await connection.execute(statement)).mappings().one_or_none()

        row = await self._store.read(work)
        if row is None:
            raise not_found("intent", intent_id)
        return row

    # ---- commit

    async def commit(self, intent_id: str, commit: CommitResult) -> Settled:
        """See Claims.commit."""
        facts = await self._facts(intent_id)
        outcome = await prepare_outcome(commit, facts["payload"])

        async def work(connection: AsyncConnection) -> tuple[Settled, Aftermath]:
            return await self._commit_once(connection, facts, commit, outcome)

        try:
            settled, aftermath = await self._store.write(work, is_repeatable=True)
        except _Refused:
            return await self._committed_before(intent_id, commit)
        except _RolledBack:
            # The caller wants no trace of this turn, and said so before the result came.
            failure = _Failure(Cause.ROLLED_BACK, "rolled back", False, commit.usage, outcome.log)
            return await self._end(facts, failure, epoch=commit.epoch, node_id=commit.node_id)
        await self._herald.tell(aftermath)
        self.on_history()
        return settled

    async def _committed_before(self, intent_id: str, commit: CommitResult) -> Settled:
        """Return the answer that this epoch got before: its reply was lost.

        Raises: MeshError `stale_epoch` when there was none.
        """

        async def work(connection: AsyncConnection) -> int | None:
            statement = select(results.c.turn_number).where(
                results.c.intent_id == intent_id, results.c.epoch == commit.epoch
            )
            return (await connection.execute(statement)).scalar_one_or_none()

        turn_number = await self._store.read(work)
        if turn_number is None:
            raise stale(intent_id, commit.epoch)
        return Settled(intent_id=intent_id, state=State.SUCCEEDED, turn_number=turn_number)

    async def _commit_once(
        self, connection: AsyncConnection, facts: Row, commit: CommitResult, outcome: Outcome
    ) -> tuple[Settled, Aftermath]:
        intent_id: str = facts["intent_id"]
        has_patch = outcome.memory_patch is not None or outcome.tool_calls_patch is not None
        thread = await LockedThread.take(
            connection,
            facts["tenant_id"],
            facts["thread_id"],
            events=2,
            also=(threads.c.contextual_memory, threads.c.last_tool_calls) if has_patch else (),
            turn_count=threads.c.turn_count + 1,
            message_count=threads.c.message_count + len(outcome.messages),
            head_intent_id=None,
            updated_at_ms=now_ms(),
            **outcome.thread_values,
        )
        done = (
            update(intents)
            .where(*held_by(intent_id, commit.epoch, commit.node_id))
            .values(state=advance(State.RUNNING, Event.SUCCEED), lease_until_ms=None, finished_at_ms=now_ms())
            .returning(intents.c.seq, intents.c.attempt, intents.c.cancel_cause)
        )
        intent = (await connection.execute(done)).mappings().one_or_none()
        if thread is None or intent is None:
            raise _Refused
        if intent["cancel_cause"] == Cause.ROLLED_BACK:
            raise _RolledBack
        await _insert_result(connection, thread, intent_id, commit, outcome)
        await insert_turns(connection, thread, [outcome.messages], first_number=thread.turn_count, intent_id=intent_id)
        if has_patch:
            thread.change(**outcome.merged(thread.row))
        await write_pins(connection, thread, outcome.pins, source_turn=thread.turn_count)
        await end_attempt(
            connection,
            thread,
            intent_id,
            commit.epoch,
            state=State.SUCCEEDED,
            turn_number=thread.turn_count,
            usage=commit.usage,
            log=outcome.log,
        )
        turn = {"turn_number": thread.turn_count}
        committed = {**turn, **outcome.event_data, "usage": commit.usage.model_dump(), "attempt": intent["attempt"]}
        thread.append(EventKind.RESULT_COMMITTED, intent_id, committed)
        thread.append(
            EventKind.THREAD_UPDATED, intent_id, {**turn, **outcome.changed, "message_count": thread.message_count}
        )
        aftermath = Aftermath()
        if thread.seq_count > intent["seq"]:  # somebody may wait behind it
            await promote_next(connection, thread, aftermath, announce_again_ms=self._announce_again_ms)
        await thread.flush(connection)
        aftermath.notices.append(thread.notice(intent_id, is_terminal=True))
        return Settled(intent_id=intent_id, state=State.SUCCEEDED, turn_number=thread.turn_count), aftermath

    # ---- without a result

    async def fail(self, intent_id: str, failure: FailAttempt) -> Settled:
        """See Claims.fail."""
        facts = await self._facts(intent_id)
        reported = _Failure(
            failure.cause,
            cleaned_detail(failure.detail),
            failure.is_retryable,
            failure.usage,
            cleaned_log(failure.log),
            await prepare_partial(facts["payload"], failure.partial_text),
            None if failure.hint is None else cleaned_detail(failure.hint),
        )
        try:
            return await self._end(facts, reported, epoch=failure.epoch, node_id=failure.node_id)
        except _Refused:
            return await self._failed_before(intent_id, failure)

    async def _failed_before(self, intent_id: str, failure: FailAttempt) -> Settled:
        """Return the answer that this epoch got before: its reply was lost.

        Raises: MeshError `stale_epoch` when there was none.
        """

        async def work(connection: AsyncConnection) -> Row | None:
            statement = select(attempts.c.settled_state, attempts.c.settled_turn_number).where(
                attempts.c.intent_id == intent_id,
                attempts.c.epoch == failure.epoch,
                attempts.c.node_id == failure.node_id,
                attempts.c.cause == failure.cause,
            )
            return (await connection.execute(statement)).mappings().one_or_none()

        before = await self._store.read(work)
        if before is None or before["settled_state"] is None:
            raise stale(intent_id, failure.epoch)
        return Settled(
            intent_id=intent_id, state=State(before["settled_state"]), turn_number=before["settled_turn_number"]
        )

    async def lose(self, intent_id: str, epoch: int) -> Settled | None:
        """End the attempt of a node that did not renew its lease; None when that is not so (any more)."""
        facts = await self._facts(intent_id)
        partial = []
        if facts["cancel_cause"] in MARKS:
            partial = await prepare_partial(facts["payload"], await self._streamed(facts))
        failure = _Failure(Cause.LEASE_LOST, LOST_DETAIL, True, Usage(), AttemptLog(), partial)
        try:
            return await self._end(facts, failure, epoch=epoch, node_id=None)
        except _Refused:
            return None

    async def _streamed(self, facts: Row) -> str:
        """Return what the running attempt has said so far."""

        async def work(connection: AsyncConnection) -> list[dict[str, Any]]:
            statement = (
                select(events.c.data)
                .where(events.c.intent_id == facts["intent_id"], events.c.kind == str(EventKind.DELTA))
                .order_by(events.c.number)
            )
            return list((await connection.execute(statement)).scalars())

        said = await self._store.read(work)
        return "".join(str(data.get("text", "")) for data in said if data.get("attempt") == facts["attempt"])

    async def _end(self, facts: Row, failure: "_Failure", *, epoch: int, node_id: str | None) -> Settled:
        """Settle an attempt. Without a `node_id` it must have lost its lease.

        Raises: _Refused when the fence says no.
        """
        intent_id: str = facts["intent_id"]

        async def work(connection: AsyncConnection) -> tuple[Settled, Aftermath]:
            thread = await LockedThread.take(connection, facts["tenant_id"], facts["thread_id"], events=1)
            intent = None if thread is None else await read_locked(connection, thread, intent_id)
            if thread is None or intent is None or intent["state"] != State.RUNNING or intent["epoch"] != epoch:
                raise _Refused
            if node_id is None and intent["lease_until_ms"] > thread.now_ms:
                raise _Refused
            if node_id is not None and intent["node_id"] != node_id:
                raise _Refused
            return await self._end_locked(connection, thread, intent, failure)

        settled, aftermath = await self._store.write(work)
        await self._herald.tell(aftermath)
        if settled.turn_number is not None:
            self.on_history()
        return settled

    async def _end_locked(
        self, connection: AsyncConnection, thread: LockedThread, intent: Row, failure: "_Failure"
    ) -> tuple[Settled, Aftermath]:
        cancel_cause = None if intent["cancel_cause"] is None else Cause(intent["cancel_cause"])
        verdict = judge(
            cause=failure.cause,
            is_retryable=failure.is_retryable,
            cancel_cause=cancel_cause,
            attempt=intent["attempt"],
            max_attempts=intent["max_attempts"],
            attempts_per_run=intent["attempts_per_run"],
            backoff=self._backoff,
        )
        aftermath = Aftermath()
        state, turn_number = await settle(
            connection,
            thread,
            intent,
            verdict,
            STOPPED.get(verdict.cause, failure.detail),
            aftermath,
            announce_again_ms=self._announce_again_ms,
            hint=failure.hint if verdict.cause is failure.cause else None,
            partial=failure.partial,
        )
        await end_attempt(
            connection,
            thread,
            intent["intent_id"],
            intent["epoch"],
            state=state,
            turn_number=turn_number,
            cause=failure.cause,
            detail=failure.detail,
            usage=failure.usage,
            log=failure.log,
        )
        await thread.flush(connection)
        return Settled(intent_id=intent["intent_id"], state=state, turn_number=turn_number), aftermath

    async def expire(self, tenant_id: str, thread_id: str, intent_id: str) -> bool:
        """Expire an unfinished intent whose deadline has passed; False when that is not so (any more)."""

        async def work(connection: AsyncConnection) -> Aftermath | None:
            thread = await LockedThread.take(connection, tenant_id, thread_id, events=1)
            intent = None if thread is None else await read_locked(connection, thread, intent_id)
            if thread is None or intent is None or intent["state"] in TERMINAL:
                return None
            if intent["deadline_ms"] is None or intent["deadline_ms"] > thread.now_ms:
                return None
            if intent["state"] == State.RUNNING:
                failure = _Failure(Cause.DEADLINE_PASSED, DEADLINE_DETAIL, False, Usage(), AttemptLog())
                _, aftermath = await self._end_locked(connection, thread, intent, failure)
                aftermath.notices.append(thread.notice(intent_id, is_terminal=True, cancel_on_node=intent["node_id"]))
                return aftermath
            aftermath = Aftermath()
            verdict = Verdict(Event.EXPIRE, Cause.DEADLINE_PASSED)
            await settle(
                connection,
                thread,
                intent,
                verdict,
                DEADLINE_DETAIL,
                aftermath,
                announce_again_ms=self._announce_again_ms,
            )
            await thread.flush(connection)
            return aftermath

        aftermath = await self._store.write(work)
        if aftermath is not None:
            await self._herald.tell(aftermath)
        return aftermath is not None
