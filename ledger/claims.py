"""Claims: the nodes' side of the ledger, where the fence stands.

Every write carries the epoch that the claim minted, and touches nothing when the epoch is stale.
Must never mint an epoch outside the claim's transaction, and never judge a lease by a clock other than the
database's.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import exists, func, insert, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.aftermath import ANNOUNCED, Aftermath, Herald, announcement
from ledger.context import ContextService
from ledger.endings import Endings
from ledger.fence import held_by, stale
from ledger.locked_thread import LockedThread
from ledger.models import attempts, intents, nodes, now_ms, tenants, threads
from ledger.settings import LedgerSettings
from ledger.settling import in_state, read_locked
from ledger.store import Row, Store
from ledger.tool_log import begin_attempt, clean_events, is_new_batch, write_calls
from ledger.turns import user_text
from ledger.views import award_row
from mesh.contract.errors import Cause, ErrorCode, MeshError, not_found
from mesh.contract.messages import (
    Award,
    CancelOrder,
    Claim,
    Claimable,
    ClaimRequest,
    CommitResult,
    ContextMessage,
    EmitEvents,
    EventKind,
    FailAttempt,
    Heartbeat,
    HeartbeatReply,
    Settled,
    ToolRecord,
)
from mesh.contract.states import Event, State, advance
from mesh.contract.template import ContextShare

LEASES_MAX = 10_000
EVENTS_MAX = 1000
CLAIMABLE_MAX = 200
# How often a context is built anew because the thread grew meanwhile (an import), before the claim gives up.
CONTEXT_TRIES_MAX = 5

# What never changes while an epoch holds, with what a claim wants to know beforehand.
_FACTS = (
    *(intents.c[name] for name in ANNOUNCED),
    *(
        intents.c[name]
        for name in ("seq", "state", "epoch", "node_id", "payload", "metadata", "context_share", "deadline_ms")
    ),
    threads.c.turn_count,
    now_ms().label("now_ms"),
)


class _ThreadGrew(Exception):
    """The context that was built is not the thread's any more."""


def _not_claimable(intent_id: str, state: str, *, why: str | None = None) -> MeshError:
    return MeshError(
        ErrorCode.NOT_CLAIMABLE, why or f"intent {intent_id} is {state}, not ready", extra={"state": str(state)}
    )


async def _open_attempt(
    connection: AsyncConnection, thread: LockedThread, intent_id: str, claimed: Row, node_id: str
) -> None:
    attempt = {
        "intent_id": intent_id,
        "epoch": claimed["epoch"],
        "tenant_id": thread.tenant_id,
        "attempt": claimed["attempt"],
        "node_id": node_id,
        "started_at_ms": thread.now_ms,
        "is_log_truncated": False,
    }
    await connection.execute(insert(attempts), attempt)


def _tell(thread: LockedThread, intent_id: str, claimed: Row, node_id: str, award: Award | None) -> None:
    """Append the events of a claim."""
    if award is not None:
        shown = {name: value for name, value in award_row(award).items() if name != "awarded_at_ms"}
        thread.append(EventKind.INTENT_AWARDED, intent_id, shown)
    data = {"node_id": node_id, "attempt": claimed["attempt"], "epoch": claimed["epoch"]}
    thread.append(EventKind.INTENT_CLAIMED, intent_id, data)


class Claims:
    """What nodes do with intents."""

    def __init__(
        self, store: Store, herald: Herald, context: ContextService, endings: Endings, settings: LedgerSettings
    ) -> None:
        self._store = store
        self._herald = herald
        self._context = context
        self._endings = endings
        self._lease_ttl_s = settings.lease_ttl_s
        self._lease_ttl_ms = int(settings.lease_ttl_s * 1000)

    async def _facts(self, intent_id: str) -> Row:
        same_thread = (intents.c.tenant_id == threads.c.tenant_id) & (intents.c.thread_id == threads.c.thread_id)
        statement = select(*_FACTS).join_from(intents, threads, same_thread).where(intents.c.intent_id == intent_id)

        async def work(connection: AsyncConnection) -> Row | None:
            return (await connection.execute(statement)).mappings().one_or_none()

        row = await self._store.read(work)
        if row is None:
            raise not_found("intent", intent_id)
        return row

    # ---- claim

    async def claim(self, intent_id: str, request: ClaimRequest) -> Claim:
        """Take a ready intent: epoch and attempt plus one, lease begun, context built.

        The context is built before the transaction (it may wait for an embedding) and is the thread's as of the
        claim: a thread that grew meanwhile gets it built anew. A node that repeats a claim whose answer was lost gets
        the same claim: epoch and attempt are the same, the lease begins anew.
        Raises: MeshError `not_found`, `not_claimable` (extra: state; somebody else has it, or it is not due).
        """
        try:
            return await self._claim_ready(intent_id, request)
        except MeshError as error:
            if error.code is not ErrorCode.NOT_CLAIMABLE or not request.is_repeat:
                raise
            claim = await self._claim_again(intent_id, request.node_id)
            if claim is None:
                raise
            return claim

    async def _claim_ready(self, intent_id: str, request: ClaimRequest) -> Claim:
        for _ in range(CONTEXT_TRIES_MAX):
            facts = await self._facts(intent_id)
            self._check_claimable(facts)
            messages, receipt = await self._build_context(facts)
            try:
                return await self._take(facts, request, messages, receipt)
            except _ThreadGrew:
                continue
        raise _not_claimable(intent_id, State.READY, why="the thread grows faster than its context can be built")

    async def _claim_again(self, intent_id: str, node_id: str) -> Claim | None:
        """Return the claim that this node holds, if nothing was ever said under it: no worker has had an effect."""
        facts = await self._facts(intent_id)
        messages, receipt = await self._build_context(facts)
        is_silent = exists().where(
            attempts.c.intent_id == intent_id, attempts.c.epoch == facts["epoch"], attempts.c.batch_number == 0
        )
        statement = (
            update(intents)
            .where(*held_by(intent_id, facts["epoch"], node_id), is_silent)
            .values(lease_until_ms=now_ms() + self._lease_ttl_ms, receipt=receipt)
            .returning(intents.c.epoch, intents.c.attempt, intents.c.max_attempts)
        )

        async def work(connection: AsyncConnection) -> tuple[Row, list[ToolRecord]] | None:
            row = (await connection.execute(statement)).mappings().one_or_none()
            if row is None:
                return None
            return row, await begin_attempt(connection, facts["tenant_id"], intent_id, row["attempt"])

        held = await self._store.write(work, is_repeatable=True)
        return None if held is None else self._message(facts, *held, messages, receipt)

    @staticmethod
    def _check_claimable(facts: Row) -> None:
        intent_id: str = facts["intent_id"]
        if facts["state"] != State.READY:
            raise _not_claimable(intent_id, facts["state"])
        if facts["available_at_ms"] > facts["now_ms"]:
            raise _not_claimable(intent_id, State.READY, why=f"intent {intent_id} is not due yet")
        if facts["deadline_ms"] is not None and facts["deadline_ms"] <= facts["now_ms"]:
            raise _not_claimable(intent_id, State.READY, why=f"the deadline of intent {intent_id} has passed")

    async def _build_context(self, facts: Row) -> tuple[list[ContextMessage], dict[str, Any]]:
        if facts["context_share"] is None:  # the capability does not take part in conversations
            return [], {}
        share = ContextShare.model_validate(facts["context_share"])
        query = user_text(facts["payload"])
        built = await self._context.build(facts["tenant_id"], facts["thread_id"], query=query or None, share=share)
        return built.messages, built.receipt

    async def _take(
        self,
        facts: Row,
        request: ClaimRequest,
        messages: list[ContextMessage],
        receipt: dict[str, Any],
    ) -> Claim:
        intent_id: str = facts["intent_id"]
        award = request.award
        if award is not None and (award.intent_id != intent_id or award.node_id != request.node_id):
            award = None  # not what this claim is about: the claim counts, the story told about it does not
        tries = 0

        async def work(connection: AsyncConnection) -> tuple[Row, list[ToolRecord], LockedThread | None]:
            nonlocal tries
            tries += 1
            # After a lost reply to COMMIT: perhaps it is ours already.
            if tries > 1 and (row := await self._claimed(connection, facts, request.node_id)) is not None:
                return row, await begin_attempt(connection, facts["tenant_id"], intent_id, row["attempt"]), None
            return await self._claim_once(connection, facts, request.node_id, award, receipt)

        row, records, thread = await self._store.write(work, is_repeatable=True)
        if thread is not None:
            await self._herald.tell(Aftermath(notices=[thread.notice(intent_id)]))
        return self._message(facts, row, records, messages, receipt)

    def _message(
        self,
        facts: Row,
        row: Row,
        records: list[ToolRecord],
        messages: list[ContextMessage],
        receipt: dict[str, Any],
    ) -> Claim:
        return Claim(
            tenant_id=facts["tenant_id"],
            intent_id=facts["intent_id"],
            thread_id=facts["thread_id"],
            capability=facts["type"],
            payload=facts["payload"],
            metadata=facts["metadata"],
            epoch=row["epoch"],
            attempt=row["attempt"],
            max_attempts=row["max_attempts"],
            lease_ttl_s=self._lease_ttl_s,
            deadline_ms=facts["deadline_ms"],
            budget=facts["budget"],
            supports_multi_turn=facts["context_share"] is not None,
            messages=messages,
            receipt=receipt,
            turn_number_next=facts["turn_count"] + 1,
            tool_records=records,
        )

    @staticmethod
    async def _claimed(connection: AsyncConnection, facts: Row, node_id: str) -> Row | None:
        statement = select(intents.c.epoch, intents.c.attempt, intents.c.max_attempts).where(
            *held_by(facts["intent_id"], facts["epoch"] + 1, node_id)
        )
        return (await connection.execute(statement)).mappings().one_or_none()

    async def _claim_once(
        self,
        connection: AsyncConnection,
        facts: Row,
        node_id: str,
        award: Award | None,
        receipt: dict[str, Any],
    ) -> tuple[Row, list[ToolRecord], LockedThread]:
        tenant_id, intent_id = facts["tenant_id"], facts["intent_id"]
        thread = await LockedThread.take(
            connection, tenant_id, facts["thread_id"], events=1 if award is None else 2, last_node_id=node_id
        )
        if thread is None:
            raise not_found("intent", intent_id)
        if thread.turn_count != facts["turn_count"]:
            raise _ThreadGrew
        statement = (
            update(intents)
            .where(
                intents.c.intent_id == intent_id,
                in_state(State.READY),
                intents.c.available_at_ms <= thread.now_ms,
                or_(intents.c.deadline_ms.is_(None), intents.c.deadline_ms > thread.now_ms),
            )
            .values(
                state=advance(State.READY, Event.CLAIM),
                epoch=intents.c.epoch + 1,
                attempt=intents.c.attempt + 1,
                node_id=node_id,
                lease_until_ms=thread.now_ms + self._lease_ttl_ms,
                started_at_ms=func.coalesce(intents.c.started_at_ms, thread.now_ms),
                award=None if award is None else award_row(award),
                receipt=receipt,
            )
            .returning(intents.c.epoch, intents.c.attempt, intents.c.max_attempts)
        )
        row = (await connection.execute(statement)).mappings().one_or_none()
        if row is None:
            intent = await read_locked(connection, thread, intent_id)
            raise _not_claimable(intent_id, "gone" if intent is None else intent["state"])
        await _open_attempt(connection, thread, intent_id, row, node_id)
        _tell(thread, intent_id, row, node_id, award)
        await thread.flush(connection)
        records = []
        if row["attempt"] > 1:
            records = await begin_attempt(connection, tenant_id, intent_id, row["attempt"])
        return row, records, thread

    # ---- while it runs

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Renew a node's leases and tell it what to cancel."""
        if len(heartbeat.leases) > LEASES_MAX:
            raise MeshError(ErrorCode.INVALID_REQUEST, f"more than {LEASES_MAX} leases", field="leases")
        pairs = [(lease.intent_id, lease.epoch) for lease in heartbeat.leases]
        seen = (
            update(nodes)
            .where(nodes.c.node_id == heartbeat.node_id)
            .values(seen_at_ms=now_ms(), free_slots=heartbeat.free_slots, is_draining=heartbeat.is_draining)
            .returning(nodes.c.is_drain_requested)
        )
        renewal = (
            update(intents)
            .where(
                intents.c.node_id == heartbeat.node_id,
                in_state(State.RUNNING),
                tuple_(intents.c.intent_id, intents.c.epoch).in_(pairs),
            )
            .values(lease_until_ms=now_ms() + self._lease_ttl_ms)
            .returning(intents.c.intent_id, intents.c.cancel_cause)
        )

        async def work(connection: AsyncConnection) -> tuple[bool | None, list[Row]]:
            drain: bool | None = (await connection.execute(seen)).scalar_one_or_none()
            if not pairs:
                return drain, []
            return drain, list((await connection.execute(renewal)).mappings())

        drain, renewed = await self._store.write(work, is_repeatable=True)
        return HeartbeatReply(
            renewed=[row["intent_id"] for row in renewed],
            cancel=[
                CancelOrder(intent_id=row["intent_id"], cause=Cause(row["cancel_cause"]))
                for row in renewed
                if row["cancel_cause"] is not None
            ],
            drain=bool(drain),
            is_known=drain is not None,
        )

    async def emit(self, intent_id: str, batch: EmitEvents) -> None:
        """Append a running worker's events; tool calls enter the write-ahead log. A batch sent again changes nothing.

        Raises: MeshError `stale_epoch`, `invalid_request`.
        """
        if not batch.events:
            return
        if len(batch.events) > EVENTS_MAX:
            raise MeshError(ErrorCode.INVALID_REQUEST, f"more than {EVENTS_MAX} events in one batch", field="events")
        events = clean_events(batch.events)
        held = held_by(intent_id, batch.epoch, batch.node_id)

        async def work(connection: AsyncConnection) -> Aftermath:
            thread = await LockedThread.take_of(connection, intent_id, events=len(events))
            # Asked after the lock was taken: an intent that was settled meanwhile gets no more events.
            attempt = (await connection.execute(select(intents.c.attempt).where(*held))).scalar_one_or_none()
            if thread is None or attempt is None:
                raise stale(intent_id, batch.epoch)
            if not await is_new_batch(connection, intent_id, batch):
                await thread.flush(connection)  # gives the reserved numbers back
                return Aftermath()
            for item in events:
                thread.append(item.kind, intent_id, {**item.data, "attempt": attempt})
            await write_calls(connection, thread, intent_id, attempt, events)
            await thread.flush(connection)
            return Aftermath(notices=[thread.notice(intent_id)])

        await self._herald.tell(await self._store.write(work))

    # ---- how it ends

    async def commit(self, intent_id: str, outcome: CommitResult) -> Settled:
        """Commit a result and its turn, exactly once; the same epoch again gets the same answer.

        Raises: MeshError `stale_epoch`; `invalid_json`, `invalid_request` or `too_large`, none of them retryable,
            when the outcome itself can never be stored: the node then fails the attempt as `result_invalid`.
        """
        return await self._endings.commit(intent_id, outcome)

    async def fail(self, intent_id: str, outcome: FailAttempt) -> Settled:
        """Settle an attempt without a result: retry, failed, dead, cancelled or expired.

        Raises: MeshError `stale_epoch`.
        """
        return await self._endings.fail(intent_id, outcome)

    # ---- for nodes without a backplane

    async def claimable(self, node_id: str, capabilities: Sequence[str], limit: int) -> Claimable:
        """Return ready intents for a node that polls: each tenant's best in turn, by the tenants' weights."""
        place = func.row_number().over(
            partition_by=intents.c.tenant_id, order_by=(intents.c.priority.desc(), intents.c.created_at_ms)
        )
        weight = func.coalesce(tenants.c.weight, 1.0).label("weight")
        due = (
            select(*(intents.c[name] for name in ANNOUNCED), weight, place.label("place"))
            .join_from(intents, tenants, intents.c.tenant_id == tenants.c.tenant_id, isouter=True)
            .where(
                in_state(State.READY),
                intents.c.type.in_(list(capabilities)),
                intents.c.available_at_ms <= now_ms(),
                or_(intents.c.deadline_ms.is_(None), intents.c.deadline_ms > now_ms()),
            )
            .subquery()
        )
        statement = (
            select(due)
            .order_by(due.c.place / due.c.weight, due.c.priority.desc(), due.c.created_at_ms)
            .limit(max(1, min(limit, CLAIMABLE_MAX)))
        )

        async def work(connection: AsyncConnection) -> list[Row]:
            return list((await connection.execute(statement)).mappings())

        rows = await self._store.read(work) if capabilities else []
        return Claimable(intents=[announcement(row, weight=row["weight"]) for row in rows])
