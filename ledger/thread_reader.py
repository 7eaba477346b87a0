"""Reads what a thread's context is made of, and keeps the costly part of it in memory between turns.

Must never serve what the database does not hold: every read compares the kept messages with the thread's count and
last message in one snapshot, loads what was added, and starts anew when anything else differs. Units: tokens in o200k.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Row, Select, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.history import RECIPE, HistoryMessage
from ledger.models import message_vectors, messages, pins, threads, turns
from ledger.ranking import Corpus, Vectors
from ledger.store import Store
from ledger.tokens import message_tokens
from ledger.words import counted_terms
from mesh.contract.errors import not_found

AnyRow = Row[*tuple[Any, ...]]
# A thread's older messages beyond these are no candidates; their turns stay readable.
MESSAGES_MAX = 20_000
CACHED_MESSAGES_MAX = 60_000
# More missing vectors than this are read with the whole thread's.
_IDS_A_QUERY = 500


@dataclass(frozen=True)
class ThreadFacts:
    """The thread's row and pins, as far as a context needs them. `pins` holds (key, text), oldest first."""

    row: Mapping[str, Any]
    pins: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class _Kept:
    """What is kept of a thread between two contexts. `skipped`: older messages that are no candidates."""

    messages: tuple[HistoryMessage, ...]
    skipped: int
    terms: Mapping[str, Counter[str]]
    vectors: Mapping[str, Vectors]
    model_id: str | None
    corpus: Corpus


@dataclass(frozen=True)
class _Read:
    """Rows of one snapshot. `is_extension`: `rows` continue what is kept, else they replace it."""

    facts: ThreadFacts
    rows: Sequence[AnyRow]
    skipped: int
    is_extension: bool
    vector_rows: Sequence[AnyRow]


class ThreadReader:
    """Gives a thread's facts and corpus. Many contexts may be read at the same time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()

    async def read(self, tenant_id: str, thread_id: str, *, model_id: str | None) -> tuple[ThreadFacts, Corpus]:
        """Return the thread as it is now, with the vectors of `model_id` (None: without vectors).

        Raises: MeshError `not_found`; what the store raises.
        """
        key = (tenant_id, thread_id)
        kept = self._kept.get(key)
        if kept is not None and kept.model_id != model_id:
            kept = _with_model(kept, model_id)
        read = await self._store.read(lambda connection: _read(connection, tenant_id, thread_id, kept, model_id))
        if kept is None or read.rows or read.vector_rows or not read.is_extension:
            kept = await asyncio.to_thread(_merge, kept if read.is_extension else None, read, model_id)
        self._keep(key, kept)
        return read.facts, kept.corpus

    def forget(self, tenant_id: str, thread_id: str) -> None:
        """Drop what is kept of a thread."""
        self._kept.pop((tenant_id, thread_id), None)

    def _keep(self, key: tuple[str, str], kept: _Kept) -> None:
        self._kept[key] = kept
        self._kept.move_to_end(key)
        total = sum(len(other.messages) for other in self._kept.values())
        while total > CACHED_MESSAGES_MAX:
            _, dropped = self._kept.popitem(last=False)
            total -= len(dropped.messages)


def _with_model(kept: _Kept, model_id: str | None) -> _Kept:
    """Forget the vectors of another model: vectors of two models never mix."""
    return _Kept(kept.messages, kept.skipped, kept.terms, {}, model_id, Corpus(kept.messages, kept.terms, {}))


async def _read(
    connection: AsyncConnection, tenant_id: str, thread_id: str, kept: _Kept | None, model_id: str | None
) -> _Read:
    facts = await _facts(connection, tenant_id, thread_id)
    is_here = and_(messages.c.tenant_id == tenant_id, messages.c.thread_id == thread_id)
    count = int((await connection.execute(select(func.count()).select_from(messages).where(is_here))).scalar_one())
    known: Sequence[HistoryMessage] = kept.messages if kept else ()
    if kept and known and len(known) <= 2 * MESSAGES_MAX:
        last = known[-1]
        is_from_last_on = or_(
            messages.c.turn_number > last.turn_number,
            and_(messages.c.turn_number == last.turn_number, messages.c.position >= last.position),
        )
        rows = (await connection.execute(_messages().where(is_here, is_from_last_on))).all()
        if rows and rows[0].message_id == last.message_id and kept.skipped + len(known) + len(rows) - 1 == count:
            ids = [m.message_id for m in known if m.message_id not in kept.vectors] + [r.message_id for r in rows[1:]]
            found = await _vectors(connection, tenant_id, thread_id, ids, model_id)
            return _Read(facts, rows[1:], kept.skipped, True, found)
    newest_first = _messages(newest_first=True).where(is_here).limit(MESSAGES_MAX)
    rows = (await connection.execute(newest_first)).all()[::-1]
    found = await _vectors(connection, tenant_id, thread_id, [row.message_id for row in rows], model_id)
    return _Read(facts, rows, count - len(rows), False, found)


async def _facts(connection: AsyncConnection, tenant_id: str, thread_id: str) -> ThreadFacts:
    columns = (threads.c.summary, threads.c.url, threads.c.last_plan, threads.c.last_tool_calls)
    is_it = and_(threads.c.tenant_id == tenant_id, threads.c.thread_id == thread_id)
    row = (await connection.execute(select(*columns, threads.c.contextual_memory).where(is_it))).one_or_none()
    if row is None:
        raise not_found("thread", thread_id)
    pinned = await connection.execute(
        select(pins.c.key, pins.c.text)
        .where(pins.c.tenant_id == tenant_id, pins.c.thread_id == thread_id)
        .order_by(pins.c.created_at_ms, pins.c.key)
    )
    return ThreadFacts(row._asdict(), [(pin.key, pin.text) for pin in pinned])


def _messages(*, newest_first: bool = False) -> Select[Any]:
    is_same_turn = and_(
        turns.c.tenant_id == messages.c.tenant_id,
        turns.c.thread_id == messages.c.thread_id,
        turns.c.turn_number == messages.c.turn_number,
    )
    order = [messages.c.turn_number, messages.c.position]
    return (
        select(messages, turns.c.mark)
        .select_from(messages.outerjoin(turns, is_same_turn))
        .order_by(*(column.desc() if newest_first else column.asc() for column in order))
    )


async def _vectors(
    connection: AsyncConnection, tenant_id: str, thread_id: str, ids: Sequence[str], model_id: str | None
) -> Sequence[AnyRow]:
    if not ids or model_id is None:
        return []
    wanted = (
        select(message_vectors.c.message_id, message_vectors.c.dimension, message_vectors.c.vector)
        .where(message_vectors.c.tenant_id == tenant_id, message_vectors.c.thread_id == thread_id)
        .where(message_vectors.c.model_id == model_id, message_vectors.c.recipe == RECIPE)
        .order_by(message_vectors.c.message_id, message_vectors.c.chunk)
    )
    if len(ids) <= _IDS_A_QUERY:
        wanted = wanted.where(message_vectors.c.message_id.in_(ids))
    return (await connection.execute(wanted)).all()


def history_message(row: AnyRow) -> HistoryMessage:
    """Return a row of `messages` (with the turn's `mark`) as it is shown: a partial answer says that it is one."""
    content = row.content
    if row.mark and row.role == "assistant":
        content = f"{content}\n[{row.mark} before the end]"
    return HistoryMessage(
        message_id=row.message_id,
        turn_number=row.turn_number,
        position=row.position,
        role=row.role,
        content=content,
        at_ms=row.at_ms,
        # Counted here and not read from the row, so that a budget holds whatever tokenizer wrote the row.
        tokens=message_tokens(content, row.name, row.tool_calls),
        name=row.name,
        tool_calls=row.tool_calls,
        tool_call_id=row.tool_call_id,
    )


def _merge(kept: _Kept | None, read: _Read, model_id: str | None) -> _Kept:
    """Add rows and vectors to what is kept. Heavy: run it off the event loop."""
    added = [history_message(row) for row in read.rows]
    all_messages = (*(kept.messages if kept else ()), *added)
    terms = {**(kept.terms if kept else {}), **{m.message_id: counted_terms(m.indexed_text) for m in added}}
    chunks: dict[str, list[Vectors]] = {}
    dimension = max((row.dimension for row in read.vector_rows), default=0)
    for row in read.vector_rows:
        rows = chunks.setdefault(row.message_id, [])
        if row.dimension and len(row.vector) == 4 * dimension:
            rows.append(np.frombuffer(row.vector, dtype="<f4"))
    vectors = {
        message_id: np.stack(rows) if rows else np.zeros((0, dimension), dtype=np.float32)
        for message_id, rows in chunks.items()
    }
    vectors = {**(kept.vectors if kept else {}), **vectors}
    return _Kept(all_messages, read.skipped, terms, vectors, model_id, Corpus(all_messages, terms, vectors))
