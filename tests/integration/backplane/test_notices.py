"""Notices wake whoever watches, in this process and in others, and never too few times."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from support.mesh_messages import announcement, bid
from support.redis_server import RedisServer

from mesh.backplane.backplane import Backplane
from mesh.backplane.notice_board import NoticeBoard
from mesh.contract.errors import MeshError
from mesh.contract.messages import Notice

Until = Callable[..., Any]
WAIT_S = 5.0


def notice(thread_id: str = "t", **fields: Any) -> Notice:
    """A notice for a thread of tenant `local`."""
    return Notice(**({"tenant_id": "local", "thread_id": thread_id} | fields))


@pytest.fixture
async def boards(shared_redis: RedisServer) -> AsyncIterator[tuple[NoticeBoard, NoticeBoard]]:
    """The boards of two processes of one mesh, both reading."""
    prefix = uuid.uuid4().hex
    async with Backplane(shared_redis.url, prefix=prefix) as left, Backplane(shared_redis.url, prefix=prefix) as right:
        pair = NoticeBoard(left), NoticeBoard(right)
        for board in pair:
            await board.start()
            async with board.watch("any", "any") as watch:
                assert await watch.wait(WAIT_S), "a board wakes everybody once it reads"
        yield pair
        for board in pair:
            await board.close()


async def test_a_notice_wakes_the_watchers_of_its_thread_in_every_process(
    boards: tuple[NoticeBoard, NoticeBoard],
) -> None:
    """And not those of other threads or tenants."""
    here, there = boards
    async with (
        here.watch("local", "t") as near,
        there.watch("local", "t") as far,
        there.watch("local", "u") as other_thread,
        there.watch("other", "t") as other_tenant,
    ):
        await here.notify([notice()])
        assert await near.wait(0)
        assert await far.wait(WAIT_S)
        assert not await other_thread.wait(0.05)
        assert not await other_tenant.wait(0)


async def test_a_boards_own_notice_wakes_once(boards: tuple[NoticeBoard, NoticeBoard]) -> None:
    """It does not come back through the stream: each wake costs a read of the ledger."""
    here, there = boards
    async with here.watch("local", "t") as watch, there.watch("local", "t") as far:
        await here.notify([notice()])
        assert await watch.wait(0)
        assert await far.wait(WAIT_S)
        assert not await watch.wait(0.1)


async def test_a_wake_before_the_first_wait_is_kept(boards: tuple[NoticeBoard, NoticeBoard]) -> None:
    """Between registering and waiting, and between two waits."""
    here, _ = boards
    async with here.watch("local", "t") as watch:
        for _ in range(3):
            here.poke([notice()])
            await asyncio.sleep(0)
            assert await watch.wait(0)
        assert not await watch.wait(0)


async def test_no_watcher_ever_waits_in_vain(boards: tuple[NoticeBoard, NoticeBoard]) -> None:
    """A counter stands for the ledger: who reads it, then waits, sees its last value without polling."""
    here, there = boards
    count, committed = 300, 0

    async def watch(board: NoticeBoard) -> None:
        async with board.watch("local", "t") as bell:
            while committed < count:
                assert await bell.wait(WAIT_S), "a wake was lost"

    watching = [asyncio.create_task(watch(board)) for board in (here, there) for _ in range(5)]
    for number in range(count):
        committed += 1
        await (here, there)[number % 2].notify([notice(number=committed)])
        if number % 7 == 0:
            await asyncio.sleep(0.001)
    await asyncio.gather(*watching)


async def test_watches_leave_nothing_behind(boards: tuple[NoticeBoard, NoticeBoard]) -> None:
    """After the last watcher of a thread has gone, and through overlapping ones."""
    here, _ = boards
    async with here.watch("local", "t") as first:
        async with here.watch("local", "t"):
            pass
        here.poke([notice()])
        assert await first.wait(0)
    assert repr(here) == "NoticeBoard(0 watches)"
    assert not here._watches


async def test_a_node_is_woken_to_cancel(backplane: Backplane) -> None:
    """In its own stream, beside its awards, in order."""
    intent = announcement()
    await backplane.place_bids("n1", 1, [bid("n1")], ttl_s=30)
    await backplane.announce([intent])
    await backplane.notify([notice(intent_id=intent.intent_id, cancel_on_node="n1")])
    award, cancel = await backplane.next_wakes("n1", 1)
    assert award.intent_id == intent.intent_id
    assert isinstance(cancel, Notice)
    assert (cancel.intent_id, cancel.cancel_on_node) == (intent.intent_id, "n1")
    assert await backplane.next_wakes("n2", 0) == []


async def test_a_draining_node_is_still_told_to_cancel(backplane: Backplane) -> None:
    """`withdraw` takes the awards out of its stream, and nothing else."""
    await backplane.place_bids("n1", 1, [bid("n1")], ttl_s=30)
    await backplane.announce([announcement()])
    await backplane.notify([notice(intent_id="i", cancel_on_node="n1")])
    await backplane.withdraw("n1")
    (cancel,) = await backplane.next_wakes("n1", 1)
    assert isinstance(cancel, Notice)


async def test_waiting_ends_with_its_time_and_begins_with_the_notice(backplane: Backplane) -> None:
    """An empty wait takes what it may take, longer than one block too; a wake comes at once."""
    begun = time.monotonic()
    assert await backplane.next_wakes("n1", 2.3) == []
    assert 2.2 < time.monotonic() - begun < 4
    waiting = asyncio.create_task(backplane.next_wakes("n1", 30))
    await asyncio.sleep(0.05)
    begun = time.monotonic()
    await backplane.notify([notice(cancel_on_node="n1")])
    await waiting
    assert time.monotonic() - begun < 1


async def test_what_cannot_be_read_is_passed_over(backplane: Backplane, shared_redis: RedisServer) -> None:
    """Rubbish in a stream stops neither the node nor the board."""
    root = "{" + backplane._keys.prefix + "}"
    reader = backplane.notices()
    await reader.begin(1)
    with shared_redis.client() as client:
        for fields in ({"a": "{"}, {"n": "[]"}, {"x": "y"}, {"a": '["short"]'}):
            client.xadd(f"{root}:wakes:n1", fields)
            client.xadd(f"{root}:notices", fields)
    await backplane.notify([notice(cancel_on_node="n1")])
    assert len(await backplane.next_wakes("n1", 1)) == 1
    assert len(await reader.next(1)) == 1


async def test_everybody_is_woken_when_the_server_was_away(
    fragile: Backplane, own_redis: RedisServer, until: Until
) -> None:
    """What was told in the meantime is unknown, so all look; afterwards notices wake again."""
    board = NoticeBoard(fragile)
    await board.start()
    async with board.watch("local", "t") as watch:
        assert await watch.wait(WAIT_S)
        own_redis.restart()
        assert await watch.wait(WAIT_S), "woken by the outage"
        await fragile.wait_up(WAIT_S)
        async with Backplane(own_redis.url, prefix="test") as other:
            deadline = time.monotonic() + WAIT_S
            while await watch.wait(0.3):
                assert time.monotonic() < deadline, "it does not come to rest"
            await other.notify([notice()])
            assert await watch.wait(WAIT_S)
    await board.close()


async def test_an_emptied_server_goes_on_to_wake(fragile: Backplane, own_redis: RedisServer) -> None:
    """FLUSHALL takes the stream away under the reader."""
    board = NoticeBoard(fragile)
    await board.start()
    async with board.watch("local", "t") as watch:
        assert await watch.wait(WAIT_S)
        for _ in range(3):
            own_redis.flush()
            await fragile.notify([notice()], origin="another process")
            assert await watch.wait(WAIT_S)
    await board.close()


async def test_a_board_without_a_backplane_wakes_its_own_process() -> None:
    """One process without Redis: its own commits are all there are."""
    board = NoticeBoard(None)
    await board.start()
    async with board.watch("local", "t") as watch:
        await board.announce([announcement()])
        await board.forget([announcement()])
        await board.notify([notice()])
        assert await watch.wait(0)
    await board.close()


async def test_closing_wakes_everybody_and_a_closed_backplane_does_not_spin(shared_redis: RedisServer) -> None:
    """Streams of clients end at shutdown instead of waiting for their time-out."""
    backplane = await Backplane.open(shared_redis.url, prefix=uuid.uuid4().hex)
    board = NoticeBoard(backplane)
    await board.start()
    async with board.watch("local", "t") as watch:
        assert await watch.wait(WAIT_S)
        await backplane.close()
        await asyncio.sleep(0.2)
        await watch.wait(0)
        await board.close()
        assert await watch.wait(0)
    with pytest.raises(MeshError):
        await backplane.notices().begin(10)
