"""The ledger on PostgreSQL: a pool, one transaction for each piece of work, conflicts tried again.

Must never hand a connection back in the middle of a conversation: work runs in a task of its own which a caller's
cancellation does not reach, and a connection whose state is unknown is thrown away.
"""

import asyncio
import contextlib
import math
import random
from typing import Any, TypeVar

from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from ledger.database_errors import is_conflict, is_connection_lost, mapped
from ledger.settings import LedgerSettings
from ledger.store import Store, Work
from mesh.contract.errors import unavailable

T = TypeVar("T")

TRIES_MAX = 6
# The server ends what our side has given up on long ago.
STATEMENT_TIMEOUT_S = 30


def _connect_args(settings: LedgerSettings) -> dict[str, Any]:
    timeout_ms = int(settings.database_timeout_s * 1000)
    return {
        "connect_timeout": max(2, math.ceil(settings.database_timeout_s)),
        "application_name": "intentmesh-ledger",
        "options": f"-c statement_timeout={STATEMENT_TIMEOUT_S}s -c idle_in_transaction_session_timeout=60s",
        # A peer that vanished without a word is noticed by the kernel, which frees the connection.
        "tcp_user_timeout": timeout_ms * 2,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
    }


class PostgresStore(Store):
    """See the module."""

    def __init__(self, url: URL, settings: LedgerSettings) -> None:
        self._timeout_s = settings.database_timeout_s
        self._engine = create_async_engine(
            url,
            pool_size=settings.database_pool_size,
            max_overflow=0,
            pool_timeout=settings.database_timeout_s,
            connect_args=_connect_args(settings),
        )
        self._snapshots = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closing = False

    async def write(self, work: Work[T], *, is_repeatable: bool = False, timeout_s: float | None = None) -> T:
        """See Store.write."""
        return await self._run(self._engine, work, timeout_s, is_write=True, is_repeatable=is_repeatable)

    async def read(self, work: Work[T], *, timeout_s: float | None = None) -> T:
        """See Store.read."""
        return await self._run(self._snapshots, work, timeout_s, is_write=False, is_repeatable=True)

    async def close(self) -> None:
        """See Store.close."""
        self._is_closing = True
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self._timeout_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self._timeout_s)
        await self._engine.dispose()

    async def _run(
        self, engine: AsyncEngine, work: Work[T], timeout_s: float | None, *, is_write: bool, is_repeatable: bool
    ) -> T:
        if self._is_closing:
            raise unavailable("the ledger is closing")
        task = asyncio.create_task(self._try(engine, work, is_write=is_write, is_repeatable=is_repeatable))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_note_exception)
        try:
            async with asyncio.timeout(timeout_s or self._timeout_s):
                return await asyncio.shield(task)
        except TimeoutError as error:
            # The task goes on alone: only the server knows how it ends, and a retry will find out.
            raise unavailable("the ledger's database does not answer in time") from error

    async def _try(self, engine: AsyncEngine, work: Work[T], *, is_write: bool, is_repeatable: bool) -> T:
        for tries_left in reversed(range(TRIES_MAX)):
            is_committing = False
            try:
                async with engine.connect() as connection:
                    try:
                        value = await work(connection)
                        if is_write:
                            is_committing = True
                            await connection.commit()
                        return value
                    except asyncio.CancelledError:
                        await _throw_away(connection)
                        raise
            except Exception as error:
                is_unknown = is_committing and not is_conflict(error)
                can_retry = is_conflict(error) or (is_connection_lost(error) and (is_repeatable or not is_unknown))
                if can_retry and tries_left:
                    await asyncio.sleep(random.uniform(0.001, 0.02) * (TRIES_MAX - tries_left))
                    continue
                if (meant := mapped(error)) is not None:
                    raise meant from error
                raise
        raise AssertionError("the last try returns or raises")


async def _throw_away(connection: AsyncConnection) -> None:
    with contextlib.suppress(Exception):
        await asyncio.shield(connection.invalidate())


def _note_exception(task: asyncio.Task[Any]) -> None:
    """Mark the exception as seen: its caller may have been cancelled or have given up."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()
