"""Imported history on its way into turns.

Must never store a message twice that carries an id, and never number turns outside the thread's lock.
"""

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.locked_thread import LockedThread
from ledger.models import messages, turns
from ledger.times import to_ms
from ledger.turns import PreparedMessage, count, insert_messages, insert_turns
from mesh.contract import canonical_json
from mesh.contract.api import ImportMessages
from mesh.contract.messages import ContextMessage


async def prepare_history(history: ImportMessages) -> list[PreparedMessage]:
    """Check and count messages that are about to be imported.

    Raises: MeshError `invalid_json` or `invalid_request` with the field's path.
    """
    canonical_json.check(history.model_dump(mode="json"))
    said = [ContextMessage(role=item.role, content=item.content, name=item.name) for item in history.messages]
    return [
        PreparedMessage(
            message,
            tokens,
            at_ms=None if item.at is None else to_ms(item.at, field=f"messages[{index}].at"),
            import_id=item.id,
        )
        for index, (item, message, tokens) in enumerate(zip(history.messages, said, await count(said), strict=True))
    ]


def group_into_turns(history: Sequence[PreparedMessage]) -> list[list[PreparedMessage]]:
    """Return the turns of a history: a user's message with the assistant's after it, any other by itself."""
    groups: list[list[PreparedMessage]] = []
    for item in history:
        open_turn = groups[-1] if groups and [one.message.role for one in groups[-1]] == ["user"] else None
        if item.message.role == "assistant" and open_turn is not None:
            open_turn.append(item)
        else:
            groups.append([item])
    return groups


async def _unknown(
    connection: AsyncConnection, thread: LockedThread, history: Sequence[PreparedMessage]
) -> list[PreparedMessage]:
    """Return the messages that the thread does not have, each id once."""
    ids = [item.import_id for item in history if item.import_id is not None]
    known: set[str | None] = set()
    if ids:
        statement = select(messages.c.import_id).where(
            messages.c.tenant_id == thread.tenant_id,
            messages.c.thread_id == thread.thread_id,
            messages.c.import_id.in_(ids),
        )
        known = set((await connection.execute(statement)).scalars())
    new = []
    for item in history:
        if item.import_id is None:
            new.append(item)
        elif item.import_id not in known:
            known.add(item.import_id)
            new.append(item)
    return new


async def _has_open_turn(connection: AsyncConnection, thread: LockedThread) -> bool:
    """Whether the newest turn is an imported message of a user that nobody answered."""
    statement = (
        select(messages.c.role, turns.c.intent_id)
        .join_from(
            messages,
            turns,
            (messages.c.tenant_id == turns.c.tenant_id)
            & (messages.c.thread_id == turns.c.thread_id)
            & (messages.c.turn_number == turns.c.turn_number),
        )
        .where(
            messages.c.tenant_id == thread.tenant_id,
            messages.c.thread_id == thread.thread_id,
            messages.c.turn_number == thread.turn_count,
        )
    )
    rows = (await connection.execute(statement)).all()
    return [(row.role, row.intent_id) for row in rows] == [("user", None)]


async def import_turns(connection: AsyncConnection, thread: LockedThread, history: Sequence[PreparedMessage]) -> int:
    """Insert what the locked thread does not have, move its counters, and return how many messages that were."""
    new = await _unknown(connection, thread, history)
    rest = new
    if new and new[0].message.role == "assistant" and thread.turn_count and await _has_open_turn(connection, thread):
        await insert_messages(connection, thread, new[:1], turn_number=thread.turn_count, first_position=1)
        rest = new[1:]
    groups = group_into_turns(rest)
    if groups:
        await insert_turns(connection, thread, groups, first_number=thread.turn_count + 1)
    if new:
        thread.turn_count += len(groups)
        thread.message_count += len(new)
        thread.change(turn_count=thread.turn_count, message_count=thread.message_count)
    return len(new)
