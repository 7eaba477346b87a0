"""The schema's history: a populated older database comes up to date, and ends where the models are."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from support.databases import Database, migrate
from support.ledger_rows import TENANT, claim, commit, submit
from support.postgres import PostgresServer
from support.recording_port import RecordingPort

from ledger import schema
from ledger.ledger import open_ledger
from ledger.models import metadata
from ledger.schema import alembic_config, upgrade
from ledger.settings import LedgerSettings
from mesh.contract.errors import ErrorCode, MeshError

NOW_MS = 1_750_000_000_000


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database without a schema."""
    if request.param == "sqlite":
        yield Database("sqlite", f"sqlite:///{tmp_path}/old.sqlite3")
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = server.create_database()
    yield Database("postgres", server.url(name))
    server.drop_database(name)


@pytest.fixture
def engine(empty: Database) -> Iterator[Engine]:
    """A plain engine on it, with transactional DDL."""
    made = create_engine(empty.url, **({"connect_args": {"isolation_level": None}} if empty.kind == "sqlite" else {}))
    if empty.kind == "sqlite":

        @event.listens_for(made, "begin")
        def begin(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    yield made
    made.dispose()


def _insert(connection: Connection, table: str, **values: Any) -> None:
    names = ", ".join(values)
    marks = ", ".join(f":{name}" for name in values)
    connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({marks})"), values)


def _populate_0001(connection: Connection) -> None:
    """Two tenants with equal thread ids, and a conversation of two turns in one of them."""
    for tenant in (TENANT, "other"):
        _insert(
            connection,
            "threads",
            tenant_id=tenant,
            thread_id="t",
            seq_count=1,
            turn_count=2 if tenant == TENANT else 0,
            created_at_ms=NOW_MS,
            updated_at_ms=NOW_MS,
        )
    for turn in (1, 2):
        here = {"tenant_id": TENANT, "thread_id": "t", "turn_number": turn}
        _insert(connection, "turns", **here, created_at_ms=NOW_MS)
        for position, role in enumerate(("user", "assistant")):
            _insert(
                connection,
                "messages",
                **here,
                message_id=f"{turn}-{position}",
                position=position,
                role=role,
                content=f"said {turn}",
                tokens=6,
                at_ms=NOW_MS,
            )
    _insert(
        connection,
        "intents",
        intent_id="i1",
        tenant_id=TENANT,
        thread_id="t",
        seq=1,
        type="chat",
        state="succeeded",
        payload=json.dumps({"text": "said 1"}),
        metadata="{}",
        priority=0,
        on_busy="enqueue",
        request_sha256="x",
        attempts_per_run=3,
        max_attempts=3,
        available_at_ms=NOW_MS,
        announce_after_ms=NOW_MS,
        created_at_ms=NOW_MS,
        finished_at_ms=NOW_MS,
    )


async def test_a_populated_older_database_comes_up_to_date(empty: Database, engine: Engine) -> None:
    """Rows of the first revision are there afterwards, counts are filled in, and the ledger works on."""
    with engine.begin() as connection:
        upgrade(connection, "0001")
        _populate_0001(connection)
    ledger = await open_ledger(LedgerSettings(database_url=empty.url), port=RecordingPort(), embedder=None)
    try:
        assert (await ledger.threads.get(TENANT, "t")).message_count == 4
        assert (await ledger.threads.get("other", "t")).message_count == 0
        assert (await ledger.intents.get(TENANT, "i1")).payload == {"text": "said 1"}
        held = await claim(ledger, await submit(ledger, "go on"))
        assert [message.content for message in held.messages] == ["said 1", "said 1", "said 2", "said 2"]
        assert (await commit(ledger, held)).turn_number == 3
    finally:
        await ledger.close()


def test_the_migrations_end_where_the_models_are(empty: Database, engine: Engine) -> None:
    """No table, column, index or constraint differs, checks included."""
    with engine.begin() as connection:
        upgrade(connection)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        found = inspect(connection)
        for table in metadata.sorted_tables:
            wanted = {str(one.name) for one in table.constraints if type(one).__name__ == "CheckConstraint"}
            assert {one["name"] for one in found.get_check_constraints(table.name)} == wanted
        indexes = found.get_indexes("intents")
        unique = {index["name"] for index in indexes if index["unique"]}
        assert "one_active_intent_per_thread" in unique


def test_each_revision_can_be_undone(empty: Database, engine: Engine) -> None:
    """Down to nothing and up again."""
    with engine.begin() as connection:
        upgrade(connection)
        command.downgrade(alembic_config(connection), "base")
        assert inspect(connection).get_table_names() == ["alembic_version"]
        upgrade(connection)


def test_the_history_is_one_line(engine: Engine) -> None:
    """One head, revisions in order."""
    with engine.connect() as connection:
        scripts = ScriptDirectory.from_config(alembic_config(connection))
        revisions = [script.revision for script in scripts.walk_revisions()]
    assert revisions == sorted(revisions, reverse=True)
    assert scripts.get_heads() == revisions[:1]


async def test_a_schema_of_a_newer_release_is_refused(empty: Database, engine: Engine) -> None:
    """Rather than written to."""
    with engine.begin() as connection:
        upgrade(connection)
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(MeshError) as refused:
        await open_ledger(LedgerSettings(database_url=empty.url), port=RecordingPort(), embedder=None)
    assert refused.value.code is ErrorCode.CONFLICT
    assert "9999" in refused.value.detail


async def test_an_old_schema_is_refused_when_upgrades_are_off(empty: Database) -> None:
    """With the command that mends it."""
    settings = LedgerSettings(database_url=empty.url, auto_upgrade=False)
    with pytest.raises(MeshError) as refused:
        await open_ledger(settings, port=RecordingPort(), embedder=None)
    assert refused.value.hint is not None
    assert "intentmesh db upgrade" in refused.value.hint


def test_a_migration_that_fails_leaves_the_schema_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All revisions run in one transaction, also on SQLite."""

    def upgrade_and_fail(connection: Connection, revision: str = "head") -> None:
        upgrade(connection, revision)
        raise RuntimeError("power cut")

    monkeypatch.setattr(schema, "upgrade", upgrade_and_fail)
    with pytest.raises(RuntimeError):
        migrate(f"sqlite:///{tmp_path}/x.sqlite3")
    connection = sqlite3.connect(tmp_path / "x.sqlite3")
    assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    connection.close()
