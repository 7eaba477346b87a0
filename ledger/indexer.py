"""Gives every stored message its vectors, in the background, newest conversations first.

The rows are the truth: what has no vectors of the present model and recipe is found and embedded, however it came there
and whatever crashed before. Must never hold up a commit, and never store a vector of a message that was erased.

Algorithm. Rule: threads are visited by the time of their last change. Each round takes those that changed since the last
round (with a margin, since transactions may commit late), then one page of the backlog, from new to old; a visit asks the
database which of the thread's messages lack vectors. Hard case: a text that makes the embedder fail again and again is
given up as unsearchable by meaning, so that it does not starve the rest.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import structlog
from sqlalchemy import and_, exists, literal, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.history import RECIPE, HistoryMessage, chunks_of
from ledger.models import message_vectors, messages, threads
from ledger.ranking import Vectors
from ledger.store import Store
from ledger.thread_reader import history_message
from mesh.contract.errors import MeshError
from mesh.contract.ports import Embedder

POLL_INTERVAL_S = 5.0
EMBED_TIMEOUT_S = 120.0
BACKOFF_MAX_S = 30.0
# A transaction that took its time before this margin has committed by now, or was ended by its time-out.
LATE_COMMIT_MS = 60_000
TRIES_MAX = 3
_THREADS_A_PAGE = 50
_MESSAGES_A_VISIT = 32
# Small calls, so that a query never waits long behind one.
_CHUNKS_A_CALL = 16
_CHARS_A_CALL = 8_000

_log = structlog.get_logger(__name__)
_ThreadKey = tuple[str, str]
# One thread and when it changed last.
_Stamp = tuple[int, str, str]


class Indexer:
    """The background task. `wake` after a commit makes it look at once; without, it looks every few seconds."""

    def __init__(self, store: Store, embedder: Embedder, *, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        self._store = store
        self._embedder = embedder
        self._poll_interval_s = poll_interval_s
        self._wakened = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failures: Counter[str] = Counter()
        self._forget_progress()

    def _forget_progress(self) -> None:
        self._model_id = self._embedder.model_id
        self._done: dict[_ThreadKey, int] = {}
        self._newest_ms = 0
        # The next page of the backlog ends before this; None: the backlog is done.
        self._backlog_end: _Stamp | None = None
        self._is_started = False

    def start(self) -> None:
        """Begin in the background."""
        self._task = asyncio.create_task(self._run(), name="indexer")

    def wake(self) -> None:
        """Say that messages were added."""
        self._wakened.set()

    async def close(self) -> None:
        """Stop; what is not embedded yet is found again next time."""
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        backoff_s = 0.0
        while True:
            self._wakened.clear()
            is_more = False
            try:
                is_more = await self.step()
                backoff_s = 0.0
            except MeshError as error:
                backoff_s = min(BACKOFF_MAX_S, max(0.5, 2 * backoff_s))
                _log.info("index_delayed", detail=error.detail, retry_in_s=backoff_s)
                await asyncio.sleep(backoff_s)
                continue
            except Exception:
                backoff_s = min(BACKOFF_MAX_S, max(0.5, 2 * backoff_s))
                _log.exception("index_failed", retry_in_s=backoff_s)
                await asyncio.sleep(backoff_s)
                continue
            if not is_more:
                with contextlib.suppress(TimeoutError):
                    # A model that is loading is asked often: the first contexts wait for it.
                    wait_s = self._poll_interval_s if self._embedder.is_ready else min(0.5, self._poll_interval_s)
                    async with asyncio.timeout(wait_s):
                        await self._wakened.wait()

    async def step(self) -> bool:
        """Do one round. Returns whether there is more to do at once.

        Raises: MeshError when the embedder or the database does not answer.
        """
        if not self._embedder.is_ready:
            return False
        if self._embedder.model_id != self._model_id:
            self._forget_progress()
        if not self._is_started:
            await self._begin_backlog()
        changed = await self._changed()
        for stamp in changed:
            await self._visit(stamp)
        # Only now: had one visit failed, the rest would be looked for again.
        self._newest_ms = max([self._newest_ms, *(stamp[0] for stamp in changed)])
        if self._backlog_end is None:
            return False
        page = await self._backlog_page(self._backlog_end)
        for stamp in page:
            if self._wakened.is_set():  # the newest go first; the page is asked for again
                return True
            await self._visit(stamp)
            self._backlog_end = stamp
        if len(page) < _THREADS_A_PAGE:
            self._backlog_end = None
        return bool(page)

    async def _begin_backlog(self) -> None:
        newest = select(threads.c.updated_at_ms, threads.c.tenant_id, threads.c.thread_id)
        newest = newest.order_by(threads.c.updated_at_ms.desc()).limit(1)

        async def work(connection: AsyncConnection) -> Any:
            return (await connection.execute(newest)).one_or_none()

        row = await self._store.read(work)
        self._newest_ms = row.updated_at_ms if row else 0
        # Behind every key of that millisecond.
        self._backlog_end = (self._newest_ms + 1, "", "") if row else None
        self._is_started = True

    async def _stamps(self, query: Any) -> list[_Stamp]:
        async def work(connection: AsyncConnection) -> list[_Stamp]:
            return [(row[0], row[1], row[2]) for row in await connection.execute(query)]

        return await self._store.read(work)

    async def _changed(self) -> list[_Stamp]:
        """Return threads that changed since the last round, newest first."""
        columns = (threads.c.updated_at_ms, threads.c.tenant_id, threads.c.thread_id)
        since_ms = self._newest_ms - LATE_COMMIT_MS
        query = select(*columns).where(threads.c.updated_at_ms >= since_ms).order_by(threads.c.updated_at_ms.desc())
        stamps = await self._stamps(query)
        self._done = {key: at_ms for key, at_ms in self._done.items() if at_ms >= since_ms}
        return [stamp for stamp in stamps if self._done.get(stamp[1:]) != stamp[0]]

    async def _backlog_page(self, end: _Stamp) -> list[_Stamp]:
        columns = (threads.c.updated_at_ms, threads.c.tenant_id, threads.c.thread_id)
        is_before = tuple_(*columns) < tuple_(*(literal(value) for value in end))
        # The first comparison alone is what an index on the time serves.
        query = select(*columns).where(threads.c.updated_at_ms <= end[0], is_before)
        return await self._stamps(query.order_by(*(column.desc() for column in columns)).limit(_THREADS_A_PAGE))

    async def _visit(self, stamp: _Stamp) -> None:
        """Embed all that a thread lacks."""
        at_ms, tenant_id, thread_id = stamp
        while missing := await self._missing(tenant_id, thread_id):
            await self._embed_and_store(tenant_id, thread_id, missing)
        self._done[tenant_id, thread_id] = at_ms

    async def _missing(self, tenant_id: str, thread_id: str) -> list[HistoryMessage]:
        has_vectors = exists().where(
            message_vectors.c.message_id == messages.c.message_id,
            message_vectors.c.model_id == self._model_id,
            message_vectors.c.recipe == RECIPE,
        )
        query = (
            select(messages, literal(None).label("mark"))
            .where(messages.c.tenant_id == tenant_id, messages.c.thread_id == thread_id, ~has_vectors)
            .order_by(messages.c.turn_number.desc(), messages.c.position.desc())
            .limit(_MESSAGES_A_VISIT)
        )

        async def work(connection: AsyncConnection) -> Sequence[Any]:
            return (await connection.execute(query)).all()

        rows = await self._store.read(work)
        return await asyncio.to_thread(lambda: [history_message(row) for row in rows])

    async def _embed_and_store(self, tenant_id: str, thread_id: str, missing: Sequence[HistoryMessage]) -> None:
        suspects = [message for message in missing if self._failures[message.message_id]]
        batch = suspects[:1] or missing
        if suspects and self._failures[suspects[0].message_id] >= TRIES_MAX:
            _log.warning("message_not_embedded", message_id=batch[0].message_id, tries=TRIES_MAX)
            await self._store_vectors(tenant_id, thread_id, {batch[0].message_id: np.zeros((0, 0), np.float32)})
            del self._failures[batch[0].message_id]
            return
        try:
            vectors = await self._embed(batch)
        except MeshError:
            self._failures.update(message.message_id for message in batch)
            raise
        await self._store_vectors(tenant_id, thread_id, vectors)
        for message in batch:
            self._failures.pop(message.message_id, None)

    async def _embed(self, batch: Sequence[HistoryMessage]) -> dict[str, Vectors]:
        chunks = {message.message_id: chunks_of(message) for message in batch}
        texts = [text for parts in chunks.values() for text in parts]
        rows: list[Vectors] = []
        while len(rows) < len(texts):
            call: list[str] = []
            for text in texts[len(rows) : len(rows) + _CHUNKS_A_CALL]:
                if call and sum(map(len, call)) + len(text) > _CHARS_A_CALL:
                    break
                call.append(text)
            rows.extend(await self._embedder.embed(call, timeout_s=EMBED_TIMEOUT_S))
        found = iter(rows)
        return {
            message_id: np.array([next(found) for _ in parts], dtype=np.float32) for message_id, parts in chunks.items()
        }

    async def _store_vectors(self, tenant_id: str, thread_id: str, vectors: dict[str, Vectors]) -> None:
        def row(message_id: str, chunk: int, vector: Vectors) -> dict[str, Any]:
            return {
                "tenant_id": tenant_id,
                "thread_id": thread_id,
                "message_id": message_id,
                "chunk": chunk,
                "model_id": self._model_id,
                "dimension": len(vector),
                "recipe": RECIPE,
                "vector": vector.astype("<f4").tobytes(),
            }

        async def work(connection: AsyncConnection) -> None:
            is_it = and_(threads.c.tenant_id == tenant_id, threads.c.thread_id == thread_id)
            # Holds off an erase until this is committed, and finds one that came before.
            await connection.execute(select(threads.c.thread_id).where(is_it).with_for_update(read=True))
            there = await connection.execute(
                select(messages.c.message_id).where(messages.c.message_id.in_(list(vectors)))
            )
            rows = [
                row(message_id, chunk, vector)
                for message_id in there.scalars()
                for chunk, vector in enumerate(vectors[message_id] if len(vectors[message_id]) else [np.zeros(0)])
            ]
            if rows:
                dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
                # Another ledger may have been as quick: both have the same vectors.
                await connection.execute(dialect.insert(message_vectors).on_conflict_do_nothing(), rows)

        await self._store.write(work)
