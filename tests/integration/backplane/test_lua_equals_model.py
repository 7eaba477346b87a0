"""The Lua book decides as mesh.bidding says, for histories that hypothesis makes up."""

import asyncio
import uuid
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.book_model import BookModel
from support.mesh_messages import bid
from support.redis_server import RedisServer

from mesh.backplane.backplane import Backplane
from mesh.contract.messages import Announcement, Award, Bid

NODES = ["n1", "n10", "nä"]
nodes = st.sampled_from(NODES)
capabilities = st.sampled_from(["echo", "chat"])
prices = st.sampled_from([0.0, 0.1, 0.3, 0.1 + 0.2, 1.0, 1.5]) | st.floats(0, 3)


@st.composite
def node_bids(draw: st.DrawFn) -> tuple[Any, ...]:
    """A node bids for some capabilities."""
    node = draw(nodes)
    offered = draw(st.lists(capabilities, unique=True, max_size=2))
    discounts = st.sampled_from([0.0, 0.4, 5.0])
    made: list[Bid] = [bid(node, draw(prices), name, affinity_discount=draw(discounts)) for name in offered]
    return ("bid", node, draw(st.integers(0, 3)), made)


@st.composite
def announcements(draw: st.DrawFn) -> tuple[Any, ...]:
    """One of a dozen intents is announced; its fields depend on its name alone, but for attempt and budget."""
    number = draw(st.integers(0, 11))
    tenant = f"tenant{number % 3}"
    intent = Announcement(
        tenant_id=tenant,
        tenant_weight=[1.0, 0.3, 7.0][number % 3],
        intent_id=f"intent{number}",
        thread_id=f"thread{number % 4}",
        capability=["echo", "chat"][number % 2],
        priority=[0, 0, 100, -100][number % 4],
        accepted_at_ms=1_790_000_000_000 + number // 3,
        budget=draw(st.none() | prices),
        attempt=draw(st.sampled_from([0, 0, 0, 1])),
    )
    return ("announce", intent)


steps = st.one_of(
    node_bids(),
    announcements(),
    announcements(),
    st.tuples(st.just("read"), nodes),
    st.tuples(st.just("withdraw"), nodes),
    st.tuples(st.just("decline"), nodes, announcements().map(lambda step: step[1])),
    st.tuples(st.just("forget"), announcements().map(lambda step: step[1])),
)


def decided(award: Award) -> dict[str, Any]:
    """What the book decided, without the times."""
    return award.model_dump(exclude={"sent_at", "awarded_at_ms"})


def held(award_holder: str, intent: Announcement) -> Award:
    """An award as a declining node would show it."""
    return Award(
        tenant_id=intent.tenant_id,
        intent_id=intent.intent_id,
        thread_id=intent.thread_id,
        capability=intent.capability,
        node_id=award_holder,
        price=0,
        parts=bid("x").parts,
        awarded_at_ms=0,
    )


async def play(backplane: Backplane, model: BookModel, step: tuple[Any, ...]) -> None:
    """Do one step in both, and compare."""
    match step:
        case ("bid", node, free_slots, made):
            awards = await backplane.place_bids(node, free_slots, made, ttl_s=600)
            assert [decided(award) for award in awards] == [
                decided(award) for award in model.bid(node, free_slots, made)
            ]
        case ("announce", intent):
            assert await backplane._book.announce([intent]) == [model.announce(intent)]
        case ("read", node):
            wakes = await backplane.next_wakes(node, 0)
            found = [decided(wake) for wake in wakes if isinstance(wake, Award)]
            assert found == [decided(award) for award in model.read(node)]
        case ("decline", node, intent):
            model.decline(node, intent)
            await backplane.decline(held(node, intent), exclude_s=600)
        case ("withdraw", node):
            model.withdraw(node)
            await backplane.withdraw(node)
        case ("forget", intent):
            model.forget(intent)
            await backplane.forget([intent])


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(steps, min_size=20, max_size=60))
def test_the_lua_book_decides_as_the_model_does(shared_redis: RedisServer, history: list[tuple[Any, ...]]) -> None:
    """Same winner, same price, same losers, same turn, same slots, whatever happened before."""

    async def run() -> None:
        async with Backplane(shared_redis.url, prefix=uuid.uuid4().hex) as backplane:
            model = BookModel()
            for step in [*history, *(("read", node) for node in NODES)]:
                await play(backplane, model, step)
            # Whoever waits is taken in the same order by one who takes all.
            everything = [bid("all", 0.0, name) for name in ("echo", "chat")]
            await play(backplane, model, ("bid", "all", 50, everything))

    asyncio.run(run())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offers=st.dictionaries(st.text("ab01z", min_size=1, max_size=3), st.tuples(prices, st.integers(0, 1)), max_size=20),
    budget=st.none() | prices,
    last=st.integers(0, 19),
    excluded=st.integers(0, 3),
)
def test_winner_and_losers_are_the_models_in_books_of_many_nodes(
    shared_redis: RedisServer, offers: dict[str, tuple[float, int]], budget: float | None, last: int, excluded: int
) -> None:
    """The bounded look at the book finds what a look at everything finds."""

    async def run() -> None:
        async with Backplane(shared_redis.url, prefix=uuid.uuid4().hex) as backplane:
            model = BookModel()
            intent = Announcement(
                tenant_id="t", intent_id="i", thread_id="th", capability="echo", accepted_at_ms=1, budget=budget
            )
            names = list(offers)
            ran = names[last % len(names)] if names else None
            if ran is not None:
                # The thread's last turn ran there.
                earlier = intent.model_copy(update={"intent_id": "earlier", "budget": None})
                await backplane.place_bids(ran, 1, [bid(ran)], ttl_s=600)
                await backplane.announce([earlier])
                model.bid(ran, 1, [bid(ran)])
                model.announce(earlier)
                await backplane.next_wakes(ran, 0)
                model.read(ran)
            for node in names[:excluded]:
                if node != ran:
                    model.decline(node, intent)
                    await backplane.decline(held(node, intent), exclude_s=600)
            for node, (asked, slots) in offers.items():
                made = [bid(node, asked, affinity_discount=0.4)]
                model.bid(node, slots, made)
                await backplane.place_bids(node, slots, made, ttl_s=600)
            model.announce(intent)
            await backplane.announce([intent])
            for node in names:
                await play(backplane, model, ("read", node))

    asyncio.run(run())
