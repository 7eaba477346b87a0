"""The life of an intent in the ledger, on both databases."""

import pytest
from sqlalchemy import insert, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection
from support.ledger_rows import CHAT, NODE, TENANT, claim, commit, fail, get, kinds, move, run, say, submit
from support.recording_port import RecordingPort

from ledger.ledger import Ledger
from ledger.models import intents
from mesh.contract.api import SubmitIntent
from mesh.contract.errors import Cause, ErrorCode, MeshError
from mesh.contract.messages import (
    Award,
    ClaimRequest,
    CommitResult,
    EventKind,
    Heartbeat,
    LeaseRef,
    Loser,
    PriceParts,
    ThreadUpdate,
)
from mesh.contract.states import State
from mesh.contract.template import Limits, Template


async def test_an_intent_runs_from_ready_to_succeeded(ledger: Ledger, port: RecordingPort) -> None:
    """Submit, claim, commit: the result, the turn and the events are there, and nothing else is."""
    intent = await submit(ledger, "hi")
    assert (intent.status, intent.seq, intent.attempt) == (State.READY, 1, 0)
    assert port.announced_ids == [intent.intent_id]
    held = await claim(ledger, intent)
    assert (held.epoch, held.attempt, held.turn_number_next) == (1, 1, 1)
    assert (await get(ledger, intent)).status is State.RUNNING
    settled = await commit(ledger, held, {"text": "hello"})
    assert (settled.state, settled.turn_number) == (State.SUCCEEDED, 1)
    done = await get(ledger, intent)
    assert (done.status, done.result, done.turn_number, done.error) == (State.SUCCEEDED, {"text": "hello"}, 1, None)
    assert done.finished_at is not None
    assert done.started_at is not None
    assert [(attempt.attempt, attempt.cause) for attempt in done.attempts] == [(1, None)]
    assert await kinds(ledger) == ["intent.discovered", "intent.claimed", "result.committed", "thread.updated"]
    turns, following = await ledger.threads.turns(TENANT, "t")
    assert following is None
    assert [(message.role, message.content) for message in turns[0].messages] == [
        ("user", "hi"),
        ("assistant", "hello"),
    ]
    assert port.notices[-1].is_terminal


async def test_a_result_of_json_null_is_a_result(ledger: Ledger) -> None:
    """Null is what the handler returned, not the absence of a result."""
    intent = await submit(ledger)
    held = await claim(ledger, intent)
    await ledger.claims.commit(held.intent_id, CommitResult(node_id=NODE, epoch=1, result=None))
    done = await get(ledger, intent)
    assert (done.status, done.result, done.turn_number) == (State.SUCCEEDED, None, 1)


async def test_the_next_turn_sees_the_turn_before(ledger: Ledger) -> None:
    """Read your own writes: the claim of turn 2 carries turn 1."""
    await run(ledger, "my name is Ada")
    held = await claim(ledger, await submit(ledger, "what is my name?"))
    assert [message.content for message in held.messages] == ["my name is Ada", "answer"]
    assert held.turn_number_next == 2
    assert (await get(ledger, held)).receipt == held.receipt


async def test_a_capability_without_conversations_gets_no_context(ledger: Ledger) -> None:
    """supports_multi_turn false: the claim carries no message."""
    await run(ledger, "one")
    held = await claim(ledger, await submit(ledger, "two", capability=Template(name="echo")))
    assert held.messages == []
    assert not held.supports_multi_turn


async def test_intents_of_a_thread_run_in_the_order_of_acceptance(ledger: Ledger, port: RecordingPort) -> None:
    """FIFO: only the head is ready, and each commit makes the next one ready in its own transaction."""
    first, second, third = [await submit(ledger, str(number)) for number in range(3)]
    assert [first.status, second.status, third.status] == [State.READY, State.ACCEPTED, State.ACCEPTED]
    for later in (second, third):
        with pytest.raises(MeshError) as refused:
            await claim(ledger, later)
        assert refused.value.code is ErrorCode.NOT_CLAIMABLE
    for number, intent in enumerate((first, second, third), 1):
        assert (await commit(ledger, await claim(ledger, intent))).turn_number == number
    assert port.announced_ids == [first.intent_id, second.intent_id, third.intent_id]


async def test_the_index_lets_a_thread_have_one_head_only(ledger: Ledger) -> None:
    """Two active intents in one thread are refused by the database itself."""
    await submit(ledger, "head")
    second = await submit(ledger, "queued")

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(
            update(intents).where(intents.c.intent_id == second.intent_id).values(state=State.READY)
        )

    with pytest.raises(IntegrityError):
        await ledger.store.write(work)


async def test_an_unknown_state_is_refused_by_the_database(ledger: Ledger) -> None:
    """CHECK repeats the contract's states."""
    intent = await submit(ledger)

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(update(intents).where(intents.c.intent_id == intent.intent_id).values(state="lost"))

    with pytest.raises(IntegrityError):
        await ledger.store.write(work)


async def test_a_claimed_intent_cannot_be_claimed_again(ledger: Ledger) -> None:
    """The second claim is told the state."""
    intent = await submit(ledger)
    await claim(ledger, intent)
    with pytest.raises(MeshError) as refused:
        await claim(ledger, intent, "node-2")
    assert refused.value.code is ErrorCode.NOT_CLAIMABLE
    assert refused.value.extra == {"state": "running"}


async def test_a_failed_attempt_is_tried_again_until_the_attempts_are_used_up(
    ledger: Ledger, port: RecordingPort
) -> None:
    """Retry with backoff, each with a new epoch; then a dead letter that says why."""
    template = Template(name="chat", supports_multi_turn=True, limits=Limits(max_attempts=2))
    intent = await submit(ledger, capability=template)
    assert (await fail(ledger, await claim(ledger, intent))).state is State.READY
    waiting = await get(ledger, intent)
    assert waiting.next_attempt_at is not None
    with pytest.raises(MeshError, match="not due yet"):
        await claim(ledger, intent)
    await move(ledger, intent, "available_at_ms", "announce_after_ms", by_s=-2)
    await ledger.sweeper.tick()
    assert port.announced_ids == [intent.intent_id, intent.intent_id]
    assert port.announced[-1].attempt == 1
    held = await claim(ledger, intent)
    assert (held.epoch, held.attempt) == (2, 2)
    assert (await fail(ledger, held, Cause.OOM_KILLED)).state is State.DEAD
    dead = await get(ledger, intent)
    assert dead.error is not None
    assert dead.error.code == "oom_killed"
    assert [attempt.cause for attempt in dead.attempts] == ["worker_crashed", "oom_killed"]
    assert (await kinds(ledger))[-3:] == ["intent.retrying", "intent.claimed", "intent.dead"]


@pytest.mark.parametrize(
    ("cause", "is_retryable", "state"),
    [
        (Cause.SPAWN_FAILED, True, State.DEAD),
        (Cause.RESULT_INVALID, True, State.DEAD),
        (Cause.HANDLER_REFUSED, False, State.FAILED),
        (Cause.MODEL_NOT_CONFIGURED, False, State.FAILED),
        (Cause.HANDLER_FAILED, False, State.FAILED),
        (Cause.DEADLINE_PASSED, False, State.EXPIRED),
    ],
)
async def test_what_fails_for_good_is_not_tried_again(
    ledger: Ledger, cause: Cause, is_retryable: bool, state: State
) -> None:
    """Deterministic causes end the intent at the first attempt, and the thread goes on."""
    intent, following = await submit(ledger), await submit(ledger, "next")
    assert (await fail(ledger, await claim(ledger, intent), cause, is_retryable=is_retryable)).state is state
    assert (await get(ledger, following)).status is State.READY
    assert (await ledger.threads.get(TENANT, "t")).turn_count == 0


async def test_a_drained_node_costs_no_attempt(ledger: Ledger) -> None:
    """node_drained gives the attempt back, and the intent is ready at once."""
    template = Template(name="chat", limits=Limits(max_attempts=1))
    intent = await submit(ledger, capability=template)
    assert (await fail(ledger, await claim(ledger, intent), Cause.NODE_DRAINED)).state is State.READY
    assert (await commit(ledger, await claim(ledger, intent))).state is State.SUCCEEDED


@pytest.mark.parametrize("how", ["commit", "fail"])
async def test_the_same_outcome_again_gets_the_same_answer(ledger: Ledger, how: str) -> None:
    """A node whose reply was lost asks again: same answer, nothing twice."""
    held = await claim(ledger, await submit(ledger))
    act = commit if how == "commit" else fail
    first, again = await act(ledger, held), await act(ledger, held)
    assert (first.state, first.turn_number) == (again.state, again.turn_number)
    assert (await ledger.threads.get(TENANT, "t")).turn_count == (1 if how == "commit" else 0)
    assert len(await kinds(ledger)) == (4 if how == "commit" else 3)


async def test_a_stale_epoch_changes_nothing(ledger: Ledger) -> None:
    """After a lost lease every write of the old owner is refused, and the new owner's counts."""
    intent = await submit(ledger)
    old = await claim(ledger, intent, "node-1")
    await move(ledger, intent, "lease_until_ms", by_s=-60)
    await ledger.sweeper.tick()
    new = await claim(ledger, intent, "node-2")
    assert (new.epoch, new.attempt) == (2, 2)
    before = await kinds(ledger)
    for write in (
        lambda: commit(ledger, old, {"text": "old"}),
        lambda: fail(ledger, old),
        lambda: say(ledger, old, (EventKind.DELTA, {"text": "old"})),
        # The right epoch from the wrong node is no better.
        lambda: commit(ledger, new, {"text": "old"}, node="node-1"),
    ):
        with pytest.raises(MeshError) as refused:
            await write()
        assert refused.value.code is ErrorCode.STALE_EPOCH
    assert await kinds(ledger) == before
    await commit(ledger, new, {"text": "new"}, node="node-2")
    assert (await get(ledger, intent)).result == {"text": "new"}
    assert (await ledger.threads.get(TENANT, "t")).turn_count == 1


async def test_the_epoch_alone_tells_two_claims_of_one_node_apart(ledger: Ledger) -> None:
    """A node that lost its lease and won the intent again cannot commit what the first attempt made."""
    intent = await submit(ledger)
    old = await claim(ledger, intent)
    await move(ledger, intent, "lease_until_ms", by_s=-60)
    await ledger.sweeper.tick()
    new = await claim(ledger, intent)
    before = await kinds(ledger)
    for write in (
        lambda: commit(ledger, old, {"text": "old"}),
        lambda: fail(ledger, old),
        lambda: say(ledger, old, (EventKind.DELTA, {"text": "old"})),
    ):
        with pytest.raises(MeshError) as refused:
            await write()
        assert refused.value.code is ErrorCode.STALE_EPOCH
    lease = LeaseRef(intent_id=intent.intent_id, epoch=old.epoch)
    assert (await ledger.claims.heartbeat(Heartbeat(node_id=NODE, leases=[lease]))).renewed == []
    assert await kinds(ledger) == before
    await commit(ledger, new, {"text": "new"})
    assert (await get(ledger, intent)).result == {"text": "new"}


async def test_an_award_is_stored_with_the_claim(ledger: Ledger) -> None:
    """Why this node is a query: price parts and losers stay with the intent, and are an event."""
    intent = await submit(ledger)
    award = Award(
        tenant_id=TENANT,
        intent_id=intent.intent_id,
        thread_id="t",
        capability="chat",
        node_id=NODE,
        price=1.5,
        parts=PriceParts(load=0.5),
        losers=[Loser(node_id="node-2", price=2.0, reason="outbid")],
        awarded_at_ms=1_700_000_000_000,
    )
    await ledger.claims.claim(intent.intent_id, ClaimRequest(node_id=NODE, award=award))
    shown = (await get(ledger, intent)).award
    assert shown is not None
    assert (shown.node_id, shown.price, shown.parts.load, shown.losers[0].reason) == (NODE, 1.5, 0.5, "outbid")
    assert await kinds(ledger) == ["intent.discovered", "intent.awarded", "intent.claimed"]


async def test_a_thread_update_patches_the_thread(ledger: Ledger) -> None:
    """Plan and title replace, memory merges by key and null removes, pins are set and removed, messages replace."""
    first = ThreadUpdate(
        plan={"steps": ["a"]}, contextual_memory={"x": 1, "y": 2}, pins={"city": "Rome", "old": "x"}, title="Trip"
    )
    await commit(ledger, await claim(ledger, await submit(ledger)), update=first)
    second = ThreadUpdate(
        contextual_memory={"y": None, "z": [3]},
        tool_calls={"c1": {"name": "clock", "result": 1}},
        pins={"old": None},
        messages=[{"role": "user", "content": "short"}, {"role": "tool", "content": "12:00", "tool_call_id": "c1"}],
    )
    await commit(ledger, await claim(ledger, await submit(ledger)), update=second)
    thread = await ledger.threads.get(TENANT, "t")
    assert (thread.last_plan, thread.title) == ({"steps": ["a"]}, "Trip")
    assert thread.contextual_memory == {"x": 1, "z": [3]}
    assert thread.last_tool_calls == {"c1": {"name": "clock", "result": 1}}
    assert [(pin.key, pin.text, pin.source_turn) for pin in thread.pins] == [("city", "Rome", 1)]
    assert thread.message_count == 4
    turns, _ = await ledger.threads.turns(TENANT, "t")
    assert [message.role for message in turns[1].messages] == ["user", "tool"]


@pytest.mark.parametrize(
    ("result", "update"),
    [
        (float("nan"), {}),
        ({"n": 2**70}, {}),
        ("x", {"messages": [{"role": "robot", "content": "x"}]}),
        ("x", {"pins": {"key": ""}}),
        ("x", {"pins": {"a/b": "x"}}),
        ("x", {"contextual_memory": {"big": "x" * 100_000}}),
    ],
)
async def test_an_outcome_that_can_never_be_stored_is_refused_for_good(
    ledger: Ledger, result: object, update: dict[str, object]
) -> None:
    """Not retryable and not stale: the node knows that it must fail the attempt as result_invalid."""
    held = await claim(ledger, await submit(ledger))
    with pytest.raises(MeshError) as refused:
        await commit(ledger, held, result, update=ThreadUpdate.model_validate(update))
    assert not refused.value.retryable
    assert refused.value.code in {ErrorCode.INVALID_JSON, ErrorCode.INVALID_REQUEST, ErrorCode.TOO_LARGE}
    assert (await fail(ledger, held, Cause.RESULT_INVALID)).state is State.DEAD


async def test_bad_text_of_a_worker_is_mended(ledger: Ledger) -> None:
    """NUL and lone surrogates become U+FFFD wherever they come from."""
    held = await claim(ledger, await submit(ledger))
    await say(ledger, held, (EventKind.DELTA, {"text": "a\x00b"}))
    update = ThreadUpdate(plan={"p\x00": "\udc97"}, pins={"k": "v\x00"}, title="t\x00")
    await commit(ledger, held, {"text": "\udc97\x00"}, update=update)
    assert (await get(ledger, held)).result == {"text": "\ufffd\ufffd"}
    thread = await ledger.threads.get(TENANT, "t")
    assert (thread.last_plan, thread.pins[0].text, thread.title) == ({"p\ufffd": "\ufffd"}, "v\ufffd", "t\ufffd")


async def test_parallel_intents_of_many_threads_keep_turns_gapless(ledger: Ledger) -> None:
    """Turn numbers are 1..n in each thread although cancelled and failed intents lie between."""
    for number in range(6):
        intent = await submit(ledger, str(number))
        if number == 2:
            await ledger.intents.cancel(TENANT, intent.intent_id)
        elif number == 4:
            await fail(ledger, await claim(ledger, intent), Cause.HANDLER_REFUSED, is_retryable=False)
        else:
            await commit(ledger, await claim(ledger, intent))
    turns, _ = await ledger.threads.turns(TENANT, "t")
    assert [turn.turn_number for turn in turns] == [1, 2, 3, 4]
    assert [turn.messages[0].content for turn in turns] == ["0", "1", "3", "5"]
    await kinds(ledger)


async def test_an_intent_row_needs_its_thread(ledger: Ledger) -> None:
    """Foreign keys are on, on both databases."""
    intent = await submit(ledger)

    async def work(connection: AsyncConnection) -> None:
        row = (
            (await connection.execute(intents.select().where(intents.c.intent_id == intent.intent_id))).mappings().one()
        )
        await connection.execute(insert(intents), {**row, "intent_id": "other", "thread_id": "nowhere"})

    with pytest.raises(IntegrityError):
        await ledger.store.write(work)


async def test_a_server_made_thread_is_returned(ledger: Ledger) -> None:
    """Every intent belongs to a thread."""
    request = SubmitIntent(type="chat", payload={})
    submitted = await ledger.intents.submit(TENANT, request, capability=CHAT)
    assert (await ledger.threads.get(TENANT, submitted.intent.thread_id)).status == "queued"
