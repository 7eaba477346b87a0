"""Cancel, lost leases, deadlines and their races; on both databases."""

import asyncio
import random
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection
from support.ledger_rows import (
    CHAT,
    NODE,
    TENANT,
    claim,
    column,
    commit,
    fail,
    get,
    kinds,
    lose_lease,
    move,
    say,
    submit,
)
from support.recording_port import RecordingPort

from ledger.ledger import Ledger
from ledger.models import intents
from mesh.contract.errors import Cause, ErrorCode, MeshError
from mesh.contract.messages import EventKind, Heartbeat, LeaseRef
from mesh.contract.states import TERMINAL, State
from mesh.contract.template import Limits, Template

RACES = 100


async def test_cancelling_what_does_not_run_is_immediate(ledger: Ledger, port: RecordingPort) -> None:
    """The next one becomes the head, and the book forgets the cancelled one."""
    first, second = await submit(ledger), await submit(ledger)
    assert await ledger.intents.cancel(TENANT, first.intent_id) == "cancelled"
    assert (await get(ledger, first)).status is State.CANCELLED
    assert (await get(ledger, second)).status is State.READY
    assert [item.intent_id for item in port.forgotten] == [first.intent_id]
    with pytest.raises(MeshError) as refused:
        await ledger.intents.cancel(TENANT, first.intent_id)
    assert refused.value.code is ErrorCode.ALREADY_TERMINAL
    assert refused.value.extra == {"state": "cancelled"}


async def test_cancelling_a_queued_intent_leaves_the_head_alone(ledger: Ledger) -> None:
    """No gap, no change of head."""
    head, queued, last = [await submit(ledger, str(number)) for number in range(3)]
    assert await ledger.intents.cancel(TENANT, queued.intent_id) == "cancelled"
    await commit(ledger, await claim(ledger, head))
    assert (await get(ledger, last)).status is State.READY


async def test_cancelling_what_runs_asks_its_node(ledger: Ledger, port: RecordingPort) -> None:
    """The partial text stays in the thread, marked; asking twice is one event."""
    intent = await submit(ledger, "tell me")
    held = await claim(ledger, intent)
    for _ in range(2):
        assert await ledger.intents.cancel(TENANT, intent.intent_id) == "cancel_requested"
    assert port.notices[-1].cancel_on_node == NODE
    assert (await get(ledger, intent)).is_cancel_requested
    settled = await fail(ledger, held, Cause.CANCELLED, partial_text="Well, ")
    assert (settled.state, settled.turn_number) == (State.CANCELLED, 1)
    turns, _ = await ledger.threads.turns(TENANT, "t")
    assert (turns[0].mark, turns[0].messages[1].content) == ("cancelled", "Well, ")
    assert (await get(ledger, intent)).turn_number == 1
    assert (await kinds(ledger)).count("intent.cancel_requested") == 1


async def test_a_crash_after_a_cancel_request_is_a_cancel(ledger: Ledger) -> None:
    """What the caller asked for goes before what the attempt died of."""
    intent = await submit(ledger)
    held = await claim(ledger, intent)
    await ledger.intents.cancel(TENANT, intent.intent_id)
    assert (await fail(ledger, held, Cause.WORKER_CRASHED)).state is State.CANCELLED
    assert (await ledger.threads.get(TENANT, "t")).turn_count == 0


async def test_a_lease_that_ran_out_is_tried_again_at_once(ledger: Ledger, port: RecordingPort) -> None:
    """Within the sweep, by the database's clock; the attempt says why."""
    intent = await submit(ledger)
    held = await claim(ledger, intent)
    await ledger.sweeper.tick()
    assert (await get(ledger, intent)).status is State.RUNNING
    await lose_lease(ledger, held)
    await ledger.sweeper.tick()
    waiting = await get(ledger, intent)
    assert (waiting.status, waiting.attempts[0].cause) == (State.READY, "lease_lost")
    assert port.announced_ids == [intent.intent_id] * 2
    assert (await claim(ledger, intent, "node-2")).attempt == 2


async def test_a_node_that_dies_every_time_ends_in_a_dead_letter(ledger: Ledger) -> None:
    """Attempts are counted at the claim, so a poisoned intent ends."""
    intent = await submit(ledger, capability=Template(name="chat", limits=Limits(max_attempts=2)))
    for state in (State.READY, State.DEAD):
        await lose_lease(ledger, await claim(ledger, intent))
        await ledger.sweeper.tick()
        assert (await get(ledger, intent)).status is state


async def test_a_heartbeat_renews_and_names_what_is_lost(ledger: Ledger) -> None:
    """Leases of another epoch, another node or a settled intent are not in `renewed`."""
    mine = await claim(ledger, await submit(ledger, thread="a"))
    theirs = await claim(ledger, await submit(ledger, thread="b"), "node-2")
    settled = await claim(ledger, await submit(ledger, thread="c"))
    await commit(ledger, settled)
    await move(ledger, mine, "lease_until_ms", by_s=-10)
    before = await column(ledger, await get(ledger, mine), "lease_until_ms")
    leases = [LeaseRef(intent_id=one.intent_id, epoch=one.epoch) for one in (mine, theirs, settled)]
    leases.append(LeaseRef(intent_id=mine.intent_id, epoch=7))
    reply = await ledger.claims.heartbeat(Heartbeat(node_id=NODE, leases=leases))
    assert reply.renewed == [mine.intent_id]
    assert not reply.is_known
    assert await column(ledger, await get(ledger, mine), "lease_until_ms") > before


async def test_a_lost_lease_after_a_cancel_keeps_what_was_said(ledger: Ledger) -> None:
    """The node is gone, but its deltas are in the log."""
    intent = await submit(ledger, "story")
    held = await claim(ledger, intent)
    await say(ledger, held, (EventKind.DELTA, {"text": "Once "}), (EventKind.DELTA, {"text": "upon"}))
    await ledger.intents.cancel(TENANT, intent.intent_id)
    await lose_lease(ledger, held)
    await ledger.sweeper.tick()
    assert (await get(ledger, intent)).status is State.CANCELLED
    turns, _ = await ledger.threads.turns(TENANT, "t")
    assert [message.content for message in turns[0].messages] == ["story", "Once upon"]


@pytest.mark.parametrize("state", ["accepted", "ready", "running"])
async def test_a_deadline_expires_an_unfinished_intent(ledger: Ledger, port: RecordingPort, state: str) -> None:
    """In whatever state; the thread goes on, and a running one's node is told."""
    deadline = datetime.now(UTC) + timedelta(hours=1)
    before = await submit(ledger, "before") if state == "accepted" else None
    intent = await submit(ledger, "late", deadline=deadline)
    behind = await submit(ledger, "behind")
    if state == "running":
        await claim(ledger, intent)
    await ledger.sweeper.tick()
    assert (await get(ledger, intent)).status == state
    await move(ledger, intent, "deadline_ms", by_s=-3601)
    if state == "ready":
        with pytest.raises(MeshError, match="deadline"):
            await claim(ledger, intent)
    await ledger.sweeper.tick()
    expired = await get(ledger, intent)
    assert expired.status is State.EXPIRED
    assert expired.error is not None
    assert expired.error.code == "deadline_passed"
    if state == "running":
        assert NODE in [notice.cancel_on_node for notice in port.notices]
        assert expired.attempts[0].cause == "deadline_passed"
    if before is not None:
        await commit(ledger, await claim(ledger, before))
    assert (await get(ledger, behind)).status is State.READY


async def test_what_nobody_claims_is_announced_again(ledger: Ledger, port: RecordingPort) -> None:
    """A lost hint costs seconds, not the intent; several sweepers announce it once."""
    intent = await submit(ledger)
    await ledger.sweeper.tick()
    assert len(port.announced) == 1
    await move(ledger, intent, "announce_after_ms", by_s=-10)
    await asyncio.gather(ledger.sweeper.tick(), ledger.sweeper.tick(), ledger.sweeper.tick())
    assert port.announced_ids == [intent.intent_id] * 2


async def test_three_sweepers_lose_a_lease_once(ledger: Ledger) -> None:
    """Compare-and-set on state and epoch."""
    held = await claim(ledger, await submit(ledger))
    await lose_lease(ledger, held)
    await asyncio.gather(*(ledger.sweeper.tick() for _ in range(3)))
    assert (await kinds(ledger)).count("intent.retrying") == 1
    assert (await get(ledger, held)).attempt == 1


async def test_cancel_commit_fail_and_sweep_at_once_have_one_outcome(ledger: Ledger) -> None:
    """Races: exactly one terminal state, one terminal event, and a turn if and only if there is a result."""
    dice = random.Random(7)

    async def race(number: int) -> None:
        thread = f"race-{number}"
        intent = await submit(ledger, thread=thread, capability=CHAT)
        held = await claim(ledger, intent)
        await move(ledger, intent, "lease_until_ms", by_s=-60 if dice.random() < 0.5 else 60)
        rivals = [
            commit(ledger, held),
            fail(ledger, held, Cause.HANDLER_REFUSED, is_retryable=False),
            ledger.intents.cancel(TENANT, intent.intent_id),
            ledger.sweeper.tick(is_slow=False),
        ]
        dice.shuffle(rivals)
        answers = await asyncio.gather(*rivals, return_exceptions=True)
        unexpected = [one for one in answers if isinstance(one, Exception) and not isinstance(one, MeshError)]
        assert unexpected == []
        done = await get(ledger, intent)
        seen = await kinds(ledger, thread)
        ends = [kind for kind in seen if kind in {"result.committed", "intent.failed", "intent.cancelled"}]
        if done.status in TERMINAL:
            assert len(ends) == 1
        else:
            assert done.status is State.READY  # the sweeper came first
            assert ends == []
        turn_count = (await ledger.threads.get(TENANT, thread)).turn_count
        assert turn_count == seen.count("result.committed") == (1 if done.status is State.SUCCEEDED else 0)

    for start in range(0, RACES, 5):
        await asyncio.gather(*(race(number) for number in range(start, start + 5)))


async def test_many_nodes_race_for_one_intent(ledger: Ledger) -> None:
    """Exactly one claim succeeds, and the epoch is minted once."""
    intent = await submit(ledger)
    answers = await asyncio.gather(
        *(claim(ledger, intent, f"node-{number}") for number in range(12)), return_exceptions=True
    )
    won = [answer for answer in answers if not isinstance(answer, BaseException)]
    lost = [answer for answer in answers if isinstance(answer, MeshError)]
    assert (len(won), len(lost)) == (1, 11)
    assert {error.code for error in lost} == {ErrorCode.NOT_CLAIMABLE}
    assert (await get(ledger, intent)).epoch == 1


async def test_a_headless_thread_gets_its_head_back(ledger: Ledger, port: RecordingPort) -> None:
    """Should not happen; the slow sweep mends it all the same."""
    first, second = await submit(ledger), await submit(ledger)

    async def break_it(connection: AsyncConnection) -> None:
        broken = update(intents).where(intents.c.intent_id == first.intent_id)
        await connection.execute(broken.values(state="cancelled", finished_at_ms=1))

    await ledger.store.write(break_it)
    await ledger.sweeper.tick(is_slow=True)
    assert (await get(ledger, second)).status is State.READY
    assert port.announced_ids[-1] == second.intent_id


async def test_tenants_share_what_a_polling_node_is_offered(ledger: Ledger) -> None:
    """One tenant's long queue does not hide another's intent; priority counts within a tenant."""
    for number in range(5):
        await submit(ledger, thread=f"a{number}", tenant="a", priority=number)
    other = await submit(ledger, thread="b", tenant="b", priority=-5)
    offered = (await ledger.claims.claimable(NODE, ["chat"], 3)).intents
    assert [item.tenant_id for item in offered[:2]] == ["a", "b"]
    assert (offered[0].priority, offered[1].intent_id) == (4, other.intent_id)
    assert (await ledger.claims.claimable(NODE, ["echo"], 3)).intents == []
    assert (await ledger.claims.claimable(NODE, [], 3)).intents == []


async def test_a_lease_renewed_after_the_sweeper_looked_is_not_lost(ledger: Ledger) -> None:
    """Between finding a lost lease and ending it the node may renew: asked again under the lock."""
    held = await claim(ledger, await submit(ledger))
    assert await ledger._endings.lose(held.intent_id, held.epoch) is None
    await lose_lease(ledger, held)
    assert await ledger._endings.lose(held.intent_id, held.epoch + 1) is None
    assert (await get(ledger, held)).status is State.RUNNING
    settled = await ledger._endings.lose(held.intent_id, held.epoch)
    assert settled is not None
    assert settled.state is State.READY
