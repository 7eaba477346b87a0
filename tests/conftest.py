"""Fixtures that all tests may use: real databases of both kinds, and a ledger over them."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.databases import Database, PostgresTemplate, SqliteTemplate
from support.postgres import PostgresServer
from support.recording_port import RecordingPort

from ledger.ledger import Ledger, open_ledger
from ledger.settings import LedgerSettings


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One PostgreSQL for the session."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def postgres_template(postgres_server: PostgresServer) -> PostgresTemplate:
    """A migrated PostgreSQL database to copy."""
    return PostgresTemplate(postgres_server)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> SqliteTemplate:
    """A migrated SQLite file to copy."""
    return SqliteTemplate(tmp_path_factory.mktemp("sqlite"))


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A fresh database with the current schema, once of each kind."""
    if request.param == "sqlite":
        template: SqliteTemplate = request.getfixturevalue("sqlite_template")
        yield template.copy_to(tmp_path)
        return
    copies: PostgresTemplate = request.getfixturevalue("postgres_template")
    fresh, name = copies.copy()
    yield fresh
    copies.server.drop_database(name)


@pytest.fixture
def ledger_settings(database: Database, tmp_path: Path) -> LedgerSettings:
    """Settings of a ledger over a fresh database."""
    return LedgerSettings(database_url=database.url, data_dir=tmp_path)


@pytest.fixture
def port() -> RecordingPort:
    """What the ledger tells the mesh."""
    return RecordingPort()


@pytest.fixture
async def ledger(ledger_settings: LedgerSettings, port: RecordingPort) -> AsyncIterator[Ledger]:
    """A ledger over a fresh database, without embedder and without background loops."""
    opened = await open_ledger(ledger_settings, port=port, embedder=None)
    yield opened
    await opened.close()
