"""Submitting: idempotency, busy threads, times, bad input; on both databases."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.ledger_rows import CHAT, TENANT, claim, commit, fail, get, kinds, move, say, submit
from support.recording_port import RecordingPort

from ledger.ledger import Ledger
from mesh.contract.api import SubmitIntent
from mesh.contract.errors import Cause, ErrorCode, MeshError
from mesh.contract.messages import EventKind, Heartbeat, LeaseRef
from mesh.contract.states import State


def _in(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


async def test_fifty_parallel_submissions_with_one_key_make_one_intent(ledger: Ledger) -> None:
    """One of them makes it, all the others are told its id."""
    request = SubmitIntent(type="chat", payload={"text": "hi"})
    answers = await asyncio.gather(
        *(ledger.intents.submit(TENANT, request, capability=CHAT, idempotency_key="k") for _ in range(50))
    )
    assert len({answer.intent.intent_id for answer in answers}) == 1
    assert sum(not answer.is_replay for answer in answers) == 1
    items, _ = await ledger.intents.list(TENANT)
    assert len(items) == 1
    assert (await ledger.threads.list(TENANT))[0][0].thread_id == items[0].thread_id


async def test_a_known_key_with_another_request_is_a_conflict(ledger: Ledger) -> None:
    """And changes nothing."""
    await submit(ledger, "one", key="k")
    with pytest.raises(MeshError) as refused:
        await submit(ledger, "two", key="k")
    assert refused.value.code is ErrorCode.IDEMPOTENCY_CONFLICT
    assert await kinds(ledger) == ["intent.discovered"]


async def test_a_key_belongs_to_its_tenant(ledger: Ledger) -> None:
    """Two tenants may use the same key."""
    mine, theirs = await submit(ledger, "x", key="k"), await submit(ledger, "y", key="k", tenant="other")
    assert mine.intent_id != theirs.intent_id


async def test_a_replayed_submission_shows_what_became_of_the_intent(ledger: Ledger) -> None:
    """The same key after the end answers with the result."""
    await commit(ledger, await claim(ledger, await submit(ledger, key="k")))
    again = await submit(ledger, key="k")
    assert (again.status, again.result) == (State.SUCCEEDED, {"text": "answer"})


@pytest.mark.parametrize("key", ["", "x" * 256, "a\x00b"])
async def test_a_key_that_is_none_is_refused(ledger: Ledger, key: str) -> None:
    """Bounds of the key."""
    with pytest.raises(MeshError) as refused:
        await submit(ledger, key=key)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


async def test_first_intents_of_a_new_thread_may_race(ledger: Ledger) -> None:
    """Many at once on a new thread: seq is 1..n, one head."""
    made = await asyncio.gather(*(submit(ledger, str(number), thread="new") for number in range(20)))
    assert sorted(intent.seq for intent in made) == list(range(1, 21))
    assert next(intent.status for intent in sorted(made, key=lambda one: one.seq)) is State.READY
    assert sum(intent.status is State.READY for intent in made) == 1
    assert await kinds(ledger, "new") == ["intent.discovered"] * 20


async def test_reject_is_refused_while_the_thread_is_busy(ledger: Ledger) -> None:
    """409 with Retry-After; free again afterwards."""
    held = await claim(ledger, await submit(ledger))
    with pytest.raises(MeshError) as refused:
        await submit(ledger, on_busy="reject")
    assert refused.value.code is ErrorCode.THREAD_BUSY
    assert refused.value.retry_after_s
    await commit(ledger, held)
    assert (await submit(ledger, on_busy="reject")).status is State.READY


@pytest.mark.parametrize(("policy", "mark"), [("interrupt", "interrupted"), ("rollback", None)])
async def test_a_running_turn_can_be_interrupted_or_rolled_back(
    ledger: Ledger, port: RecordingPort, policy: str, mark: str | None
) -> None:
    """The node is told to stop; interrupt keeps the partial text with its mark, rollback leaves no trace."""
    running = await submit(ledger, "long story")
    held = await claim(ledger, running)
    newer = await submit(ledger, "stop", on_busy=policy)
    assert newer.status is State.ACCEPTED
    assert port.notices[-2].cancel_on_node == "node-1"
    reply = await ledger.claims.heartbeat(
        Heartbeat(node_id="node-1", leases=[LeaseRef(intent_id=running.intent_id, epoch=1)])
    )
    cause = Cause.INTERRUPTED if policy == "interrupt" else Cause.ROLLED_BACK
    assert [(order.intent_id, order.cause) for order in reply.cancel] == [(running.intent_id, cause)]
    settled = await fail(ledger, held, cause, partial_text="Once upon")
    assert (settled.state, settled.turn_number) == (State.CANCELLED, 1 if mark else None)
    stopped = await get(ledger, running)
    assert stopped.error is not None
    assert stopped.error.code == cause
    following = await claim(ledger, newer)
    assert [message.content.split("\n")[0] for message in following.messages][-1:] == (["Once upon"] if mark else [])
    turns, _ = await ledger.threads.turns(TENANT, "t")
    assert [turn.mark for turn in turns] == ([mark] if mark else [])


async def test_a_result_that_comes_after_a_rollback_leaves_no_trace(ledger: Ledger) -> None:
    """The caller wanted no trace of this turn, and said so before the result came."""
    running = await submit(ledger)
    held = await claim(ledger, running)
    newer = await submit(ledger, "instead", on_busy="rollback")
    assert (await commit(ledger, held)).state is State.CANCELLED
    assert (await get(ledger, running)).status is State.CANCELLED
    assert (await ledger.threads.get(TENANT, "t")).turn_count == 0
    assert (await get(ledger, newer)).status is State.READY


async def test_interrupting_a_waiting_head_cancels_it_at_once(ledger: Ledger, port: RecordingPort) -> None:
    """A ready head is cancelled at once; what was queued stays and goes first."""
    head, queued = await submit(ledger, "head"), await submit(ledger, "queued")
    newest = await submit(ledger, "newest", on_busy="interrupt")
    states = [(await get(ledger, intent)).status for intent in (head, queued, newest)]
    assert states == [State.CANCELLED, State.READY, State.ACCEPTED]
    assert port.announced_ids == [head.intent_id, queued.intent_id]
    assert [item.intent_id for item in port.forgotten] == [head.intent_id]


async def test_interrupting_the_only_other_intent_makes_the_new_one_the_head(ledger: Ledger) -> None:
    """The answer shows it as ready."""
    head = await submit(ledger, "head")
    newer = await submit(ledger, "newer", on_busy="interrupt")
    assert newer.status is State.READY
    assert (await get(ledger, newer)).status is State.READY
    assert (await get(ledger, head)).status is State.CANCELLED


async def test_a_passed_deadline_is_refused_and_leaves_nothing(ledger: Ledger) -> None:
    """Not even the thread."""
    with pytest.raises(MeshError) as refused:
        await submit(ledger, deadline=_in(-1))
    assert refused.value.code is ErrorCode.DEADLINE_PASSED
    with pytest.raises(MeshError):
        await ledger.threads.get(TENANT, "t")


@pytest.mark.parametrize(
    "fields",
    [
        {"not_before": datetime(9999, 12, 31, 23, 59, tzinfo=UTC)},
        {"deadline": datetime(1, 1, 1, tzinfo=UTC)},
        {"not_before": datetime(2099, 1, 2, tzinfo=UTC), "deadline": datetime(2099, 1, 1, tzinfo=UTC)},
    ],
)
async def test_times_that_make_no_sense_are_refused(ledger: Ledger, fields: dict[str, Any]) -> None:
    """With the field that is wrong."""
    with pytest.raises(MeshError) as refused:
        await submit(ledger, **fields)
    assert refused.value.field in {"not_before", "deadline"}


async def test_not_before_keeps_its_place_and_is_announced_when_due(ledger: Ledger, port: RecordingPort) -> None:
    """The intent is the head, cannot be claimed before its time, and those behind it wait."""
    later = await submit(ledger, "later", not_before=_in(3600))
    behind = await submit(ledger, "behind")
    assert (later.status, behind.status) == (State.READY, State.ACCEPTED)
    assert port.announced == []
    assert (await ledger.claims.claimable("node-1", ["chat"], 10)).intents == []
    with pytest.raises(MeshError, match="not due yet"):
        await claim(ledger, later)
    await ledger.sweeper.tick()
    assert port.announced == []
    await move(ledger, later, "available_at_ms", "announce_after_ms", by_s=-3601)
    await ledger.sweeper.tick()
    assert port.announced_ids == [later.intent_id]
    await commit(ledger, await claim(ledger, later))
    assert (await get(ledger, behind)).status is State.READY


async def test_a_parent_must_be_the_tenants(ledger: Ledger) -> None:
    """Chains do not cross tenants."""
    parent = await submit(ledger)
    child = await submit(ledger, parent_intent_id=parent.intent_id, thread=None)
    assert child.parent_intent_id == parent.intent_id
    with pytest.raises(MeshError) as refused:
        await submit(ledger, parent_intent_id=parent.intent_id, tenant="other")
    assert refused.value.code is ErrorCode.NOT_FOUND


async def test_a_list_is_paged_without_gap_or_repeat(ledger: Ledger) -> None:
    """Newest first, filters hold on every page, a bad cursor is refused."""
    made = [(await submit(ledger, str(number), thread=f"t{number % 2}")).intent_id for number in range(7)]
    seen: list[str] = []
    cursor: str | None = None
    while True:
        items, cursor = await ledger.intents.list(TENANT, cursor=cursor, limit=3)
        seen += [item.intent_id for item in items]
        if cursor is None:
            break
    assert seen == made[::-1]
    items, _ = await ledger.intents.list(TENANT, thread_id="t1", status=State.ACCEPTED)
    assert [item.intent_id for item in items] == [made[5], made[3]]
    assert (await ledger.intents.list(TENANT, type="echo"))[0] == []
    for bad in ("x", "AAAA", "[]", "é", "W10"):
        with pytest.raises(MeshError) as refused:
            await ledger.intents.list(TENANT, cursor=bad)
        assert refused.value.field == "cursor"


async def test_a_dead_intent_can_be_replayed(ledger: Ledger) -> None:
    """It queues at the end with a new budget of attempts; its history stays."""
    intent = await submit(ledger)
    await fail(ledger, await claim(ledger, intent), Cause.SPAWN_FAILED)
    other = await submit(ledger, "other")
    again = await ledger.intents.replay(TENANT, intent.intent_id)
    assert (again.status, again.seq, again.error) == (State.ACCEPTED, 3, None)
    assert (again.attempt, again.max_attempts) == (1, 4)
    await commit(ledger, await claim(ledger, other))
    held = await claim(ledger, again)
    assert (held.attempt, held.epoch) == (2, 2)
    await commit(ledger, held)
    done = await get(ledger, intent)
    assert (done.status, done.turn_number, len(done.attempts)) == (State.SUCCEEDED, 2, 2)
    with pytest.raises(MeshError) as refused:
        await ledger.intents.replay(TENANT, intent.intent_id)
    assert refused.value.code is ErrorCode.NOT_REPLAYABLE
    assert refused.value.extra == {"state": "succeeded"}


async def test_a_replayed_intent_of_an_idle_thread_is_ready(ledger: Ledger, port: RecordingPort) -> None:
    """And announced as a new attempt."""
    intent = await submit(ledger)
    await fail(ledger, await claim(ledger, intent), Cause.HANDLER_REFUSED)
    assert (await ledger.intents.replay(TENANT, intent.intent_id)).status is State.READY
    assert [(item.intent_id, item.attempt) for item in port.announced] == [(intent.intent_id, 0), (intent.intent_id, 1)]


async def test_a_result_too_large_for_an_event_is_in_the_intent(ledger: Ledger) -> None:
    """The event says so."""
    held = await claim(ledger, await submit(ledger))
    await say(ledger, held, (EventKind.DELTA, {"text": "x"}))
    await commit(ledger, held, {"text": "x" * 100_000})
    events = await ledger.events.after(TENANT, "t", 3)
    assert events[0].data["is_result_omitted"]
    assert len((await get(ledger, held)).result["text"]) == 100_000
