"""The loop that finds what nobody else will: lost leases, passed deadlines, due retries, forgotten announcements.

It has no memory: each tick asks the database what is due by the database's clock, and changes one intent at a time
by compare-and-set. A tick that failed is repeated by the next, and any number of sweepers may run at once.
Must never change an intent without asking again under its thread's lock.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import structlog
from sqlalchemy import and_, delete, exists, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.aftermath import ANNOUNCED, Aftermath, Herald, announcement
from ledger.endings import Endings
from ledger.locked_thread import LockedThread
from ledger.models import intents, nodes, now_ms, tenants
from ledger.settings import LedgerSettings
from ledger.settling import in_state, promote_next
from ledger.store import Row, Store
from mesh.contract.errors import MeshError
from mesh.contract.states import HEAD, State

BATCH = 200
# Weights of tenants, headless threads and forgotten nodes change rarely: looked at each so many ticks.
SLOW_EVERY = 30

log = structlog.get_logger()


class Sweeper:
    """Sweeps one ledger; see the module."""

    def __init__(self, store: Store, herald: Herald, endings: Endings, settings: LedgerSettings) -> None:
        self._store = store
        self._herald = herald
        self._endings = endings
        self._interval_s = settings.sweep_interval_s
        self._announce_again_ms = int(settings.announce_again_s * 1000)
        self._forget_after_ms = int(settings.node_forget_after_s * 1000)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sweep, in the background."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="ledger-sweeper")

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self) -> None:
        ticks = 0
        while True:
            try:
                await self.tick(is_slow=ticks % SLOW_EVERY == 0)
            except MeshError as error:
                log.warning("ledger.sweep_failed", code=str(error.code), detail=error.detail)
            except Exception:
                log.exception("ledger.sweep_failed")
            ticks += 1
            await asyncio.sleep(self._interval_s)

    async def tick(self, *, is_slow: bool = True) -> None:
        """Sweep once; what fails does not keep the rest from being swept.

        Args:
            is_slow: look at what changes rarely too.
        """
        steps = [self._lose_leases, self._expire, self._announce]
        if is_slow:
            steps += [self._read_weights, self._mend_heads, self._forget_nodes]
        failures: list[Exception] = []
        for step in steps:
            try:
                await step()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    async def _rows(self, statement: Any) -> Sequence[Row]:
        async def work(connection: AsyncConnection) -> Sequence[Row]:
            return (await connection.execute(statement)).mappings().all()

        return await self._store.read(work)

    async def _lose_leases(self) -> None:
        lost = (
            select(intents.c.intent_id, intents.c.epoch, intents.c.node_id)
            .where(in_state(State.RUNNING), intents.c.lease_until_ms <= now_ms())
            .order_by(intents.c.lease_until_ms)
            .limit(BATCH)
        )
        for row in await self._rows(lost):
            settled = await self._endings.lose(row["intent_id"], row["epoch"])
            if settled is not None:
                log.warning(
                    "ledger.lease_lost", intent_id=row["intent_id"], node_id=row["node_id"], state=str(settled.state)
                )

    async def _expire(self) -> None:
        passed = (
            select(intents.c.tenant_id, intents.c.thread_id, intents.c.intent_id)
            .where(
                intents.c.finished_at_ms.is_(None),
                intents.c.deadline_ms.is_not(None),
                intents.c.deadline_ms <= now_ms(),
            )
            .order_by(intents.c.deadline_ms)
            .limit(BATCH)
        )
        for row in await self._rows(passed):
            await self._endings.expire(row["tenant_id"], row["thread_id"], row["intent_id"])

    async def _announce(self) -> None:
        """Announce what is ready and due and was not announced, or was and nobody came."""
        due = (
            select(intents.c.intent_id)
            .where(in_state(State.READY), intents.c.announce_after_ms <= now_ms())
            .order_by(intents.c.announce_after_ms)
            .limit(BATCH)
        )
        if not (ids := [row["intent_id"] for row in await self._rows(due)]):
            return
        # Moving the time is the compare-and-set: of several sweepers one announces.
        claimed = (
            update(intents)
            .where(intents.c.intent_id.in_(ids), in_state(State.READY), intents.c.announce_after_ms <= now_ms())
            .values(announce_after_ms=now_ms() + self._announce_again_ms)
            .returning(*(intents.c[name] for name in ANNOUNCED))
        )

        async def work(connection: AsyncConnection) -> Sequence[Row]:
            return (await connection.execute(claimed)).mappings().all()

        rows = await self._store.write(work)
        await self._herald.tell(Aftermath(announced=[announcement(row) for row in rows]))

    async def _read_weights(self) -> None:
        rows = await self._rows(select(tenants.c.tenant_id, tenants.c.weight).where(tenants.c.weight != 1.0))
        self._herald.weights = {row["tenant_id"]: row["weight"] for row in rows}

    async def _mend_heads(self) -> None:
        """Give a thread its head back. Nothing should ever need it: what finds something is logged as an error."""
        other = intents.alias()
        headless = (
            select(intents.c.tenant_id, intents.c.thread_id)
            .where(
                in_state(State.ACCEPTED),
                ~exists().where(
                    and_(
                        other.c.tenant_id == intents.c.tenant_id,
                        other.c.thread_id == intents.c.thread_id,
                        other.c.state.in_([str(state) for state in HEAD]),
                    )
                ),
            )
            .distinct()
            .limit(BATCH)
        )
        for row in await self._rows(headless):
            await self._mend_head(row["tenant_id"], row["thread_id"])

    async def _mend_head(self, tenant_id: str, thread_id: str) -> None:
        async def work(connection: AsyncConnection) -> Aftermath | None:
            thread = await LockedThread.take(connection, tenant_id, thread_id)
            if thread is None:
                return None
            head = select(intents.c.intent_id).where(
                intents.c.tenant_id == tenant_id, intents.c.thread_id == thread_id, in_state(*HEAD)
            )
            if (await connection.execute(head)).one_or_none() is not None:
                return None
            aftermath = Aftermath()
            await promote_next(connection, thread, aftermath, announce_again_ms=self._announce_again_ms)
            await thread.flush(connection)
            return aftermath

        aftermath = await self._store.write(work)
        if aftermath is not None:
            log.error("ledger.headless_thread_mended", thread_id=thread_id)
            await self._herald.tell(aftermath)

    async def _forget_nodes(self) -> None:
        old = nodes.c.seen_at_ms < now_ms() - self._forget_after_ms
        held = exists().where(or_(intents.c.node_id == nodes.c.node_id), in_state(State.RUNNING))
        if not await self._rows(select(nodes.c.node_id).where(old, ~held).limit(1)):
            return

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(delete(nodes).where(old, ~held))

        await self._store.write(work)
