"""The ledger on one SQLite file: one writing process, one writing task, group commit.

Algorithm: writers queue their work; the writer's thread begins a transaction, runs all work that is waiting, each under
a savepoint, commits once and only then answers. Work runs whole in that thread (inline_connection.py). So one fsync serves many, and a piece of work that fails is undone
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog
from sqlalchemy import create_engine, event
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.pool import StaticPool

from ledger.database_errors import mapped
from ledger.inline_connection import run_whole
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


@dataclass(frozen=True)
class _Outcome:
    """What work returned, or why it did not."""

    value: Any = None
    error: Exception | None = None


@dataclass
class _Group:
    """Who is in the transaction, and who was refused before or alone."""

    members: dict[_Item, _Outcome] = field(default_factory=dict)
    refused: list[tuple[_Item, _Outcome]] = field(default_factory=list)


def _engine(url: URL, begin: str, pragmas: tuple[str, ...], **options: Any) -> Engine:
    # isolation_level None: the driver begins nothing by itself, the hook below does. Connections move between the
    # threads of a pool, one at a time.
    arguments = {"isolation_level": None, "check_same_thread": False}
    engine = create_engine(url, connect_args=arguments, **options)

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        for pragma in pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
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
        self._loop = asyncio.get_running_loop()
        self._write_thread = ThreadPoolExecutor(1, "ledger-writer")
        self._read_threads = ThreadPoolExecutor(READERS, "ledger-reader")
        self._waiting: deque[_Item] = deque()
        self._arrived = asyncio.Event()
        self._is_closing = False
        self._reads: set[asyncio.Future[Any]] = set()
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
        item = _Item(work, self._loop.create_future(), give_up_at_s)
        self._waiting.append(item)
        self._arrived.set()
        result: T = await item.outcome
        return result

    async def read(self, work: Work[T], *, timeout_s: float | None = None) -> T:
        """See Store.read."""
        if self._reading is None:
            return await self.write(work, timeout_s=timeout_s)
        if self._is_closing:
            raise unavailable("the ledger is closing")
        reading = self._loop.run_in_executor(self._read_threads, self._read, self._reading, work)
        self._reads.add(reading)
        reading.add_done_callback(self._reads.discard)
        reading.add_done_callback(_note_exception)
        return await asyncio.shield(reading)

    @staticmethod
    def _read(engine: Engine, work: Work[T]) -> T:
        try:
            with engine.connect() as connection:
                return run_whole(work, connection)
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
        # In their own threads: a connection is closed where it was used.
        await self._loop.run_in_executor(self._write_thread, self._writing.dispose)
        if self._reading is not None:
            await self._loop.run_in_executor(self._read_threads, self._reading.dispose)
        self._write_thread.shutdown()
        self._read_threads.shutdown()
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
            for item, outcome in await self._loop.run_in_executor(self._write_thread, self._run_group):
                _answer(item, outcome)

    # ---- in the writer's thread

    def _run_group(self) -> list[tuple[_Item, _Outcome]]:
        """Run what waits in one transaction, and return what to answer to whom, after COMMIT."""
        group = _Group()
        try:
            if (first := self._next(group)) is not None:
                # Joins before anything can fail, so that whoever waits longest is told when not even BEGIN works.
                group.members[first] = _Outcome()
                self._commit_group(group, first)
        except Exception as error:
            # The transaction as a whole is gone: whoever was in it is told so, and the next group begins anew.
            if (meant := mapped(error)) is None:
                log.exception("ledger.group_failed", members=len(group.members))
            group.members = dict.fromkeys(group.members, _Outcome(error=meant or error))
        return [*group.refused, *group.members.items()]

    def _commit_group(self, group: "_Group", first: _Item) -> None:
        began_s = time.monotonic()
        with self._writing.connect() as connection:
            try:
                connection.begin()
                item: _Item | None = first
                while item is not None:
                    self._run_one(connection, item, group)
                    is_full = len(group.members) >= GROUP_ITEMS_MAX or time.monotonic() - began_s > GROUP_S
                    item = None if is_full else self._next(group)
                connection.commit()
            except Exception:
                # Thrown away, not rolled back: some errors have ended the transaction already, and then that fails.
                with contextlib.suppress(Exception):
                    connection.invalidate()
                raise

    @staticmethod
    def _run_one(connection: Connection, item: _Item, group: "_Group") -> None:
        group.members[item] = _Outcome()
        savepoint = connection.begin_nested()
        try:
            group.members[item] = _Outcome(run_whole(item.work, connection))
        except Exception as error:
            # Some errors (disk full) end the whole transaction: then this raises, and the group fails with the first.
            try:
                savepoint.rollback()
            except Exception:
                raise error from None
            del group.members[item]
            group.refused.append((item, _Outcome(error=mapped(error) or error)))
        else:
            savepoint.commit()

    def _next(self, group: "_Group") -> _Item | None:
        """Take the next item that somebody still waits for."""
        while self._waiting:
            item = self._waiting.popleft()
            if item.outcome.done():  # its caller was cancelled before it began
                continue
            if time.monotonic() > item.give_up_at_s:
                late = unavailable("the ledger has more to write than it can in time")
                group.refused.append((item, _Outcome(error=late)))
                continue
            return item
        return None


def _answer(item: _Item, outcome: _Outcome) -> None:
    if item.outcome.done():
        return
    if outcome.error is not None:
        item.outcome.set_exception(outcome.error)
    else:
        item.outcome.set_result(outcome.value)


def _note_exception(reading: asyncio.Future[Any]) -> None:
    """Mark the exception as seen: its caller may have been cancelled."""
    with contextlib.suppress(asyncio.CancelledError):
        reading.exception()
