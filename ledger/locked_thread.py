"""A thread's row while a transaction holds its lock: the one place where counters move and events are written.

Every change of an intent's state takes this lock first and the intent's row after it, so that no two transactions
wait for each other, and number order is commit order.
Must never be kept beyond its transaction.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, insert, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import models
from ledger.models import now_ms, threads
from mesh.contract.messages import EventKind, Notice

COUNTERS = (
    threads.c.seq_count,
    threads.c.event_count,
    threads.c.turn_count,
    threads.c.message_count,
    threads.c.head_intent_id,
)


class LockedThread:
    """Made by `take` (or from the row that an upsert returned); `flush` writes what was collected."""

    def __init__(self, tenant_id: str, thread_id: str, row: RowMapping, *, events_reserved: int) -> None:
        self.tenant_id = tenant_id
        self.thread_id = thread_id
        self.row = row
        self.now_ms: int = row["now_ms"]
        self.seq_count: int = row["seq_count"]
        self.turn_count: int = row["turn_count"]
        self.message_count: int = row["message_count"]
        self.head_intent_id: str | None = row["head_intent_id"]
        # The row was already written with so many events more: no second UPDATE when it was the right number.
        self._event_count: int = row["event_count"] - events_reserved
        self._reserved = events_reserved
        self._events: list[dict[str, Any]] = []
        self._changes: dict[str, Any] = {}

    @classmethod
    async def take(
        cls,
        connection: AsyncConnection,
        tenant_id: str,
        thread_id: str,
        *,
        events: int = 0,
        also: Sequence[Any] = (),
        **values: Any,
    ) -> "LockedThread | None":
        """Lock the row by writing it: `events` more events, and `values`. None when there is no such thread.

        Args:
            also: further columns to read; they are in `row`.
        """
        this = (threads.c.tenant_id == tenant_id, threads.c.thread_id == thread_id)
        return await cls._take(connection, this, events, also, values)

    @classmethod
    async def take_of(
        cls,
        connection: AsyncConnection,
        intent_id: str,
        *,
        tenant_id: str | None = None,
        events: int = 0,
        **values: Any,
    ) -> "LockedThread | None":
        """Lock the thread of an intent (of this tenant, when one is given). None when there is no such intent."""
        place = select(models.intents.c.tenant_id, models.intents.c.thread_id).where(
            models.intents.c.intent_id == intent_id
        )
        if tenant_id is not None:
            place = place.where(models.intents.c.tenant_id == tenant_id)
        this = (tuple_(threads.c.tenant_id, threads.c.thread_id).in_(place),)
        return await cls._take(connection, this, events, (), values)

    @classmethod
    async def _take(
        cls,
        connection: AsyncConnection,
        this: Sequence[ColumnElement[bool]],
        events: int,
        also: Sequence[Any],
        values: dict[str, Any],
    ) -> "LockedThread | None":
        statement = (
            update(threads)
            .where(*this)
            .values(event_count=threads.c.event_count + events, **values)
            .returning(threads.c.tenant_id, threads.c.thread_id, *COUNTERS, *also, now_ms().label("now_ms"))
        )
        row = (await connection.execute(statement)).mappings().one_or_none()
        return None if row is None else cls(row["tenant_id"], row["thread_id"], row, events_reserved=events)

    @property
    def event_number(self) -> int:
        """The number of the thread's newest event."""
        return self._event_count + len(self._events)

    def change(self, **values: Any) -> None:
        """Write further columns at the flush."""
        self._changes.update(values)
        if "head_intent_id" in values:
            self.head_intent_id = values["head_intent_id"]

    def append(self, kind: EventKind, intent_id: str | None, data: dict[str, Any]) -> None:
        """Add an event to the log, with the next number."""
        self._events.append(
            {
                "tenant_id": self.tenant_id,
                "thread_id": self.thread_id,
                "number": self.event_number + 1,
                "intent_id": intent_id,
                "kind": str(kind),
                "data": data,
                "at_ms": self.now_ms,
            }
        )

    async def flush(self, connection: AsyncConnection) -> None:
        """Write the events, and the row again where that is needed."""
        if len(self._events) != self._reserved:
            self._changes["event_count"] = self.event_number
        if self._changes:
            await connection.execute(
                update(threads)
                .where(threads.c.tenant_id == self.tenant_id, threads.c.thread_id == self.thread_id)
                .values(**self._changes)
            )
        if self._events:
            await connection.execute(insert(models.events), self._events)

    def notice(self, intent_id: str | None, *, is_terminal: bool = False, cancel_on_node: str | None = None) -> Notice:
        """Return the hint that something was committed here."""
        return Notice(
            tenant_id=self.tenant_id,
            thread_id=self.thread_id,
            intent_id=intent_id,
            number=self.event_number,
            is_terminal=is_terminal,
            cancel_on_node=cancel_on_node,
        )
