"""The store on SQLite: one process, one writer, group commit, and a disk that says no."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection
from support.databases import SqliteTemplate

from ledger.settings import LedgerSettings
from ledger.sqlite_store import SqliteStore
from ledger.store import open_store
from mesh.contract.errors import ErrorCode, MeshError


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    """A store with one table."""
    opened = await open_store(LedgerSettings(database_url=f"sqlite:///{tmp_path}/l.sqlite3", database_timeout_s=0.5))
    assert isinstance(opened, SqliteStore)
    await _execute(opened, "CREATE TABLE t (n INTEGER PRIMARY KEY, blob TEXT)")
    yield opened
    await opened.close()


async def _execute(store: SqliteStore, statement: str) -> None:
    async def work(connection: AsyncConnection) -> None:
        await connection.execute(text(statement))

    await store.write(work)


async def _read(store: SqliteStore, statement: str) -> list[object]:
    async def work(connection: AsyncConnection) -> list[object]:
        return list((await connection.execute(text(statement))).scalars())

    return await store.read(work)


async def test_the_durable_pragmas_are_on(store: SqliteStore) -> None:
    """WAL and FULL: NORMAL loses acknowledged commits in a power cut."""

    async def work(connection: AsyncConnection) -> list[object]:
        names = ("journal_mode", "synchronous", "foreign_keys")
        return [(await connection.execute(text(f"PRAGMA {name}"))).scalar_one() for name in names]

    assert await store.write(work) == ["wal", 2, 1]


async def test_many_writers_share_a_commit(store: SqliteStore) -> None:
    """Group commit: 200 parallel writes need far fewer commits, and all are there."""
    commits = []
    event.listen(store._writing, "commit", commits.append)
    await asyncio.gather(*(_execute(store, f"INSERT INTO t (n) VALUES ({number})") for number in range(200)))
    assert len(await _read(store, "SELECT n FROM t")) == 200
    assert len(commits) < 50


async def test_work_that_fails_is_undone_alone(store: SqliteStore) -> None:
    """Its neighbours in the group are committed."""

    async def half(connection: AsyncConnection) -> None:
        await connection.execute(text("INSERT INTO t (n) VALUES (100)"))
        await connection.execute(text("INSERT INTO t (n) VALUES (1)"))

    jobs = [_execute(store, f"INSERT INTO t (n) VALUES ({number})") for number in range(5)]
    answers = await asyncio.gather(*jobs[:3], store.write(half), *jobs[3:], return_exceptions=True)
    assert [type(answer) for answer in answers if answer is not None] == [IntegrityError]
    assert await _read(store, "SELECT n FROM t ORDER BY n") == [0, 1, 2, 3, 4]


async def test_a_cancelled_caller_harms_nobody(store: SqliteStore) -> None:
    """Waiting work is dropped, begun work is finished, and the writer goes on."""
    is_begun, may_end = threading.Event(), threading.Event()

    async def slow(connection: AsyncConnection) -> None:
        is_begun.set()
        assert may_end.wait(10)
        await connection.execute(text("INSERT INTO t (n) VALUES (1)"))

    begun = asyncio.create_task(store.write(slow))
    assert await asyncio.to_thread(is_begun.wait, 10)
    waiting = asyncio.create_task(_execute(store, "INSERT INTO t (n) VALUES (2)"))
    await asyncio.sleep(0)
    for task in (begun, waiting):
        task.cancel()
    may_end.set()
    assert [type(one) for one in await asyncio.gather(begun, waiting, return_exceptions=True)] == [
        asyncio.CancelledError
    ] * 2
    await _execute(store, "INSERT INTO t (n) VALUES (3)")
    assert await _read(store, "SELECT n FROM t ORDER BY n") == [1, 3]


async def test_waiting_for_a_turn_is_bounded(store: SqliteStore) -> None:
    """Work that did not begin in time is refused with a hint to come again: it will not happen."""
    may_end = threading.Event()

    async def stuck(connection: AsyncConnection) -> None:
        assert may_end.wait(10)

    blocking = asyncio.create_task(store.write(stuck))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(_execute(store, "INSERT INTO t (n) VALUES (1)"))
    await asyncio.sleep(0.6)
    may_end.set()
    await blocking
    with pytest.raises(MeshError) as refused:
        await waiting
    assert (refused.value.code, refused.value.retryable) == (ErrorCode.UNAVAILABLE, True)
    assert await _read(store, "SELECT n FROM t") == []


async def test_a_full_disk_is_said_and_survived(store: SqliteStore) -> None:
    """507 for those who do not fit, nothing half written, and all works again with space."""

    async def limit(pages: int) -> None:
        async def work(connection: AsyncConnection) -> None:
            await connection.execute(text(f"PRAGMA max_page_count={pages}"))

        await store.write(work)

    await limit(20)
    big = "x" * 100_000
    answers = await asyncio.gather(
        _execute(store, "INSERT INTO t VALUES (1, 'small')"),
        _execute(store, f"INSERT INTO t VALUES (2, '{big}')"),
        _execute(store, "INSERT INTO t VALUES (3, 'small')"),
        return_exceptions=True,
    )
    refused = [answer for answer in answers if isinstance(answer, MeshError)]
    assert refused
    assert {error.code for error in refused} == {ErrorCode.STORAGE_FULL}
    stored = await _read(store, "SELECT n FROM t ORDER BY n")
    assert stored == [number for number, answer in zip((1, 2, 3), answers, strict=True) if answer is None]
    assert 2 not in stored
    # The limit went with the connection that was thrown away, or goes now.
    await limit(100_000)
    await _execute(store, f"INSERT INTO t VALUES (4, '{big}')")
    assert 4 in await _read(store, "SELECT n FROM t")


async def test_a_read_cannot_write(store: SqliteStore) -> None:
    """The readers' connections refuse it."""
    with pytest.raises((MeshError, OperationalError)):
        await _read(store, "INSERT INTO t (n) VALUES (1) RETURNING n")


async def test_a_second_process_is_refused_by_name_of_the_remedy(
    tmp_path: Path, sqlite_template: SqliteTemplate
) -> None:
    """And the file is free again when the first has closed it."""
    database = sqlite_template.copy_to(tmp_path)
    settings = LedgerSettings(database_url=database.url)
    store = await open_store(settings)
    program = (
        "import asyncio; from ledger.settings import LedgerSettings; from ledger.store import open_store\n"
        f"asyncio.run(open_store(LedgerSettings(database_url={database.url!r})))"
    )
    root = Path(__file__).parents[3]
    other = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert other.returncode == 1
    assert "another process has the ledger" in other.stderr
    with pytest.raises(MeshError) as refused:
        await open_store(settings)
    assert refused.value.code is ErrorCode.CONFLICT
    assert refused.value.hint is not None
    assert "PostgreSQL" in refused.value.hint
    await store.close()
    await (await open_store(settings)).close()


async def test_closing_finishes_what_waits(tmp_path: Path) -> None:
    """And refuses what comes later."""
    settings = LedgerSettings(database_url=f"sqlite:///{tmp_path}/l.sqlite3")
    store = await open_store(settings)
    assert isinstance(store, SqliteStore)
    await _execute(store, "CREATE TABLE t (n INTEGER PRIMARY KEY)")
    writes = [asyncio.create_task(_execute(store, f"INSERT INTO t (n) VALUES ({number})")) for number in range(10)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*writes)
    with pytest.raises(MeshError):
        await _execute(store, "INSERT INTO t (n) VALUES (99)")
    again = await open_store(settings)
    assert isinstance(again, SqliteStore)
    assert len(await _read(again, "SELECT n FROM t")) == 10
    await again.close()


async def test_a_database_in_memory_works_for_tests() -> None:
    """One connection for all."""
    store = await open_store(LedgerSettings(database_url="sqlite://"))
    assert isinstance(store, SqliteStore)
    await _execute(store, "CREATE TABLE t (n INTEGER)")
    await _execute(store, "INSERT INTO t VALUES (7)")
    assert await _read(store, "SELECT n FROM t") == [7]
    await store.close()


@pytest.mark.parametrize("url", ["mysql://root:hunter2@db/x", "not a url hunter2", ""])
async def test_an_unknown_database_is_refused_without_showing_the_password(url: str) -> None:
    """With the two forms that are known."""
    with pytest.raises(MeshError) as refused:
        await open_store(LedgerSettings(database_url=url))
    assert "hunter2" not in f"{refused.value} {refused.value.hint}"


async def test_work_that_waits_for_something_else_is_refused(store: SqliteStore) -> None:
    """It would hold the only writer: it is undone, and the next one is served."""

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(text("INSERT INTO t (n) VALUES (1)"))
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="nothing but its connection"):
        await store.write(work)
    await _execute(store, "INSERT INTO t (n) VALUES (2)")
    assert await _read(store, "SELECT n FROM t") == [2]
