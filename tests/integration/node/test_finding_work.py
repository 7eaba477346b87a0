"""How nodes come by intents: by awards where there is Redis, by asking the ledger where there is none."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.node_lab import NodeLab, file_text
from support.redis_server import RedisServer, running_redis
from support.running_mesh import eventually

from mesh.backplane import backplane as backplane_module
from mesh.backplane import client
from mesh.backplane.backplane import Backplane
from mesh.contract.messages import Announcement, Bid, PriceParts
from mesh.contract.template import Template

ECHO = "def run(intent, context):\n    return intent.payload\n"


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """One server for the file."""
    with running_redis() as server:
        yield server


class Address(NamedTuple):
    """Where the book of one mesh is."""

    url: str
    prefix: str


@pytest.fixture
def address(redis_server: RedisServer) -> Address:
    """A mesh that nobody else uses."""
    return Address(redis_server.url, f"test-{uuid.uuid4().hex}")


@pytest.fixture
async def backplane(address: Address, lab: NodeLab, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Backplane]:
    """The ledger's way to the nodes; patient, since a busy machine makes an outage of a slow answer."""
    monkeypatch.setattr(backplane_module, "CALL_MAX_S", 20.0)
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 20.0)
    async with Backplane(address.url, prefix=address.prefix) as backplane:
        lab.ledger.port = backplane
        yield backplane


@pytest.fixture
def sleeper(lab: NodeLab, tmp_path: Path) -> Template:
    """A capability that sleeps until the test lets it go on."""
    return lab.capability(
        f"""
        import os, time
        def run(intent, context):
            with open("{tmp_path}/begun-{{0}}".format(intent.payload["name"]), "w") as file:
                file.write("yes")
            while not os.path.exists("{tmp_path}/go"):
                time.sleep(0.01)
            return intent.attempt
        """,
        name="sleeper",
    )


async def test_a_poll_respects_the_budget(lab: NodeLab) -> None:
    """Without Redis, a node that asks more than an intent pays leaves it alone."""
    probe = lab.capability(ECHO, price="5.0")
    lab.node()
    poor = await lab.submit(probe, budget=4.0)
    rich = await lab.submit(probe, budget=7.0)
    assert (await lab.until(rich)).status == "succeeded"
    await asyncio.sleep(0.2)
    assert (await lab.look(poor)).status == "ready"


async def test_a_node_never_runs_more_than_it_has_slots(lab: NodeLab, sleeper: Template, tmp_path: Path) -> None:
    """What does not fit waits at the ledger."""
    node = lab.node(node_slots=2)
    sent = [await lab.submit(sleeper, {"name": str(number)}) for number in range(5)]
    await eventually(lambda: node.free_slots == 0, timeout_s=5, what="both slots are used")
    await asyncio.sleep(0.3)
    statuses = [str((await lab.look(intent)).status) for intent in sent]
    assert sorted(statuses) == ["ready"] * 3 + ["running"] * 2
    (tmp_path / "go").touch()
    assert {(await lab.until(intent)).status for intent in sent} == {"succeeded"}


async def test_an_award_begins_at_once(lab: NodeLab, backplane: Backplane) -> None:
    """No poll is waited for, and the award is told with the intent."""
    probe = lab.capability(ECHO)
    lab.node(backplane=backplane, node_poll_idle_interval_s=60)
    await lab.up()
    done = await lab.until(await lab.submit(probe, {"n": 1}), within_s=3)
    assert done.status == "succeeded"
    assert done.award is not None
    assert done.award.node_id == "node-1"


async def test_what_a_full_node_declines_goes_to_another(
    lab: NodeLab, backplane: Backplane, address: Address, sleeper: Template, tmp_path: Path
) -> None:
    """The book counts slots, the node counts again: an award that does not fit is given back."""
    lab.node(backplane=backplane, node_slots=1, node_poll_idle_interval_s=60)
    await lab.up()
    first = await lab.submit(sleeper, {"name": "a"})
    await file_text(tmp_path / "begun-a")
    # A book that believes in a slot that there is not.
    stale = Bid(node_id="node-1", capability="sleeper", parts=PriceParts())
    async with Backplane(address.url, prefix=address.prefix) as other:
        await other.place_bids("node-1", 3, [stale], ttl_s=5)
    second = await lab.submit(sleeper, {"name": "b"})
    lab.node("node-2", backplane=backplane, node_poll_idle_interval_s=60)
    await file_text(tmp_path / "begun-b")
    assert (await lab.look(second)).node_id == "node-2"
    (tmp_path / "go").touch()
    assert (await lab.until(first)).node_id == "node-1"


async def test_an_award_for_an_unknown_capability_is_declined(
    lab: NodeLab, backplane: Backplane, address: Address
) -> None:
    """It goes back into the book, and the node goes on."""
    probe = lab.capability(ECHO)
    lab.node(backplane=backplane, node_poll_idle_interval_s=60)
    await lab.up()
    unknown = Bid(node_id="node-1", capability="unknown", parts=PriceParts())
    async with Backplane(address.url, prefix=address.prefix) as other:
        await other.place_bids("node-1", 4, [unknown], ttl_s=5)
        ghost = Announcement(
            tenant_id="local", intent_id="ghost", thread_id="t", capability="unknown", accepted_at_ms=0
        )
        await other.announce([ghost])
        await asyncio.sleep(0.2)
        got = await other.place_bids("node-2", 1, [unknown.model_copy(update={"node_id": "node-2"})], ttl_s=5)
        assert [award.intent_id for award in got] == ["ghost"]
    assert (await lab.until(await lab.submit(probe))).status == "succeeded"


@pytest.mark.parametrize("lab", [{"retry_backoff_s": 0, "announce_again_s": 60, "lease_ttl_s": 60}], indirect=True)
async def test_a_retry_awarded_to_its_own_node_is_not_lost(lab: NodeLab, backplane: Backplane) -> None:
    """The award may come before the node has put the earlier attempt away: it is taken up afterwards."""
    probe = lab.capability(
        "def run(intent, context):\n    if intent.attempt < 3:\n        raise ValueError\n    return intent.attempt\n"
    )
    lab.node(backplane=backplane, node_poll_idle_interval_s=60)
    await lab.up()
    for _ in range(5):
        done = await lab.until(await lab.submit(probe), within_s=6)
        assert (done.result, len(done.attempts)) == (3, 3)


@pytest.mark.parametrize("lab", [{"lease_ttl_s": 60}], indirect=True)
async def test_a_cancel_reaches_the_worker_by_redis(
    lab: NodeLab, backplane: Backplane, sleeper: Template, tmp_path: Path
) -> None:
    """Not at the next heartbeat: at once."""
    lab.node(backplane=backplane)
    await lab.up()
    intent = await lab.submit(sleeper, {"name": "a"})
    await file_text(tmp_path / "begun-a")
    await lab.ledger.intents.cancel("local", intent.intent_id)
    assert (await lab.until(intent, within_s=3)).status == "cancelled"


async def test_a_node_without_its_ledger_wins_nothing(lab: NodeLab, backplane: Backplane) -> None:
    """One that can bid but not claim would swallow what others could run."""
    probe = lab.capability(ECHO)
    # The first node is the cheaper one by name, and by the thread that it ran last.
    lab.node("node-1", backplane=backplane, node_poll_idle_interval_s=60)
    await lab.up("node-1")
    assert (await lab.run(probe, thread_id="t")).node_id == "node-1"
    lab.faults.answer = lambda call: "fail" if "node-1" in call else None
    await eventually(
        lambda: sum("node-1/heartbeat" in call for call in lab.faults.seen[-20:]) > 3, timeout_s=5, what="it is cut off"
    )
    lab.node("node-2", backplane=backplane, node_poll_idle_interval_s=60)
    await lab.up("node-2")
    done = await lab.until(await lab.submit(probe, thread_id="t"), within_s=3)
    assert done.node_id == "node-2"
    lab.faults.answer = lambda _: None
    await lab.drained("node-2")
    assert (await lab.run(probe)).node_id == "node-1"
