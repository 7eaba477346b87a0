"""Transactions over the ledger's database, whichever of the two it is.

`write` and `read` take a piece of work and run it in one transaction of its own. Once begun, work runs to its end
even when its caller is cancelled, so that no connection is left in the middle of a conversation.
Must never let work do anything but SQL: while it runs it holds locks.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.models import now_ms
from ledger.settings import LedgerSettings
from mesh.contract.errors import ErrorCode, MeshError

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]
# One row by the names of its columns.
Row = Mapping[Any, Any]


class Store(ABC):
    """The ledger's database. Foreign errors come out as MeshError; IntegrityError comes out as it is."""

    @abstractmethod
    async def write(self, work: Work[T], *, is_repeatable: bool = False, timeout_s: float | None = None) -> T:
        """Run `work` in a transaction, commit, and return what it returned.

        `work` may be run more than once: whatever it did before was undone. With `is_repeatable` that also holds
        when the reply to COMMIT was lost: then `work` must find out by itself whether it has happened already.
        Raises: MeshError `unavailable`, `storage_full`, `invalid_request` or `too_large` (a value that no
            database stores); what `work` raises.
        """

    @abstractmethod
    async def read(self, work: Work[T], *, timeout_s: float | None = None) -> T:
        """Run `work` on one snapshot and return what it returned. It cannot write.

        Raises: MeshError `unavailable`; what `work` raises.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish the work that was begun and let go of the database."""

    async def ping(self) -> None:
        """Return when the database answers.

        Raises: MeshError `unavailable`.
        """

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(select(now_ms()))

        await self.read(work)


def database_url(settings: LedgerSettings) -> URL:
    """Return the URL with its driver, for one of the two databases.

    Raises: MeshError `invalid_request` for any other.
    """
    try:
        url = make_url(settings.effective_database_url)
    except ArgumentError:
        url = None  # never echo it: it may hold a password
    match url.get_backend_name() if url is not None else None:
        case "sqlite" if url is not None:
            return url.set(drivername="sqlite")
        case "postgresql" | "postgres" if url is not None:
            return url.set(drivername="postgresql+psycopg")
        case _:
            raise MeshError(
                ErrorCode.INVALID_REQUEST,
                "INTENTMESH_DATABASE_URL names no database that the ledger knows",
                hint="postgresql://user:password@host/name or sqlite:///path/to/file",
            )


async def open_store(settings: LedgerSettings) -> Store:
    """Open the database that the settings name; its schema is not looked at.

    Raises: MeshError `conflict` when another process has the SQLite file, `unavailable`, `invalid_request`.
    """
    # The two know this module's Store: imported late, or the circle would not close.
    from ledger.postgres_store import PostgresStore
    from ledger.sqlite_store import SqliteStore

    url = database_url(settings)
    if url.get_backend_name() == "sqlite":
        return await SqliteStore.open(url, settings)
    return PostgresStore(url, settings)


def sqlite_path(url: URL) -> Path | None:
    """Return the file of a SQLite URL, None for a database in memory."""
    return None if url.database in {None, "", ":memory:"} else Path(str(url.database)).absolute()
