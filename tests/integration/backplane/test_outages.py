"""A server that is restarted, emptied, frozen, gone or unfit: the mesh gets slower, and nothing else."""

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.mesh_messages import announcement, bid
from support.redis_server import RedisServer, running_redis

from mesh.backplane.backplane import Backplane
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.messages import Award, Notice

TTL_S = 30.0
HINT_MAX_S = 1.5
Until = Callable[..., Any]
NOTICE = Notice(tenant_id="local", thread_id="t", number=1)


async def hint_everything(backplane: Backplane) -> float:
    """Call every method of MeshPort once; return the longest time that one took."""
    longest_s = 0.0
    for call in (
        lambda: backplane.announce([announcement(), announcement()]),
        lambda: backplane.forget([announcement()]),
        lambda: backplane.notify([NOTICE]),
    ):
        begun = time.monotonic()
        await call()
        longest_s = max(longest_s, time.monotonic() - begun)
    return longest_s


async def is_awarded_now(backplane: Backplane) -> bool:
    """Whether a bid and an announcement find each other."""
    intent = announcement()
    try:
        await backplane.place_bids("n1", 5, [bid("n1")], ttl_s=TTL_S)
        await backplane.announce([intent])
        wakes = await backplane.next_wakes("n1", 1)
    except MeshError:
        return False
    return any(isinstance(wake, Award) and wake.intent_id == intent.intent_id for wake in wakes)


async def test_without_a_server_hints_are_swallowed_and_nodes_are_told(production_limits: None, tmp_path: Path) -> None:
    """Opening works, nothing blocks, and a waiting node is not sent into a busy loop."""
    backplane = await Backplane.open(f"unix://{tmp_path}/nothing.sock", prefix="test")
    try:
        assert not backplane.is_up
        assert not await backplane.ping()
        assert await hint_everything(backplane) < 0.2
        with pytest.raises(MeshError) as caught:
            await backplane.place_bids("n1", 1, [bid("n1")], ttl_s=TTL_S)
        assert (caught.value.code, caught.value.retryable) == (ErrorCode.UNAVAILABLE, True)
        begun = time.monotonic()
        with pytest.raises(MeshError):
            await backplane.next_wakes("n1", 0.3)
        assert 0.25 < time.monotonic() - begun < 1
    finally:
        await backplane.close()
    with pytest.raises(MeshError):
        await backplane.next_wakes("n1", 30)


async def test_a_server_that_comes_later_is_found(until: Until) -> None:
    """No restart of the role is needed."""
    with running_redis() as server:
        server.stop()
        async with Backplane(server.url, prefix="test") as backplane:
            assert not backplane.is_up
            server.start()
            await until(lambda: backplane.is_up)
            assert await is_awarded_now(backplane)


@pytest.mark.parametrize("is_persistent", [True, False])
async def test_calls_recover_from_a_restart(is_persistent: bool, until: Until) -> None:
    """With the data kept, what waited still waits; without, a new announcement is needed."""
    with running_redis(is_persistent=is_persistent) as server:
        async with Backplane(server.url, prefix="test") as backplane:
            waiting = announcement()
            await backplane.announce([waiting])
            server.restart()
            await hint_everything(backplane)
            await until(lambda: backplane.is_up)
            awards = await backplane.place_bids("n1", 1, [bid("n1")], ttl_s=TTL_S)
            if is_persistent:
                assert [award.intent_id for award in awards] == [waiting.intent_id]
            assert await is_awarded_now(backplane)


async def test_a_node_that_waits_through_a_restart_is_woken_after_it(
    fragile: Backplane, own_redis: RedisServer, until: Until
) -> None:
    """The same `next_wakes` call, begun before, brings the award made after."""
    waiting = asyncio.create_task(fragile.next_wakes("n1", 20))
    await asyncio.sleep(0)
    own_redis.restart()
    await fragile.ping()
    await until(lambda: fragile.is_up)
    await fragile.place_bids("n1", 5, [bid("n1")], ttl_s=TTL_S)
    intent = announcement()
    await fragile.announce([intent])
    (wake,) = await waiting
    assert wake.intent_id == intent.intent_id


async def test_an_emptied_server_is_used_on_at_once(fragile: Backplane, own_redis: RedisServer) -> None:
    """FLUSHALL and SCRIPT FLUSH: the next call of each kind works, without an outage."""
    assert await is_awarded_now(fragile)
    for _ in range(3):
        own_redis.flush()
        assert await is_awarded_now(fragile)
        assert fragile.is_up
    own_redis.flush()
    await fragile.announce([announcement(), announcement()])
    assert len(await fragile.place_bids("n1", 5, [bid("n1")], ttl_s=TTL_S)) == 2
    own_redis.flush()
    await fragile.withdraw("n1")
    own_redis.flush()
    await fragile.forget([announcement()])
    assert fragile.is_up


async def test_emptied_at_any_moment_the_book_goes_on(fragile: Backplane, own_redis: RedisServer) -> None:
    """Nodes that bid and intents that are announced again get together, however often all is lost."""
    wanted = {f"intent{number}" for number in range(30)}
    done: set[str] = set()

    async def node() -> None:
        while wanted - done:
            for wake in await fragile.place_bids("n1", 3, [bid("n1")], ttl_s=TTL_S):
                done.add(wake.intent_id)
            done.update(wake.intent_id or "" for wake in await fragile.next_wakes("n1", 0.01))

    async def sweep() -> None:
        while wanted - done:
            await fragile.announce([announcement(name) for name in wanted - done])
            await asyncio.sleep(0.01)

    async def flush() -> None:
        for _ in range(20):
            await asyncio.to_thread(own_redis.flush)
            await asyncio.sleep(0.02)

    async with asyncio.timeout(30):
        await asyncio.gather(node(), sweep(), flush())


async def test_a_frozen_server_costs_one_second_once(
    production_limits: None, fragile: Backplane, own_redis: RedisServer, until: Until
) -> None:
    """Connections stay open and nothing answers: the first call notices, the others return at once."""
    assert await is_awarded_now(fragile)
    own_redis.freeze()
    try:
        assert await hint_everything(fragile) < HINT_MAX_S
        assert not fragile.is_up
        assert await hint_everything(fragile) < 0.2
        begun = time.monotonic()
        with pytest.raises(MeshError):
            await fragile.next_wakes("n1", 0.5)
        assert time.monotonic() - begun < HINT_MAX_S
    finally:
        own_redis.thaw()
    await until(lambda: fragile.is_up)
    assert await is_awarded_now(fragile)


async def test_many_callers_at_once_are_not_held_by_a_frozen_server(
    production_limits: None, fragile: Backplane, own_redis: RedisServer
) -> None:
    """More callers than connections: none waits longer than the bound."""
    own_redis.freeze()
    try:
        begun = time.monotonic()
        await asyncio.gather(*(fragile.announce([announcement()]) for _ in range(200)))
        assert time.monotonic() - begun < HINT_MAX_S
    finally:
        own_redis.thaw()


async def test_more_callers_than_connections_all_get_through(backplane: Backplane) -> None:
    """Waiting for a connection is no outage."""
    await asyncio.gather(*(backplane.announce([announcement()]) for _ in range(500)))
    assert backplane.is_up
    assert len(await backplane.place_bids("n1", 600, [bid("n1")], ttl_s=TTL_S)) == 500


async def test_a_cancelled_call_leaves_no_reply_for_the_next_one(backplane: Backplane) -> None:
    """Connections whose call was cut off are not used again: every answer belongs to its question."""
    for number in range(60):
        call = asyncio.create_task(backplane._redis.echo(f"cancelled {number}"))
        for _ in range(number % 6):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await backplane._redis.echo(f"mine {number}") == f"mine {number}"
    reading = asyncio.create_task(backplane.next_wakes("n1", 30))
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await is_awarded_now(backplane)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random"])
async def test_a_server_that_may_evict_is_refused(policy: str) -> None:
    """At the start, with the command that mends it."""
    with running_redis(policy=policy) as server:
        with pytest.raises(MeshError) as caught:
            await Backplane.open(server.url, prefix="test")
        assert policy in caught.value.detail
        assert "noeviction" in (caught.value.hint or "")


async def test_a_server_that_comes_back_evicting_is_not_used(fragile: Backplane, own_redis: RedisServer) -> None:
    """A running role does not end for it: it goes on without hints, until the policy is mended."""
    own_redis.stop(signal_number=signal.SIGTERM)
    own_redis._policy = "allkeys-lru"
    own_redis.start()
    await fragile.ping()
    for _ in range(5):
        with pytest.raises(MeshError):
            await fragile.next_wakes("n1", 0.2)
    assert not fragile.is_up
    with own_redis.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
    await fragile.wait_up(10)
    assert await is_awarded_now(fragile)


async def test_a_server_that_takes_no_writes_is_down(fragile: Backplane, own_redis: RedisServer) -> None:
    """Out of memory: hints are dropped without noise, and work again when there is room."""
    with own_redis.client() as client:
        client.config_set("maxmemory", "1kb")
        await fragile.announce([announcement()])
        assert not fragile.is_up
        with pytest.raises(MeshError):
            await fragile.wait_up(0.6)
        client.config_set("maxmemory", "0")
    await fragile.wait_up(10)
    assert await is_awarded_now(fragile)


async def test_a_call_that_the_server_rejects_is_no_outage(fragile: Backplane, own_redis: RedisServer) -> None:
    """A key of the wrong type (someone else's) fails its own calls, and not the others."""
    with own_redis.client() as client:
        client.set("{test}:tenants:chat", "not a sorted set")
    await fragile.announce([announcement(capability="chat")])
    assert fragile.is_up
    assert await is_awarded_now(fragile)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:6379", "redis://127.0.0.1:notaport"])
def test_a_url_that_cannot_be_read_is_refused(url: str) -> None:
    """With an example of one that can."""
    with pytest.raises(MeshError) as caught:
        Backplane(url, prefix="test")
    assert "redis://" in (caught.value.hint or "")


@pytest.mark.parametrize("prefix", ["", "a{b", "a b"])
def test_a_prefix_that_would_break_the_hash_tag_is_refused(prefix: str) -> None:
    """Braces and white space."""
    with pytest.raises(ValueError, match="prefix"):
        Backplane("redis://127.0.0.1", prefix=prefix)
