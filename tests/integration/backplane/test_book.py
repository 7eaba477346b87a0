"""The book over a real server: every script, and what it promises to nodes and tenants."""

import asyncio
import time
import uuid
from collections.abc import Callable

import pytest
from support.mesh_messages import announcement, bid
from support.redis_server import RedisServer

from mesh.backplane.backplane import Backplane
from mesh.contract.messages import Announcement, Award, Notice

TTL_S = 30.0
Until = Callable[..., object]


async def awards_of(backplane: Backplane, node_id: str, timeout_s: float = 0.0) -> list[str]:
    """Return the intents that the node finds in its stream now."""
    wakes = await backplane.next_wakes(node_id, timeout_s)
    return [wake.intent_id for wake in wakes if isinstance(wake, Award)]


async def test_an_announced_intent_is_awarded_at_once_to_the_best_bid(backplane: Backplane) -> None:
    """The award says the price with its parts, and who lost why."""
    await backplane.place_bids("dear", 1, [bid("dear", 1.5)], ttl_s=TTL_S)
    await backplane.place_bids("cheap", 1, [bid("cheap", 1.25)], ttl_s=TTL_S)
    intent = announcement(budget=1.4)
    await backplane.announce([intent])
    (award,) = await backplane.next_wakes("cheap", 1)
    assert isinstance(award, Award)
    assert (award.intent_id, award.thread_id, award.tenant_id) == (intent.intent_id, intent.thread_id, "local")
    assert award.price == award.parts.total == 1.25
    assert [(loser.node_id, loser.price, loser.reason) for loser in award.losers] == [("dear", 1.5, "over_budget")]
    assert abs(award.awarded_at_ms - time.time() * 1000) < 60_000


async def test_prices_keep_every_digit(backplane: Backplane) -> None:
    """0.1 + 0.2 is not rounded on its way through Lua, and decides."""
    await backplane.place_bids("a", 1, [bid("a", 0.1 + 0.2)], ttl_s=TTL_S)
    await backplane.place_bids("b", 1, [bid("b", 0.3)], ttl_s=TTL_S)
    await backplane.announce([announcement(budget=0.3), announcement(budget=0.3), announcement(budget=0.1 + 0.2)])
    (lost,) = await backplane.next_wakes("a", 1)
    assert isinstance(lost, Award)
    assert lost.price == 0.1 + 0.2
    assert len(await awards_of(backplane, "b")) == 1


async def test_an_intent_without_an_admissible_bid_waits_and_goes_to_the_next_one(backplane: Backplane) -> None:
    """`place_bids` itself returns it."""
    intent = announcement()
    await backplane.announce([intent])
    awards = await backplane.place_bids("n1", 1, [bid("n1")], ttl_s=TTL_S)
    assert [award.intent_id for award in awards] == [intent.intent_id]
    assert await backplane.place_bids("n1", 1, [bid("n1")], ttl_s=TTL_S) == []


async def test_no_node_pays_more_than_the_budget(backplane: Backplane) -> None:
    """It waits for a cheaper bid, and does not hide those behind it that can pay."""
    poor = [announcement(budget=0.5, priority=5) for _ in range(200)]
    rich, free = announcement(budget=1.0), announcement()
    await backplane.announce([*poor, rich, free])
    awards = await backplane.place_bids("n1", 4, [bid("n1")], ttl_s=TTL_S)
    assert [award.intent_id for award in awards] == [rich.intent_id, free.intent_id]
    awards = await backplane.place_bids("n2", 1, [bid("n2", 0.5)], ttl_s=TTL_S)
    assert [award.intent_id for award in awards] == [poor[0].intent_id]


async def test_pending_intents_go_by_priority_then_age(backplane: Backplane) -> None:
    """With a budget or without."""
    old, new = announcement(budget=5.0), announcement()
    urgent, slow = announcement(priority=100), announcement(priority=-100)
    await backplane.announce([slow, new, old, urgent])
    awards = await backplane.place_bids("n1", 4, [bid("n1")], ttl_s=TTL_S)
    assert [award.intent_id for award in awards] == [intent.intent_id for intent in (urgent, old, new, slow)]


async def test_pending_tenants_share_by_weight_over_capabilities(backplane: Backplane) -> None:
    """A flood of one tenant in one capability leaves the others their share in another."""
    flood = [announcement(tenant_id="big", tenant_weight=1.0) for _ in range(40)]
    small = [announcement(tenant_id="small", tenant_weight=3.0, capability="chat") for _ in range(40)]
    await backplane.announce([*flood, *small])
    awards = await backplane.place_bids("n1", 20, [bid("n1"), bid("n1", capability="chat")], ttl_s=TTL_S)
    count = sum(award.tenant_id == "small" for award in awards)
    assert len(awards) == 20
    assert abs(count - 15) <= 1


async def test_many_tenants_that_cannot_pay_do_not_hide_one_that_can(backplane: Backplane) -> None:
    """The look at the queue is bounded, the search for a payer is not."""
    poor = [announcement(tenant_id=f"a{number:03}", budget=0.1) for number in range(100)]
    payer = announcement(tenant_id="z")
    await backplane.announce([*poor, payer])
    awards = await backplane.place_bids("n1", 2, [bid("n1")], ttl_s=TTL_S)
    assert [award.intent_id for award in awards] == [payer.intent_id]


async def test_a_thread_returns_to_the_node_that_ran_its_last_turn(backplane: Backplane) -> None:
    """The discount is in the parts; another thread, or the same name at another tenant, gets none."""
    await backplane.place_bids("n1", 1, [bid("n1", 1.0, affinity_discount=0.4)], ttl_s=TTL_S)
    await backplane.announce([announcement(thread_id="t")])
    assert len(await awards_of(backplane, "n1", 1)) == 1
    await backplane.place_bids("n1", 2, [bid("n1", 1.0, affinity_discount=0.4)], ttl_s=TTL_S)
    await backplane.place_bids("n2", 2, [bid("n2", 0.9, affinity_discount=0.4)], ttl_s=TTL_S)
    await backplane.announce(
        [announcement(thread_id="t"), announcement(thread_id="u"), announcement(thread_id="t", tenant_id="other")]
    )
    (kept,) = await backplane.next_wakes("n1", 1)
    assert isinstance(kept, Award)
    assert (kept.price, kept.parts.affinity) == (0.6, -0.4)
    assert len(await awards_of(backplane, "n2")) == 2


async def test_a_declined_award_goes_elsewhere_and_not_back(backplane: Backplane) -> None:
    """The decliner is passed over for that intent until its time is over, and only for that one."""
    await backplane.place_bids("n1", 3, [bid("n1", 1.0)], ttl_s=TTL_S)
    intent = announcement()
    await backplane.announce([intent])
    (award,) = await backplane.next_wakes("n1", 1)
    assert isinstance(award, Award)
    await backplane.decline(award, exclude_s=0.3)
    other = announcement()
    await backplane.announce([other])
    assert await awards_of(backplane, "n1") == [other.intent_id]
    assert await backplane.place_bids("n1", 2, [bid("n1")], ttl_s=TTL_S) == []
    deadline = time.monotonic() + 5
    while not (back := await backplane.place_bids("n1", 2, [bid("n1")], ttl_s=TTL_S)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert [award.intent_id for award in back] == [intent.intent_id]


async def test_a_declined_award_goes_at_once_to_another_bid(backplane: Backplane) -> None:
    """No new announcement is needed, and the loser's reason is told."""
    for node, price in (("n1", 1.0), ("n2", 2.0)):
        await backplane.place_bids(node, 1, [bid(node, price)], ttl_s=TTL_S)
    await backplane.announce([announcement()])
    (award,) = await backplane.next_wakes("n1", 1)
    assert isinstance(award, Award)
    await backplane.decline(award, exclude_s=10)
    (moved,) = await backplane.next_wakes("n2", 1)
    assert isinstance(moved, Award)
    assert [(loser.node_id, loser.reason) for loser in moved.losers] == [("n1", "excluded")]


async def test_declining_what_another_node_has_moves_nothing(backplane: Backplane) -> None:
    """A late decline of an old award does not take the intent from its new holder."""
    await backplane.place_bids("n1", 1, [bid("n1", 1.0)], ttl_s=TTL_S)
    await backplane.place_bids("n2", 5, [bid("n2", 2.0)], ttl_s=TTL_S)
    await backplane.announce([announcement()])
    (award,) = await backplane.next_wakes("n1", 1)
    assert isinstance(award, Award)
    await backplane.decline(award, exclude_s=10)
    await backplane.decline(award, exclude_s=10)
    assert len(await awards_of(backplane, "n2", 1)) == 1
    assert await awards_of(backplane, "n2") == []


async def test_the_same_announcement_again_is_harmless(backplane: Backplane) -> None:
    """While it waits, and after its award; a retry (higher attempt) is awarded again."""
    intent = announcement()
    await backplane.announce([intent] * 3)
    awards = await backplane.place_bids("n1", 9, [bid("n1")], ttl_s=TTL_S)
    assert len(awards) == 1
    await backplane.announce([intent] * 10)
    assert await awards_of(backplane, "n1", 0.05) == []
    await backplane.announce([intent.model_copy(update={"attempt": 1})])
    assert await awards_of(backplane, "n1", 1) == [intent.intent_id]


async def test_a_lost_award_is_awarded_again_after_some_seconds(
    backplane: Backplane, shared_redis: RedisServer
) -> None:
    """The sweeper's repetition counts once the award is old; here its mark is aged by hand."""
    await backplane.place_bids("n1", 9, [bid("n1")], ttl_s=TTL_S)
    intent = announcement("aged-" + uuid.uuid4().hex)
    await backplane.announce([intent])
    assert await awards_of(backplane, "n1", 1) == [intent.intent_id]
    with shared_redis.client() as client:
        (key,) = client.keys(f"*:awarded:{intent.intent_id}")
        node, attempt, at_ms, record = __import__("json").loads(client.get(key))
        client.set(key, __import__("json").dumps([node, attempt, str(int(at_ms) - 5001), record]), keepttl=True)
    await backplane.announce([intent])
    assert await awards_of(backplane, "n1", 1) == [intent.intent_id]


async def test_a_forgotten_intent_is_gone(backplane: Backplane, shared_redis: RedisServer) -> None:
    """It is not awarded, and nothing of it is left in the book."""
    intents = [announcement(), announcement(budget=3.0), announcement(tenant_id="other")]
    await backplane.announce(intents)
    await backplane.forget(intents)
    assert await backplane.place_bids("n1", 9, [bid("n1")], ttl_s=TTL_S) == []
    with shared_redis.client() as client:
        left = client.keys("{" + backplane._keys.prefix + "}:*")
    assert [key for key in left if "pending" in key or "budgeted" in key or "intents" in key or "tenants" in key] == []


async def test_a_withdrawn_node_gets_nothing_and_its_unread_awards_go_to_others(backplane: Backplane) -> None:
    """What it has read is its own."""
    await backplane.place_bids("n1", 9, [bid("n1", 0.5)], ttl_s=TTL_S)
    read, unread = announcement(), announcement()
    await backplane.announce([read])
    assert await awards_of(backplane, "n1", 1) == [read.intent_id]
    await backplane.announce([unread])
    await backplane.withdraw("n1")
    assert await awards_of(backplane, "n1") == []
    await backplane.announce([announcement()])
    awards = await backplane.place_bids("n2", 9, [bid("n2")], ttl_s=TTL_S)
    assert awards[0].intent_id == unread.intent_id
    assert len(awards) == 2
    await backplane.withdraw("never seen")


async def test_bids_that_ran_out_are_ignored(backplane: Backplane) -> None:
    """A dead node's bids take nothing after their time, and are no losers either."""
    await backplane.place_bids("dead", 9, [bid("dead", 0.1)], ttl_s=0.05)
    await backplane.place_bids("n1", 9, [bid("n1", 1.0)], ttl_s=TTL_S)
    deadline = time.monotonic() + 5
    while True:
        await backplane.announce([announcement()])
        wakes = await backplane.next_wakes("n1", 0.05)
        if wakes and isinstance(wakes[0], Award) and not wakes[0].losers:
            break
        assert time.monotonic() < deadline


async def test_a_bid_replaces_the_one_before(backplane: Backplane) -> None:
    """Capabilities that are not bid for any more are not served, and slots are the node's word."""
    await backplane.place_bids("n1", 5, [bid("n1"), bid("n1", capability="chat")], ttl_s=TTL_S)
    await backplane.place_bids("n1", 1, [bid("n1")], ttl_s=TTL_S)
    await backplane.announce([announcement(capability="chat"), announcement(), announcement()])
    assert len(await awards_of(backplane, "n1", 1)) == 1


async def test_slots_are_one_pool_for_all_capabilities(backplane: Backplane) -> None:
    """An award for one capability leaves one slot less for the others."""
    await backplane.place_bids("n1", 2, [bid("n1"), bid("n1", capability="chat")], ttl_s=TTL_S)
    await backplane.announce([announcement(capability=name) for name in ("echo", "chat", "echo", "chat")])
    assert len(await awards_of(backplane, "n1", 1)) == 2


async def test_slots_are_never_given_out_twice(backplane: Backplane) -> None:
    """Announcements, bids and reads at once: no node holds more than its slots, and every intent is awarded once."""
    slots, count = 3, 300
    intents = [announcement(tenant_id=f"tenant{number % 3}") for number in range(count)]
    holders: dict[str, str] = {}

    async def node(name: str) -> None:
        held: set[str] = set()

        def take(wakes: list[Award | Notice]) -> None:
            for wake in wakes:
                assert isinstance(wake, Award)
                assert wake.intent_id not in holders, "awarded twice"
                holders[wake.intent_id] = name
                held.add(wake.intent_id)
                assert len(held) <= slots, "more awards than slots"

        async def read() -> None:
            while len(holders) < count:
                take(await backplane.next_wakes(name, 0.2))

        reading = asyncio.create_task(read())
        while len(holders) < count and not reading.done():
            take([*await backplane.place_bids(name, slots - len(held), [bid(name)], ttl_s=TTL_S)])
            await asyncio.sleep(0.001)
            if held:
                held.pop()
        await reading

    async def announce(part: list[Announcement]) -> None:
        for intent in part:
            await backplane.announce([intent])

    async with asyncio.timeout(60):
        await asyncio.gather(
            *(node(f"n{number}") for number in range(3)), *(announce(intents[start::4]) for start in range(4))
        )
    assert len(holders) == count
    assert len(set(holders.values())) == 3


async def test_a_reply_that_got_lost_is_sent_again(backplane: Backplane) -> None:
    """Awards in a reply that never arrived come with the next one, and count against the slots until then."""
    intents = [announcement() for _ in range(4)]
    await backplane.announce(intents)
    # As if the connection had died after the script ran: the reply is never seen.
    await backplane._book.bid("n1", 2, [bid("n1")], ttl_s=TTL_S, cursor="0-0", confirmed=0)
    awards = await backplane.place_bids("n1", 3, [bid("n1")], ttl_s=TTL_S)
    assert [award.intent_id for award in awards] == [intent.intent_id for intent in intents[:3]]
    assert [award.intent_id for award in await backplane.place_bids("n1", 9, [bid("n1")], ttl_s=TTL_S)] == [
        intents[3].intent_id
    ]


async def test_two_tenants_with_equal_names_of_threads_stay_apart(backplane: Backplane) -> None:
    """Same thread id, and names that would run together if keys were glued without care."""
    left = announcement(tenant_id="a", thread_id="b:c")
    right = announcement(tenant_id="a:b", thread_id="c")
    await backplane.announce([left, right])
    await backplane.forget([left])
    awards = await backplane.place_bids("n1", 9, [bid("n1")], ttl_s=TTL_S)
    assert [(award.tenant_id, award.thread_id) for award in awards] == [("a:b", "c")]


async def test_names_in_any_script_survive_the_book(backplane: Backplane) -> None:
    """Non-ASCII ids, quotes and braces come back as they went."""
    intent = announcement(tenant_id='ten"ant{x}', thread_id="gespräch-日本-🧵")
    await backplane.announce([intent])
    (award,) = await backplane.place_bids("knötchen", 1, [bid("knötchen")], ttl_s=TTL_S)
    assert (award.tenant_id, award.thread_id, award.node_id) == (intent.tenant_id, intent.thread_id, "knötchen")


async def test_two_meshes_on_one_server_do_not_see_each_other(backplane: Backplane, shared_redis: RedisServer) -> None:
    """The prefix parts them."""
    async with Backplane(shared_redis.url, prefix=uuid.uuid4().hex) as other:
        await other.place_bids("n1", 1, [bid("n1")], ttl_s=TTL_S)
        await backplane.announce([announcement()])
        assert await awards_of(other, "n1", 0.05) == []


async def test_a_full_book_refuses_more_instead_of_growing(backplane: Backplane, shared_redis: RedisServer) -> None:
    """The bound is reached by filling the hash by hand; what is refused is offered again by the sweeper."""
    with shared_redis.client() as client:
        key = "{" + backplane._keys.prefix + "}:intents:echo"
        client.hset(key, mapping={f"filler{number}": "[]" for number in range(100_000)})
    assert await backplane._book.announce([announcement()]) == ["refused"]
    with shared_redis.client() as client:
        client.delete(key)


async def test_a_number_that_is_none_is_refused_and_nothing_breaks(backplane: Backplane) -> None:
    """A budget that is not a number cannot be compared; a hint never raises for it."""
    await backplane.announce([announcement(budget=float("nan"))])
    assert backplane.is_up
    with pytest.raises(ValueError, match="finite"):
        await backplane.place_bids("n1", 1, [bid("n1", float("inf"))], ttl_s=TTL_S)


async def test_an_announcement_is_one_round_trip(backplane: Backplane, shared_redis: RedisServer) -> None:
    """One EVALSHA and nothing else, for one; for many, one pipeline of them."""
    with shared_redis.client() as client:
        client.config_resetstat()
        await backplane.announce([announcement()])
        stats = client.info("commandstats")
        assert stats["cmdstat_evalsha"]["calls"] == 1
        assert {name for name in stats if name in ("cmdstat_eval", "cmdstat_script|load", "cmdstat_ping")} == set()
