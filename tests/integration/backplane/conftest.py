"""One server for the folder's tests, and a mesh of its own (prefix) for each; tests of faults start their own."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from support.redis_server import RedisServer, running_redis

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
