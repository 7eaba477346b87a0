"""Messages on their way into a thread: what a turn says by default, what each message costs, and the insert.

Must never be called with text that was not sanitised, and never count tokens inside a transaction.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import models
from ledger.locked_thread import LockedThread
from ledger.tokens import message_tokens
from mesh.contract import canonical_json
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.ids import new_id
from mesh.contract.messages import ContextMessage

ROLES = frozenset({"user", "assistant", "system", "tool"})
# Shorter texts are counted in well under a millisecond, for which a thread is not worth its switch.
COUNTED_IN_PLACE_CHARS = 2000
MESSAGES_MAX = 200
NAME_CHARS_MAX = 200


@dataclass(frozen=True)
class PreparedMessage:
    """A message that can be stored. Units: `tokens` in o200k, as it costs in a context."""

    message: ContextMessage
    tokens: int
    at_ms: int | None = None
    import_id: str | None = None


def text_of(value: Any) -> str:
    """Return a payload or result as the text of a message: its `text`, itself when a string, else canonical JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and isinstance(text := value.get("text"), str):
        return text
    return canonical_json.dumps(value)


def user_text(payload: Mapping[str, Any]) -> str:
    """Return what the caller said, from an intent's payload."""
    return text_of(payload)


def check_messages(messages: Sequence[ContextMessage]) -> None:
    """Raise MeshError `invalid_request` for messages that no thread can hold."""
    if len(messages) > MESSAGES_MAX:
        raise MeshError(ErrorCode.INVALID_REQUEST, f"a turn has {len(messages)} messages, more than {MESSAGES_MAX}")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise MeshError(
                ErrorCode.INVALID_REQUEST,
                f"the role {message.role[:40]!r} is none of {', '.join(sorted(ROLES))}",
                field=f"thread_update.messages[{index}].role",
            )
        if message.name is not None and not 1 <= len(message.name) <= NAME_CHARS_MAX:
            raise MeshError(
                ErrorCode.INVALID_REQUEST,
                f"a name has 1 to {NAME_CHARS_MAX} characters",
                field=f"thread_update.messages[{index}].name",
            )


def _count(messages: Sequence[ContextMessage]) -> list[int]:
    return [message_tokens(message.content, message.name, message.tool_calls) for message in messages]


async def count(messages: Sequence[ContextMessage]) -> list[int]:
    """Return what each message costs; long ones are counted beside the event loop."""
    if sum(len(message.content) for message in messages) <= COUNTED_IN_PLACE_CHARS:
        return _count(messages)
    return await asyncio.to_thread(_count, messages)


async def prepare(messages: Sequence[ContextMessage]) -> list[PreparedMessage]:
    """Count the tokens of messages that are about to be stored."""
    return [PreparedMessage(message, tokens) for message, tokens in zip(messages, await count(messages), strict=True)]


async def insert_turns(
    connection: AsyncConnection,
    thread: LockedThread,
    turns: Sequence[Sequence[PreparedMessage]],
    *,
    first_number: int,
    intent_id: str | None = None,
    mark: str | None = None,
) -> None:
    """Insert whole turns with numbers from `first_number` on; the counters are the caller's."""
    place = {"tenant_id": thread.tenant_id, "thread_id": thread.thread_id}
    await connection.execute(
        insert(models.turns),
        [
            {**place, "turn_number": number, "intent_id": intent_id, "mark": mark, "created_at_ms": thread.now_ms}
            for number, _ in enumerate(turns, first_number)
        ],
    )
    rows = [row for number, turn in enumerate(turns, first_number) for row in _rows(thread, turn, number, 0)]
    if rows:
        await connection.execute(insert(models.messages), rows)


async def insert_messages(
    connection: AsyncConnection,
    thread: LockedThread,
    messages: Sequence[PreparedMessage],
    *,
    turn_number: int,
    first_position: int,
) -> None:
    """Insert messages of one turn that exists."""
    await connection.execute(insert(models.messages), _rows(thread, messages, turn_number, first_position))


def _rows(
    thread: LockedThread, messages: Sequence[PreparedMessage], turn_number: int, first_position: int
) -> list[dict[str, Any]]:
    return [
        {
            "message_id": new_id(),
            "tenant_id": thread.tenant_id,
            "thread_id": thread.thread_id,
            "turn_number": turn_number,
            "position": position,
            "role": item.message.role,
            "name": item.message.name,
            "content": item.message.content,
            "tool_calls": item.message.tool_calls,
            "tool_call_id": item.message.tool_call_id,
            "tokens": item.tokens,
            "at_ms": thread.now_ms if item.at_ms is None else item.at_ms,
            "import_id": item.import_id,
        }
        for position, item in enumerate(messages, first_position)
    ]
