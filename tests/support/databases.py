"""Fresh databases with the current schema, of both kinds, made by copying one that was migrated once."""

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from support.postgres import PostgresServer

from ledger.schema import upgrade_schema
from ledger.settings import LedgerSettings
from ledger.store import open_store


@dataclass(frozen=True)
class Database:
    """A database of a test. `kind`: sqlite or postgres."""

    kind: str
    url: str


def migrate(url: str) -> None:
    """Bring a database's schema up to date, in an event loop of its own."""

    async def run() -> None:
        store = await open_store(LedgerSettings(database_url=url))
        try:
            await upgrade_schema(store)
        finally:
            await store.close()

    asyncio.run(run())


class SqliteTemplate:
    """One migrated file and its copies."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "template.sqlite3"
        migrate(f"sqlite:///{self._file}")

    def copy_to(self, folder: Path) -> Database:
        """Return a fresh database in a folder."""
        file = folder / "ledger.sqlite3"
        shutil.copyfile(self._file, file)
        return Database("sqlite", f"sqlite:///{file}")


class PostgresTemplate:
    """One migrated database of a server and its copies."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self._name = server.create_database()
        migrate(server.url(self._name))

    def copy(self) -> tuple[Database, str]:
        """Return a fresh database and its name on the server."""
        name = self.server.create_database(template=self._name)
        return Database("postgres", self.server.url(name)), name
