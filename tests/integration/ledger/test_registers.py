"""Events, nodes, capabilities and keys; on both databases."""

import asyncio

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from support.ledger_rows import NODE, TENANT, claim, commit, kinds, say, submit

from ledger.ledger import Ledger
from ledger.models import api_keys, nodes, tenants
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.messages import EventKind, Heartbeat, RegisterNode
from mesh.contract.template import Template


async def test_event_numbers_have_no_gap_under_parallel_writers(ledger: Ledger) -> None:
    """Submissions, deltas and a commit at once: numbers are 1..n, and a resume sees the rest and nothing twice."""
    held = await claim(ledger, await submit(ledger))
    await asyncio.gather(
        *(submit(ledger, str(number)) for number in range(10)),
        *(say(ledger, held, *[(EventKind.DELTA, {"text": str(number)})] * 3) for number in range(10)),
        ledger.threads.put_pin(TENANT, "t", "k", "x"),
    )
    await commit(ledger, held)
    seen = await kinds(ledger)
    assert len(seen) == 2 + 10 + 30 + 1 + 2
    first = await ledger.events.after(TENANT, "t", 0, limit=20)
    rest = await ledger.events.after(TENANT, "t", first[-1].number)
    assert [event.number for event in first + rest] == list(range(1, 46))


async def test_numbers_are_committed_in_order(ledger: Ledger) -> None:
    """A reader that follows the log while it is written never sees a number whose predecessor is missing."""
    held = await claim(ledger, await submit(ledger))
    is_done = asyncio.Event()

    async def follow() -> int:
        last = 0
        while True:
            was_done = is_done.is_set()
            events = await ledger.events.after(TENANT, "t", last)
            assert [event.number for event in events] == list(range(last + 1, last + 1 + len(events)))
            last += len(events)
            if was_done and not events:
                return last

    reader = asyncio.create_task(follow())
    await asyncio.gather(*(say(ledger, held, (EventKind.DELTA, {"text": "x"})) for _ in range(40)))
    is_done.set()
    assert await reader == 42


async def test_events_of_one_intent_are_those_of_the_thread_in_order(ledger: Ledger) -> None:
    """With the thread's numbers; deltas carry their attempt."""
    first, second = await submit(ledger), await submit(ledger)
    held = await claim(ledger, first)
    await say(ledger, held, (EventKind.DELTA, {"text": "x"}))
    events = await ledger.events.after(TENANT, "t", 0, intent_id=first.intent_id)
    assert [event.number for event in events] == [1, 3, 4]
    assert events[-1].data == {"text": "x", "attempt": 1}
    events = await ledger.events.after(TENANT, "t", 0, intent_id=second.intent_id)
    assert [event.number for event in events] == [2]
    assert await ledger.events.after(TENANT, "t", 4) == []


async def _see(ledger: Ledger, seconds_ago: float) -> None:
    async def work(connection: AsyncConnection) -> None:
        moved = nodes.c.seen_at_ms - int(seconds_ago * 1000)
        await connection.execute(update(nodes).values(seen_at_ms=moved))

    await ledger.store.write(work)


def _node(*capabilities: Template, node_id: str = NODE) -> RegisterNode:
    return RegisterNode(node_id=node_id, host="box", slots=4, capabilities=list(capabilities))


async def test_a_node_is_up_then_draining_then_lost(ledger: Ledger) -> None:
    """Status follows heartbeats, an operator's wish, and silence."""
    welcome = await ledger.nodes.register(_node(Template(name="echo")))
    assert (welcome.lease_ttl_s, welcome.is_draining) == (15.0, False)
    await claim(ledger, await submit(ledger))
    await ledger.claims.heartbeat(Heartbeat(node_id=NODE, free_slots=3))
    [node] = await ledger.nodes.list()
    assert (node.status, node.free_slots, node.running, node.capabilities) == ("up", 3, 1, ["echo"])
    assert (await ledger.nodes.drain(NODE)).status == "draining"
    reply = await ledger.claims.heartbeat(Heartbeat(node_id=NODE))
    assert (reply.drain, reply.is_known) == (True, True)
    assert (await ledger.nodes.register(_node())).is_draining
    await _see(ledger, 60)
    assert (await ledger.nodes.list())[0].status == "lost"
    with pytest.raises(MeshError) as refused:
        await ledger.nodes.drain("nobody")
    assert refused.value.code is ErrorCode.NOT_FOUND


async def test_a_node_that_drained_and_registers_again_is_a_new_start(ledger: Ledger) -> None:
    """The wish was for the process that is gone."""
    await ledger.nodes.register(_node())
    await ledger.nodes.drain(NODE)
    await ledger.claims.heartbeat(Heartbeat(node_id=NODE, is_draining=True))
    assert not (await ledger.nodes.register(_node())).is_draining
    assert (await ledger.nodes.list())[0].status == "up"


async def test_capabilities_are_known_from_nodes(ledger: Ledger) -> None:
    """The newest template counts; available as long as a node that is up has it."""
    assert await ledger.nodes.capability("echo") is None
    await ledger.nodes.register(_node(Template(name="echo"), Template(name="chat")))
    await ledger.nodes.register(_node(Template(name="echo", version="2"), node_id="node-2"))
    found = await ledger.nodes.capability("echo")
    assert found is not None
    assert found.version == "2"
    assert [(template.name, is_up) for template, is_up in await ledger.nodes.capabilities()] == [
        ("chat", True),
        ("echo", True),
    ]
    await _see(ledger, 60)
    assert [is_up for _, is_up in await ledger.nodes.capabilities()] == [False, False]


async def test_many_nodes_register_at_once(ledger: Ledger) -> None:
    """The same capabilities in different orders do not block each other."""
    templates = [Template(name=f"c{number}") for number in range(8)]
    await asyncio.gather(
        *(
            ledger.nodes.register(_node(*templates[number:], *templates[:number], node_id=f"n{number}"))
            for number in range(8)
        )
    )
    assert len(await ledger.nodes.list()) == 8
    assert len(await ledger.nodes.capabilities()) == 8


async def test_a_node_unseen_for_long_is_forgotten(ledger: Ledger) -> None:
    """By the sweeper."""
    await ledger.nodes.register(_node())
    await ledger.sweeper.tick()
    assert len(await ledger.nodes.list()) == 1
    await _see(ledger, 90_000)
    await ledger.sweeper.tick()
    assert await ledger.nodes.list() == []


async def test_the_sweeper_reads_the_tenants_weights(ledger: Ledger) -> None:
    """Announcements carry them."""
    await ledger.keys.add("rich", "key")

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(update(tenants).values(weight=4.0))

    await ledger.store.write(work)
    await ledger.sweeper.tick()
    await submit(ledger, tenant="rich")
    assert ledger.port.announced[-1].tenant_weight == 4.0  # type: ignore[attr-defined]


async def test_a_key_is_recognised_until_it_is_revoked(ledger: Ledger) -> None:
    """The secret is in no table."""
    assert not await ledger.keys.has_any()
    key, secret = await ledger.keys.add("acme", "laptop")
    _, other = await ledger.keys.add("acme", "phone")
    assert secret.startswith("im_")
    assert await ledger.keys.has_any()
    assert await ledger.keys.tenant_of(secret) == "acme"
    for wrong in ("", "im_", secret[:-1], secret.upper(), "x" * 1000, "im_\udc97"):
        assert await ledger.keys.tenant_of(wrong) is None
    revoked = await ledger.keys.revoke(key.key_id)
    assert revoked.revoked_at is not None
    assert (await ledger.keys.revoke(key.key_id)).revoked_at == revoked.revoked_at
    assert await ledger.keys.tenant_of(secret) is None
    assert await ledger.keys.tenant_of(other) == "acme"
    assert [one.label for one in await ledger.keys.list()] == ["phone", "laptop"]
    with pytest.raises(MeshError):
        await ledger.keys.revoke("nothing")

    async def work(connection: AsyncConnection) -> int:
        held = select(func.count()).where(api_keys.c.secret_sha256.contains(secret))
        return (await connection.execute(held)).scalar_one()

    assert await ledger.store.read(work) == 0


@pytest.mark.parametrize(
    ("tenant", "label"), [("", "x"), ("a b", "x"), ("a" * 65, "x"), ("a", "x" * 201), ("a", "\x00")]
)
async def test_a_key_for_a_tenant_that_cannot_be_is_refused(ledger: Ledger, tenant: str, label: str) -> None:
    """Bounds of both."""
    with pytest.raises(MeshError):
        await ledger.keys.add(tenant, label)
