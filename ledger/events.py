"""The event log of each thread, read.

It is written in one place only, `LockedThread.append`, under the thread row's lock: number order is commit order,
without a gap. Must never return events of another tenant, nor out of order.
"""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.models import events, intents, threads
from ledger.store import Row, Store
from ledger.views import event_view
from mesh.contract.api import EventView
from mesh.contract.errors import not_found

LIMIT_MAX = 1000


class Events:
    """Reads the event logs."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def after(
        self, tenant_id: str, thread_id: str, number: int, *, intent_id: str | None = None, limit: int = 500
    ) -> list[EventView]:
        """Return the events of a thread whose number is above `number`, oldest first; only one intent's when given.

        Raises: MeshError `not_found` for a thread (or intent) that the tenant does not have.
        """
        here = (events.c.tenant_id == tenant_id, events.c.thread_id == thread_id)
        page = select(events).where(*here, events.c.number > number)
        exists = select(threads.c.thread_id).where(threads.c.tenant_id == tenant_id, threads.c.thread_id == thread_id)
        if intent_id is not None:
            page = page.where(events.c.intent_id == intent_id)
            exists = select(intents.c.intent_id).where(
                intents.c.tenant_id == tenant_id, intents.c.thread_id == thread_id, intents.c.intent_id == intent_id
            )
        page = page.order_by(events.c.number).limit(max(1, min(limit, LIMIT_MAX)))

        async def work(connection: AsyncConnection) -> list[Row]:
            rows: list[Row] = list((await connection.execute(page)).mappings())
            # Nothing new, or nothing at all? Asked only when it matters.
            if not rows and (await connection.execute(exists)).one_or_none() is None:
                raise not_found("thread", thread_id) if intent_id is None else not_found("intent", intent_id)
            return rows

        return [event_view(row) for row in await self._store.read(work)]
