"""The store on PostgreSQL: outages, conflicts, cancelled callers, lost replies to COMMIT."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection
from support.databases import PostgresTemplate, migrate
from support.ledger_rows import TENANT, claim, commit, fail, get, kinds, submit
from support.postgres import PostgresServer
from support.recording_port import RecordingPort

from ledger.ledger import Ledger, open_ledger
from ledger.settings import LedgerSettings
from mesh.contract.errors import Cause, ErrorCode, MeshError
from mesh.contract.states import State


@pytest.fixture
async def ledger(postgres_template: PostgresTemplate) -> AsyncIterator[Ledger]:
    """A ledger on the session's PostgreSQL."""
    database, name = postgres_template.copy()
    opened = await open_ledger(LedgerSettings(database_url=database.url), port=RecordingPort(), embedder=None)
    yield opened
    await opened.close()
    postgres_template.server.drop_database(name)


@pytest.fixture(scope="module")
def fragile_server() -> Iterator[PostgresServer]:
    """A server of its own, to be stopped and frozen."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
async def fragile(fragile_server: PostgresServer) -> AsyncIterator[tuple[PostgresServer, Ledger]]:
    """A ledger on it."""
    name = fragile_server.create_database()
    url = fragile_server.url(name)
    await asyncio.to_thread(migrate, url)
    opened = await open_ledger(LedgerSettings(database_url=url), port=RecordingPort(), embedder=None)
    yield fragile_server, opened
    await opened.close()


async def _is_unavailable_soon(ledger: Ledger) -> None:
    began_s = time.monotonic()
    with pytest.raises(MeshError) as refused:
        await submit(ledger, "lost?")
    assert (refused.value.code, refused.value.retryable) == (ErrorCode.UNAVAILABLE, True)
    assert time.monotonic() - began_s < 2.5


async def _works_again(ledger: Ledger) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await submit(ledger, "again", thread="again", key="again")
                return
            except MeshError:
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
async def test_a_stopped_server_is_unavailable_and_then_works_again(
    fragile: tuple[PostgresServer, Ledger], how: signal.Signals
) -> None:
    """503 within 2 s, recovery without a restart of ours, and nothing that was accepted is lost."""
    server, ledger = fragile
    before = await submit(ledger, "before")
    await asyncio.to_thread(server.stop, how=how)
    try:
        await _is_unavailable_soon(ledger)
        with pytest.raises(MeshError):
            await ledger.sweeper.tick()
        with pytest.raises(MeshError):
            await ledger.ping()
    finally:
        await asyncio.to_thread(server.start)
    await _works_again(ledger)
    await ledger.sweeper.tick()
    assert (await get(ledger, before)).status is State.READY


async def test_a_frozen_server_is_unavailable_and_then_works_again(fragile: tuple[PostgresServer, Ledger]) -> None:
    """No reply and no error from below: our own clock decides, and the pool is not used up for good."""
    server, ledger = fragile
    before = await submit(ledger, "before")
    server.freeze(is_frozen=True)
    try:
        answers = await asyncio.gather(*(_is_unavailable_soon(ledger) for _ in range(12)))
        assert len(answers) == 12
    finally:
        server.freeze(is_frozen=False)
    await _works_again(ledger)
    assert (await get(ledger, before)).status is State.READY


async def test_transactions_that_block_each_other_are_run_again(ledger: Ledger) -> None:
    """A deadlock is nobody's error: both happen."""
    await ledger.keys.add("a", "x")
    await ledger.keys.add("b", "x")
    both_hold_one = asyncio.Barrier(2)

    async def write(first: str, second: str) -> None:
        is_first_try = True

        async def work(connection: AsyncConnection) -> None:
            nonlocal is_first_try
            raise_weight = "UPDATE tenants SET weight = weight + 1 WHERE tenant_id = :tenant"
            await connection.execute(text(raise_weight), {"tenant": first})
            if is_first_try:
                is_first_try = False
                await both_hold_one.wait()
            await connection.execute(text(raise_weight), {"tenant": second})

        await ledger.store.write(work, timeout_s=10)

    await asyncio.gather(write("a", "b"), write("b", "a"))

    async def weights(connection: AsyncConnection) -> list[float]:
        return list((await connection.execute(text("SELECT weight FROM tenants"))).scalars())

    assert await ledger.store.read(weights) == [3.0, 3.0]


async def test_cancelled_callers_leave_no_connection_in_the_middle(ledger: Ledger) -> None:
    """More cancelled calls than the pool has connections; then everything works, and answers are their own."""
    for number in range(30):
        calls = [asyncio.create_task(submit(ledger, str(number), thread=f"c{number}")) for _ in range(3)]
        await asyncio.sleep(0.002 * (number % 5))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    intent = await submit(ledger, "mine", thread="mine")
    assert (await get(ledger, intent)).payload == {"text": "mine"}
    for thread in (await ledger.threads.list(TENANT, limit=100))[0]:
        await kinds(ledger, thread.thread_id)


async def test_a_read_cannot_write(ledger: Ledger) -> None:
    """Read transactions are read only."""

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(text("UPDATE tenants SET weight = 2"))

    with pytest.raises(MeshError, match="25006"):
        await ledger.store.read(work)


@pytest.fixture
def lose_one_reply(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a switch: the next COMMIT happens, and its reply is lost."""

    def lose() -> None:
        commit_really = AsyncConnection.commit

        async def commit_and_lose(connection: AsyncConnection) -> None:
            monkeypatch.setattr(AsyncConnection, "commit", commit_really)
            await commit_really(connection)
            raise OperationalError("COMMIT", None, psycopg.OperationalError("the connection is lost"))

        monkeypatch.setattr(AsyncConnection, "commit", commit_and_lose)

    return lose


async def test_a_lost_reply_to_commit_is_neither_success_nor_failure(ledger: Ledger, lose_one_reply: Any) -> None:
    """The ledger reads again by key: one intent, one claim, one turn, one retry."""
    lose_one_reply()
    intent = await submit(ledger)
    assert len((await ledger.intents.list(TENANT))[0]) == 1
    lose_one_reply()
    held = await claim(ledger, intent)
    assert (held.epoch, held.attempt) == (1, 1)
    lose_one_reply()
    assert (await commit(ledger, held)).turn_number == 1
    assert await kinds(ledger) == ["intent.discovered", "intent.claimed", "result.committed", "thread.updated"]
    lose_one_reply()
    assert (await submit(ledger, "keyed", key="k")).seq == 2
    second = await claim(ledger, (await ledger.intents.list(TENANT))[0][0])
    lose_one_reply()
    with pytest.raises(MeshError) as unknown:
        await fail(ledger, second, Cause.HANDLER_REFUSED)
    assert unknown.value.code is ErrorCode.UNAVAILABLE
    assert (await fail(ledger, second, Cause.HANDLER_REFUSED)).state is State.FAILED


async def test_a_database_that_is_not_there_is_said_to_the_operator(tmp_path: Path) -> None:
    """Which server, and which setting to mend; never the password."""
    settings = LedgerSettings(database_url="postgresql://u:s3cret@127.0.0.1:1/x", data_dir=tmp_path)
    with pytest.raises(MeshError) as refused:
        await open_ledger(settings, port=RecordingPort(), embedder=None)
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert "127.0.0.1" in refused.value.detail
    assert "INTENTMESH_DATABASE_URL" in (refused.value.hint or "")
    assert "s3cret" not in refused.value.detail
