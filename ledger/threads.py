"""Threads: their state, their turns, their pins, imported history, and erasing all of it.

Must never rewrite a turn, and never answer for another tenant's thread.
"""

import builtins
from collections.abc import Callable, Sequence

from sqlalchemy import ColumnElement, Table, and_, delete, func, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import cursors
from ledger.aftermath import Aftermath, Herald
from ledger.context import ContextService
from ledger.history_import import import_turns, prepare_history
from ledger.intents import upsert_thread
from ledger.locked_thread import LockedThread
from ledger.models import intents, message_vectors, messages, now_ms, pins, threads, turns
from ledger.outcomes import check_pin
from ledger.pin_rows import write_pins
from ledger.store import Row, Store
from ledger.views import pin_view, thread_view, turn_view
from mesh.contract.api import ImportMessages, OwnerBody, PinView, ThreadView, TurnView
from mesh.contract.errors import ErrorCode, MeshError, not_found
from mesh.contract.ids import new_id
from mesh.contract.messages import EventKind
from mesh.contract.states import TERMINAL

# Erasing and importing touch many rows.
LONG_TIMEOUT_S = 30.0


def _of(table: Table, tenant_id: str, thread_id: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return table.c.tenant_id == tenant_id, table.c.thread_id == thread_id


class Threads:
    """Conversations as callers see them."""

    def __init__(self, store: Store, herald: Herald, context: ContextService) -> None:
        self._store = store
        self._herald = herald
        self._context = context
        # Called after each import: the indexer wakes.
        self.on_history: Callable[[], None] = lambda: None

    async def get_or_create_by_owner(self, tenant_id: str, owner: OwnerBody) -> tuple[ThreadView, bool]:
        """Return the thread of a channel's conversation and whether it was made now."""
        thread_id = new_id()
        given = {name: value for name, value in (("url", owner.url), ("title", owner.title)) if value is not None}

        async def work(connection: AsyncConnection) -> str:
            dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
            statement = dialect.insert(threads).values(
                tenant_id=tenant_id,
                thread_id=thread_id,
                channel=owner.channel,
                external_id=owner.external_id,
                created_at_ms=now_ms(),
                updated_at_ms=now_ms(),
                **given,
            )
            statement = statement.on_conflict_do_update(
                index_elements=[threads.c.tenant_id, threads.c.channel, threads.c.external_id],
                set_={"updated_at_ms": now_ms(), **given},
            )
            found: str = (await connection.execute(statement.returning(threads.c.thread_id))).scalar_one()
            return found

        found = await self._store.write(work, is_repeatable=True)
        return await self.get(tenant_id, found), found == thread_id

    async def get(self, tenant_id: str, thread_id: str) -> ThreadView:
        """Return one thread.

        Raises: MeshError `not_found`.
        """
        views, _ = await self._views(threads.c.thread_id == thread_id, tenant_id=tenant_id, limit=1)
        if not views:
            raise not_found("thread", thread_id)
        return views[0]

    async def list(
        self, tenant_id: str, *, cursor: str | None = None, limit: int = 50
    ) -> tuple[builtins.list[ThreadView], str | None]:
        """Return a page of threads, newest first, and the cursor of the next page (None at the end).

        Raises: MeshError `invalid_request` for a cursor that is none.
        """
        conditions: builtins.list[ColumnElement[bool]] = []
        if cursor is not None:
            created, last_id = cursors.unwrap(cursor, int, str)
            same = and_(threads.c.created_at_ms == created, threads.c.thread_id < last_id)
            conditions.append(or_(threads.c.created_at_ms < created, same))
        return await self._views(*conditions, tenant_id=tenant_id, limit=cursors.bounded(limit))

    async def _views(
        self, *conditions: ColumnElement[bool], tenant_id: str, limit: int
    ) -> tuple[builtins.list[ThreadView], str | None]:
        page = (
            select(threads, intents.c.state.label("head_state"))
            .join_from(threads, intents, threads.c.head_intent_id == intents.c.intent_id, isouter=True)
            .where(threads.c.tenant_id == tenant_id, *conditions)
            .order_by(threads.c.created_at_ms.desc(), threads.c.thread_id.desc())
            .limit(limit + 1)
        )

        async def work(connection: AsyncConnection) -> tuple[builtins.list[Row], builtins.list[Row]]:
            rows: builtins.list[Row] = list((await connection.execute(page)).mappings())
            ids = [row["thread_id"] for row in rows[:limit]]
            if not ids:
                return rows, []
            pinned = select(pins).where(pins.c.tenant_id == tenant_id, pins.c.thread_id.in_(ids)).order_by(pins.c.key)
            return rows, list((await connection.execute(pinned)).mappings())

        rows, pinned = await self._store.read(work)
        by_thread: dict[str, builtins.list[Row]] = {}
        for pin in pinned:
            by_thread.setdefault(pin["thread_id"], []).append(pin)
        views = [thread_view(row, by_thread.get(row["thread_id"], [])) for row in rows[:limit]]
        last = rows[limit - 1] if len(rows) > limit else None
        return views, None if last is None else cursors.wrap(last["created_at_ms"], last["thread_id"])

    @staticmethod
    async def _check_exists(connection: AsyncConnection, tenant_id: str, thread_id: str) -> None:
        statement = select(threads.c.thread_id).where(*_of(threads, tenant_id, thread_id))
        if (await connection.execute(statement)).scalar_one_or_none() is None:
            raise not_found("thread", thread_id)

    async def turns(
        self, tenant_id: str, thread_id: str, *, cursor: str | None = None, limit: int = 50
    ) -> tuple[builtins.list[TurnView], str | None]:
        """Return a page of turns, oldest first, and the cursor of the next page (None at the end).

        Raises: MeshError `not_found`, `invalid_request` for a cursor that is none.
        """
        after = 0 if cursor is None else cursors.unwrap(cursor, int)[0]
        limit = cursors.bounded(limit)
        page = select(turns).where(*_of(turns, tenant_id, thread_id), turns.c.turn_number > after)
        page = page.order_by(turns.c.turn_number).limit(limit + 1)

        async def work(connection: AsyncConnection) -> tuple[builtins.list[Row], builtins.list[Row]]:
            await self._check_exists(connection, tenant_id, thread_id)
            rows: builtins.list[Row] = list((await connection.execute(page)).mappings())
            if not rows:
                return [], []
            first, last = rows[0]["turn_number"], rows[-1]["turn_number"]
            said = select(messages).where(
                *_of(messages, tenant_id, thread_id), messages.c.turn_number.between(first, last)
            )
            said = said.order_by(messages.c.turn_number, messages.c.position)
            return rows, list((await connection.execute(said)).mappings())

        rows, said = await self._store.read(work)
        by_turn: dict[int, builtins.list[Row]] = {}
        for message in said:
            by_turn.setdefault(message["turn_number"], []).append(message)
        views = [turn_view(row, by_turn.get(row["turn_number"], [])) for row in rows[:limit]]
        return views, cursors.wrap(rows[limit - 1]["turn_number"]) if len(rows) > limit else None

    async def import_messages(self, tenant_id: str, thread_id: str, history: ImportMessages) -> dict[str, int]:
        """Append history: {"imported", "skipped", "turn_count"}. An unknown thread is made.

        A user's message and the assistant's that follows it are one turn, any other message is a turn by itself. A
        user's message that ended the import before is completed by an assistant's that begins this one. A message
        whose `id` the thread knows is skipped.
        """
        prepared = await prepare_history(history)

        async def work(connection: AsyncConnection) -> tuple[int, int, Aftermath]:
            thread = await upsert_thread(connection, tenant_id, thread_id, events=1, seqs=0, head_intent_id=None)
            imported = await import_turns(connection, thread, prepared)
            data = {"imported": imported, "turn_count": thread.turn_count, "message_count": thread.message_count}
            thread.append(EventKind.THREAD_UPDATED, None, data)
            await thread.flush(connection)
            return imported, thread.turn_count, Aftermath(notices=[thread.notice(None)])

        imported, turn_count, aftermath = await self._store.write(work, timeout_s=LONG_TIMEOUT_S)
        await self._herald.tell(aftermath)
        self.on_history()
        return {"imported": imported, "skipped": len(prepared) - imported, "turn_count": turn_count}

    # ---- pins

    async def pins(self, tenant_id: str, thread_id: str) -> Sequence[PinView]:
        """Return the pins of a thread by key.

        Raises: MeshError `not_found`.
        """

        async def work(connection: AsyncConnection) -> Sequence[Row]:
            await self._check_exists(connection, tenant_id, thread_id)
            statement = select(pins).where(*_of(pins, tenant_id, thread_id)).order_by(pins.c.key)
            return (await connection.execute(statement)).mappings().all()

        return [pin_view(row) for row in await self._store.read(work)]

    async def get_pin(self, tenant_id: str, thread_id: str, key: str) -> PinView:
        """Return one pin.

        Raises: MeshError `not_found`.
        """

        async def work(connection: AsyncConnection) -> Row | None:
            await self._check_exists(connection, tenant_id, thread_id)
            statement = select(pins).where(*_of(pins, tenant_id, thread_id), pins.c.key == key)
            return (await connection.execute(statement)).mappings().one_or_none()

        row = await self._store.read(work)
        if row is None:
            raise not_found("pin", key, listed_at=f"/threads/{thread_id}/pins")
        return pin_view(row)

    async def put_pin(self, tenant_id: str, thread_id: str, key: str, text: str) -> PinView:
        """Set a pin.

        Raises: MeshError `not_found`, `invalid_request`, `too_large` (too many pins).
        """
        check_pin(key, text)
        await self._patch_pins(tenant_id, thread_id, {key: text})
        return await self.get_pin(tenant_id, thread_id, key)

    async def delete_pin(self, tenant_id: str, thread_id: str, key: str) -> None:
        """Remove a pin.

        Raises: MeshError `not_found`.
        """
        await self.get_pin(tenant_id, thread_id, key)
        await self._patch_pins(tenant_id, thread_id, {key: None})

    async def _patch_pins(self, tenant_id: str, thread_id: str, patch: dict[str, str | None]) -> None:
        async def work(connection: AsyncConnection) -> Aftermath:
            thread = await LockedThread.take(connection, tenant_id, thread_id, events=1, updated_at_ms=now_ms())
            if thread is None:
                raise not_found("thread", thread_id)
            await write_pins(connection, thread, patch, source_turn=None)
            thread.append(EventKind.THREAD_UPDATED, None, {"pins": patch})
            await thread.flush(connection)
            return Aftermath(notices=[thread.notice(None)])

        await self._herald.tell(await self._store.write(work))

    # ---- erase

    async def delete(self, tenant_id: str, thread_id: str) -> None:
        """Erase a thread and all that came from it, in one transaction.

        Raises: MeshError `not_found`, `conflict` while one of its intents is unfinished.
        """

        async def work(connection: AsyncConnection) -> None:
            thread = await LockedThread.take(connection, tenant_id, thread_id)
            if thread is None:
                raise not_found("thread", thread_id)
            unfinished = select(func.count()).where(
                *_of(intents, tenant_id, thread_id), intents.c.state.not_in([str(state) for state in TERMINAL])
            )
            if count := (await connection.execute(unfinished)).scalar_one():
                raise MeshError(
                    ErrorCode.CONFLICT,
                    f"the thread has {count} unfinished intents",
                    hint="cancel them or wait for them, then erase the thread",
                )
            # Children go with their parents: results, attempts and tool calls with the intents; the rest with the thread.
            await connection.execute(delete(message_vectors).where(*_of(message_vectors, tenant_id, thread_id)))
            await connection.execute(delete(intents).where(*_of(intents, tenant_id, thread_id)))
            await connection.execute(delete(threads).where(*_of(threads, tenant_id, thread_id)))

        await self._store.write(work, timeout_s=LONG_TIMEOUT_S)
        self._context.forget(tenant_id, thread_id)
