"""Two gateways over one PostgreSQL and one Redis, and what callers see while one of the two is gone."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from support.postgres import PostgresServer
from support.redis_server import RedisServer
from support.running_gateway import RunningGateway, SimulatedNode, run_gateway

from ledger.ledger import open_ledger
from ledger.settings import LedgerSettings
from mesh.backplane.backplane import Backplane
from mesh.contract.ports import SilentPort

BODY = {"type": "echo", "payload": {"text": "x"}}


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis-protocol server of its own."""
    with tempfile.TemporaryDirectory(prefix="r-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        yield server
        server.stop()


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL of its own, which may be stopped."""
    server = PostgresServer()
    server.start()
    yield server
    server.close()


@asynccontextmanager
async def _gateway(database_url: str, redis: RedisServer | None, **settings: object) -> AsyncIterator[RunningGateway]:
    """One gateway with a ledger and a backplane of its own, as in a process of its own."""
    async with AsyncExitStack() as stack:
        backplane = None
        if redis is not None:
            backplane = await Backplane.open(redis.url, prefix="test")
            stack.push_async_callback(backplane.close)
        ledger = await open_ledger(LedgerSettings(database_url=database_url), port=SilentPort(), embedder=None)
        stack.push_async_callback(ledger.close)
        yield await stack.enter_async_context(run_gateway(ledger, backplane=backplane, **settings))


async def test_two_gateways_are_one_mesh(postgres_server: PostgresServer, redis: RedisServer) -> None:
    """One key sent to both is one intent; what is committed through one wakes who waits at the other, at once."""
    name = postgres_server.create_database()
    url = postgres_server.url(name)
    # So long a poll that only the wake can explain a quick answer.
    async with _gateway(url, redis, poll_interval_s=30) as first, _gateway(url, redis, poll_interval_s=30) as second:
        node = SimulatedNode(second.ledger)
        await node.register()
        headers = {"Idempotency-Key": "k"}
        answers = await asyncio.gather(
            *(one.client.post("/intent", json=BODY, headers=headers) for one in (first, second) for _ in range(25))
        )
        assert {answer.status_code for answer in answers} == {202}
        assert len({answer.json()["intent_id"] for answer in answers}) == 1

        waiting = asyncio.create_task(first.client.post("/intent?wait=20", json=BODY, headers=headers))
        reading = asyncio.create_task(first.client.get(f"/intents/{answers[0].json()['intent_id']}/events"))
        async with asyncio.timeout(10):
            while not first.gateway.streams._open or not first.gateway.requests._open:
                await asyncio.sleep(0.01)
        started = time.monotonic()
        await node.run(answers[0].json()["intent_id"])
        assert (await waiting).status_code == 200
        assert "result.committed" in (await reading).text
        assert time.monotonic() - started < 5
    postgres_server.drop_database(name)


async def test_without_redis_it_is_slower_only(postgres_server: PostgresServer, redis: RedisServer) -> None:
    """Redis dies while a client waits at another gateway: the answer comes by the slow poll."""
    name = postgres_server.create_database()
    url = postgres_server.url(name)
    async with _gateway(url, redis) as first, _gateway(url, redis) as second:
        node = SimulatedNode(second.ledger)
        await node.register()
        intent = await first.submit(thread_id="t")
        redis.stop()
        waiting = asyncio.create_task(
            first.client.post("/intent?wait=20", json={**BODY, "thread_id": "t2"}, headers={"Idempotency-Key": "k"})
        )
        async with asyncio.timeout(10):
            while len(found := (await second.ledger.intents.list("local"))[0]) < 2:
                await asyncio.sleep(0.02)
        for view in found:
            await node.run(view.intent_id)
        assert (await waiting).status_code == 200
        assert (await first.client.get(f"/intents/{intent['intent_id']}")).json()["status"] == "succeeded"
        assert (await first.client.get("/readyz")).json()["checks"]["backplane"] == "down"
        redis.start()
        async with asyncio.timeout(20):
            while (await first.client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.1)
    postgres_server.drop_database(name)


@pytest.mark.parametrize("how", ["stopped", "frozen"])
async def test_database_that_is_gone_is_503_and_the_same_key_converges(postgres: PostgresServer, how: str) -> None:
    """503 with Retry-After within seconds and never a false 2xx; afterwards the same key is one intent."""
    url = postgres.url(postgres.create_database())
    async with _gateway(url, None) as running:
        await SimulatedNode(running.ledger).register()
        headers = {"Idempotency-Key": "k"}
        assert (await running.client.post("/intent", json=BODY)).status_code == 202
        if how == "stopped":
            postgres.stop()
        else:
            postgres.freeze(is_frozen=True)
        started = time.monotonic()
        refused = await running.client.post("/intent", json=BODY, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert time.monotonic() - started < 6
        assert (await running.client.get("/readyz")).status_code == 503
        assert (await running.client.get("/healthz")).status_code == 200
        if how == "stopped":
            postgres.start()
        else:
            postgres.freeze(is_frozen=False)
        async with asyncio.timeout(30):
            while (await running.client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.1)
            while (again := await running.client.post("/intent", json=BODY, headers=headers)).status_code == 503:
                await asyncio.sleep(0.1)
        assert again.status_code == 202
        listed = (await running.client.get("/intents")).json()["items"]
        assert len(listed) == 2
