"""Writing pins, for callers and for turns.

Must never let a thread have more pins than its contexts can carry.
"""

from collections.abc import Mapping

from sqlalchemy import delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.locked_thread import LockedThread
from ledger.models import pins
from ledger.outcomes import PINS_MAX
from mesh.contract.errors import ErrorCode, MeshError


async def write_pins(
    connection: AsyncConnection, thread: LockedThread, patch: Mapping[str, str | None], *, source_turn: int | None
) -> None:
    """Set the pins of a locked thread; a None removes. They have been checked (`outcomes.check_pin`).

    Raises: MeshError `too_large` when there are too many afterwards.
    """
    if not patch:
        return
    here = (pins.c.tenant_id == thread.tenant_id, pins.c.thread_id == thread.thread_id)
    removed = [key for key, text in patch.items() if text is None]
    if removed:
        await connection.execute(delete(pins).where(*here, pins.c.key.in_(removed)))
    rows = [
        {
            "tenant_id": thread.tenant_id,
            "thread_id": thread.thread_id,
            "key": key,
            "text": text,
            "source_turn": source_turn,
            "created_at_ms": thread.now_ms,
            "updated_at_ms": thread.now_ms,
        }
        for key, text in patch.items()
        if text is not None
    ]
    if not rows:
        return
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    statement = dialect.insert(pins)
    replaced = {name: statement.excluded[name] for name in ("text", "source_turn", "updated_at_ms")}
    await connection.execute(
        statement.on_conflict_do_update(index_elements=[pins.c.tenant_id, pins.c.thread_id, pins.c.key], set_=replaced),
        rows,
    )
    count = (await connection.execute(select(func.count()).select_from(pins).where(*here))).scalar_one()
    if count > PINS_MAX:
        raise MeshError(
            ErrorCode.TOO_LARGE, f"a thread has at most {PINS_MAX} pins", hint="delete one first", field="key"
        )
