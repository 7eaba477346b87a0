"""One server for the folder's tests, and a mesh of its own (prefix) for each; tests of faults start their own."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from support.redis_server import RedisServer, running_redis

from mesh.backplane import backplane as backplane_module
from mesh.backplane import client
from mesh.backplane.backplane import Backplane


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """A server that no test may stop or flush."""
    with running_redis() as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server without persistence that the test may harm."""
    with running_redis() as server:
        yield server


LIMITS_S = (backplane_module.CALL_MAX_S, client.CONNECT_TIMEOUT_S)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give calls more time than in production, where a busy machine makes an outage of a slow answer."""
    monkeypatch.setattr(backplane_module, "CALL_MAX_S", 20.0)
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 20.0)


@pytest.fixture
def production_limits(patience: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the bounds themselves; ask for it before the backplane."""
    monkeypatch.setattr(backplane_module, "CALL_MAX_S", LIMITS_S[0])
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", LIMITS_S[1])


@pytest.fixture
async def backplane(shared_redis: RedisServer) -> AsyncIterator[Backplane]:
    """A connected backplane of a mesh that nobody else uses."""
    async with Backplane(shared_redis.url, prefix=f"test-{uuid.uuid4().hex}") as backplane:
        assert backplane.is_up
        yield backplane


@pytest.fixture
async def fragile(own_redis: RedisServer) -> AsyncIterator[Backplane]:
    """A backplane on the server that the test may harm."""
    async with Backplane(own_redis.url, prefix="test") as backplane:
        assert backplane.is_up
        yield backplane


Until = Callable[[Callable[[], bool]], "asyncio.Future[None]"]


@pytest.fixture
def until() -> Callable[..., object]:
    """Wait for a condition, with a deadline."""

    async def wait(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come true in time"
            await asyncio.sleep(0.01)

    return wait
