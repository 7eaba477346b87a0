"""The database's schema: brought up to date by migrations, or found to be of another release.

Must never start on a schema that this release does not know.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.store import Store
from mesh.contract.errors import ErrorCode, MeshError

FOLDER = Path(__file__).parent / "migrations"
UPGRADE_TIMEOUT_S = 3600.0
# Any number, the same in every process: PostgreSQL's advisory lock of those who upgrade.
_LOCK = 7_301_911


def alembic_config(connection: Connection) -> Config:
    """Return Alembic's settings for a connection that is in a transaction already."""
    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _is_current(connection: Connection) -> bool:
    """Whether the schema is this release's.

    Raises: MeshError `conflict` for one that this release does not know.
    """
    scripts = ScriptDirectory.from_config(alembic_config(connection))
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is None:
        return False
    try:
        scripts.get_revision(revision)
    except CommandError as error:
        raise MeshError(
            ErrorCode.CONFLICT,
            f"the database's schema is at revision {revision}, which this release does not know",
            hint="it was made by a newer release: run that one",
        ) from error
    return revision == scripts.get_current_head()


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Bring the schema to a revision, inside the connection's transaction."""
    command.upgrade(alembic_config(connection), revision)


def _upgrade_if_needed(connection: Connection) -> None:
    if _is_current(connection):
        return
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    upgrade(connection)


@contextmanager
def _first_look() -> Iterator[None]:
    """Say what an operator needs: which server did not answer, and why. The database's own words hold no password."""
    try:
        yield
    except MeshError as error:
        if error.code is not ErrorCode.UNAVAILABLE:
            raise
        why = str(getattr(error.__cause__, "orig", None) or "").strip().partition("\n")[0]
        raise MeshError(
            error.code,
            f"{error.detail}: {why}" if why else error.detail,
            hint="start the database, or correct INTENTMESH_DATABASE_URL",
            retryable=True,
        ) from error


async def upgrade_schema(store: Store) -> None:
    """Bring the schema up to date; does nothing when it is.

    Raises: MeshError `conflict`, `unavailable`.
    """

    async def work(connection: AsyncConnection) -> None:
        await connection.run_sync(_upgrade_if_needed)

    with _first_look():
        await store.write(work, timeout_s=UPGRADE_TIMEOUT_S)


async def check_schema(store: Store) -> None:
    """Raise MeshError `conflict` when the schema is not this release's."""

    async def work(connection: AsyncConnection) -> bool:
        return await connection.run_sync(_is_current)

    with _first_look():
        is_current = await store.read(work)
    if not is_current:
        raise MeshError(
            ErrorCode.CONFLICT,
            "the database's schema is older than this release",
            hint="run: intentmesh db upgrade",
        )
