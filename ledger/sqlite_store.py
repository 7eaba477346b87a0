"""The ledger on one SQLite file: one writing process, one writing task, group commit.

Algorithm: writers queue their work; the writer task begins a transaction, runs all work that is waiting, each under
a savepoint, commits once and only then answers. So one fsync serves many, and a piece of work that fails is undone
alone. A file lock keeps a second process out.
Must never answer before COMMIT returned, and never use less than `synchronous=FULL`: with NORMAL a power cut took
every acknowledged commit.
"""

import asyncio
import contextlib
import fcntl
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import StaticPool

from ledger.database_errors import mapped
from ledger.settings import LedgerSettings
from ledger.store import Store, Work, sqlite_path
from mesh.contract.errors import ErrorCode, MeshError, unavailable

T = TypeVar("T")

GROUP_ITEMS_MAX = 64
# Work that comes in while a group runs joins it, but nobody waits longer than this for another's sake.
GROUP_S = 0.02
QUEUE_ITEMS_MAX = 10_000
BUSY_TIMEOUT_MS = 5000
READERS = 4

log = structlog.get_logger()


@dataclass(eq=False)
class _Item:
    work: Work[Any]
    outcome: asyncio.Future[Any]
    give_up_at_s: float


class _GroupLost(Exception):
    """A group's transaction is gone; the cause says why."""


def _engine(url: URL, begin: str, pragmas: tuple[str, ...], **options: Any) -> AsyncEngine:
    # isolation_level None: the driver begins nothing by itself, the hook below does.
    engine = create_async_engine(url, connect_args={"isolation_level": None}, **options)

    @event.listens_for(engine.sync_engine, "connect")
    def set_pragmas(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        for pragma in pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


def _lock_file(url: URL) -> int | None:
    """Take the lock beside the file, for as long as the process lives; None for a database in memory."""
    path = sqlite_path(url)
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unavailable(f"the ledger's folder cannot be written: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise MeshError(
            ErrorCode.CONFLICT,
            f"another process has the ledger {path} open; SQLite has one writing process",
            hint="stop that process, or use PostgreSQL for several: INTENTMESH_DATABASE_URL=postgresql://…",
        ) from error
    return descriptor


class SqliteStore(Store):
    """See the module. A database in memory has one connection, so its reads queue with the writes."""

    def __init__(self, url: URL, settings: LedgerSettings, lock: int | None) -> None:
        self._lock = lock
        self._timeout_s = settings.database_timeout_s
        durable = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={BUSY_TIMEOUT_MS}")
        in_memory = sqlite_path(url) is None
        options: dict[str, Any] = {"poolclass": StaticPool} if in_memory else {"pool_size": 1, "max_overflow": 0}
        self._writing = _engine(url, "BEGIN IMMEDIATE", durable, **options)
        self._reading = None
        if not in_memory:
            pragmas = ("query_only=ON", f"busy_timeout={BUSY_TIMEOUT_MS}")
            self._reading = _engine(
                url, "BEGIN", pragmas, pool_size=READERS, max_overflow=0, pool_timeout=self._timeout_s
            )
        self._waiting: deque[_Item] = deque()
        self._arrived = asyncio.Event()
        self._is_closing = False
        self._reads: set[asyncio.Task[Any]] = set()
        self._writer = asyncio.create_task(self._write_for_ever(), name="ledger-writer")

    @classmethod
    async def open(cls, url: URL, settings: LedgerSettings) -> "SqliteStore":
        """Take the file's lock and start the writer.

        Raises: MeshError `conflict` when another process has it.
        """
        return cls(url, settings, _lock_file(url))

    async def write(self, work: Work[T], *, is_repeatable: bool = False, timeout_s: float | None = None) -> T:
        """See Store.write. Waiting for its turn is bounded; once begun, work is waited for."""
        if self._is_closing:
            raise unavailable("the ledger is closing")
        if len(self._waiting) >= QUEUE_ITEMS_MAX:
            raise unavailable("too many writes are waiting for the ledger")
        give_up_at_s = time.monotonic() + (timeout_s or self._timeout_s)
        item = _Item(work, asyncio.get_running_loop().create_future(), give_up_at_s)
        self._waiting.append(item)
        self._arrived.set()
        result: T = await item.outcome
        return result

    async def read(self, work: Work[T], *, timeout_s: float | None = None) -> T:
        """See Store.read."""
        if self._reading is None:
            return await self.write(work, timeout_s=timeout_s)
        task = asyncio.create_task(self._read(self._reading, work))
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)
        task.add_done_callback(_note_exception)
        return await asyncio.shield(task)

    @staticmethod
    async def _read(engine: AsyncEngine, work: Work[T]) -> T:
        try:
            async with engine.connect() as connection:
                return await work(connection)
        except Exception as error:
            if (meant := mapped(error)) is not None:
                raise meant from error
            raise

    async def close(self) -> None:
        """See Store.close."""
        if self._is_closing:
            return
        self._is_closing = True
        self._arrived.set()
        await self._writer
        if self._reads:
            await asyncio.wait(set(self._reads))
        for engine in (self._writing, self._reading):
            if engine is not None:
                await engine.dispose()
        if self._lock is not None:
            os.close(self._lock)

    async def _write_for_ever(self) -> None:
        while True:
            if not self._waiting:
                if self._is_closing:
                    return
                self._arrived.clear()
                await self._arrived.wait()
                continue
            members: dict[_Item, Any] = {}
            try:
                await self._run_group(members)
            except Exception as error:
                # The transaction as a whole is gone: whoever was in it is told so, and the next group begins anew.
                cause = error.__cause__ if isinstance(error, _GroupLost) else error
                assert isinstance(cause, Exception)
                if (meant := mapped(cause)) is None:
                    log.exception("ledger.group_failed", members=len(members))
                for item in members:
                    _fail(item, meant or cause)

    async def _run_group(self, members: dict[_Item, Any]) -> None:
        """Run what waits in one transaction. On an error, whoever is in `members` has not been answered yet."""
        if (first := self._next()) is None:
            return
        # Joins before anything can fail, so that whoever waits longest is told when not even BEGIN works.
        members[first] = None
        began_s = time.monotonic()
        async with self._writing.connect() as connection:
            try:
                await connection.begin()
                item: _Item | None = first
                while item is not None:
                    await self._run_one(connection, item, members)
                    is_full = len(members) >= GROUP_ITEMS_MAX or time.monotonic() - began_s > GROUP_S
                    item = None if is_full else self._next()
                await connection.commit()
            except Exception as error:
                # Thrown away, not rolled back: some errors have ended the transaction already, and then that fails.
                with contextlib.suppress(Exception):
                    await connection.invalidate()
                raise _GroupLost from error
        for item, value in members.items():
            if not item.outcome.done():
                item.outcome.set_result(value)

    @staticmethod
    async def _run_one(connection: AsyncConnection, item: _Item, members: dict[_Item, Any]) -> None:
        members[item] = None
        savepoint = await connection.begin_nested()
        try:
            members[item] = await item.work(connection)
        except Exception as error:
            # Some errors (disk full) end the whole transaction: then this raises, and the group fails with the first.
            try:
                await savepoint.rollback()
            except Exception:
                raise error from None
            del members[item]
            _fail(item, mapped(error) or error)
        else:
            await savepoint.commit()

    def _next(self) -> _Item | None:
        """Take the next item that somebody still waits for."""
        while self._waiting:
            item = self._waiting.popleft()
            if item.outcome.done():  # its caller was cancelled before it began
                continue
            if time.monotonic() > item.give_up_at_s:
                _fail(item, unavailable("the ledger has more to write than it can in time"))
                continue
            return item
        return None


def _fail(item: _Item, error: Exception) -> None:
    if not item.outcome.done():
        item.outcome.set_exception(error)


def _note_exception(task: asyncio.Task[Any]) -> None:
    """Mark the exception as seen: its caller may have been cancelled."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()
