"""A synchronous connection with the face of an asynchronous one, for work that runs whole in a database thread.

Work is written once, as coroutines over an AsyncConnection. On PostgreSQL each statement is awaited on the event
loop. SQLite answers in microseconds, less than the hops to its thread and back take; so there the coroutine itself
runs in that thread, and everything that it awaits is done at once (docs/adr/0007).
Must never be handed work that waits for anything but its connection: that would stop, and is refused.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, CursorResult, Dialect, Executable
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.store import Work

T = TypeVar("T")


class InlineConnection:
    """What work uses of an AsyncConnection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __repr__(self) -> str:
        return f"InlineConnection({self._connection!r})"

    @property
    def dialect(self) -> Dialect:
        """The database's dialect."""
        return self._connection.dialect

    async def execute(self, statement: Executable, parameters: Any = None) -> CursorResult[Any]:
        """See AsyncConnection.execute."""
        return self._connection.execute(statement, parameters)

    async def run_sync(self, function: Callable[..., T], *arguments: Any) -> T:
        """See AsyncConnection.run_sync."""
        return function(self._connection, *arguments)


def run_whole(work: Work[T], connection: Connection) -> T:
    """Run work to its end in this thread, and return what it returned.

    Raises: what `work` raises; RuntimeError when it waits for something else.
    """
    coroutine = cast(Any, work(cast(AsyncConnection, InlineConnection(connection))))
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    coroutine.close()
    raise RuntimeError("the work of a transaction may wait for nothing but its connection")
