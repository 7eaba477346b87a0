"""The write-ahead log of tool effects; on both databases."""

import pytest
from support.ledger_rows import NODE, claim, commit, fail, lose_lease, move, say, submit

from ledger.ledger import Ledger
from mesh.contract.errors import Cause, ErrorCode, MeshError
from mesh.contract.messages import EmitEvents, EventKind, WorkerEvent

STARTED, FINISHED = EventKind.TOOL_STARTED, EventKind.TOOL_FINISHED


async def test_what_began_and_did_not_end_is_uncertain_on_the_next_attempt(ledger: Ledger) -> None:
    """And stays so; what ended comes with its result."""
    intent = await submit(ledger)
    held = await claim(ledger, intent)
    assert held.tool_records == []
    await say(
        ledger,
        held,
        (STARTED, {"call_id": "1", "name": "mail", "arguments": {"to": "a"}}),
        (FINISHED, {"call_id": "1", "result": {"sent": True}}),
        (STARTED, {"call_id": "2", "name": "pay", "arguments": None}),
    )
    await lose_lease(ledger, held)
    await ledger.sweeper.tick()
    second = await claim(ledger, intent)
    shown = [(record.call_id, record.name, record.status, record.result) for record in second.tool_records]
    assert shown == [("1", "mail", "finished", {"sent": True}), ("2", "pay", "uncertain", None)]
    assert second.tool_records[0].arguments == {"to": "a"}
    # The same id in another attempt is another call.
    await say(ledger, second, (STARTED, {"call_id": "2", "name": "pay"}), (FINISHED, {"call_id": "2", "result": 1}))
    await fail(ledger, second, Cause.WORKER_CRASHED)
    await move(ledger, intent, "available_at_ms", by_s=-60)
    third = await claim(ledger, intent)
    assert [(record.attempt, record.call_id, record.status) for record in third.tool_records] == [
        (1, "1", "finished"),
        (1, "2", "uncertain"),
        (2, "2", "finished"),
    ]


@pytest.mark.parametrize(
    "events",
    [
        [(FINISHED, {"call_id": "x"})],
        [(STARTED, {"call_id": "x", "name": "a"}), (STARTED, {"call_id": "x", "name": "a"})],
        [(STARTED, {"name": "a"})],
        [(STARTED, {"call_id": "x"})],
        [(STARTED, {"call_id": 1, "name": "a"})],
        [(EventKind.RESULT_COMMITTED, {})],
        [(EventKind.DELTA, {"text": float("inf")})],
    ],
)
async def test_a_batch_that_makes_no_sense_is_refused_as_a_whole(
    ledger: Ledger, events: list[tuple[EventKind, dict[str, object]]]
) -> None:
    """Nothing of it is written, and the attempt goes on."""
    held = await claim(ledger, await submit(ledger))
    with pytest.raises(MeshError) as refused:
        await say(ledger, held, (EventKind.DELTA, {"text": "kept?"}), *events)
    assert refused.value.code in {ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_JSON}
    assert [event.kind for event in await ledger.events.after("local", "t", 2)] == []
    await commit(ledger, held)


async def test_a_started_call_is_refused_when_the_epoch_is_stale(ledger: Ledger) -> None:
    """The last look before an effect: a node that lost its lease hears so."""
    intent = await submit(ledger)
    old = await claim(ledger, intent)
    await lose_lease(ledger, old)
    await ledger.sweeper.tick()
    with pytest.raises(MeshError) as refused:
        await say(ledger, old, (STARTED, {"call_id": "1", "name": "pay"}))
    assert refused.value.code is ErrorCode.STALE_EPOCH
    assert (await claim(ledger, intent)).tool_records == []


async def test_a_batch_that_is_sent_again_is_stored_once(ledger: Ledger) -> None:
    """A node that lost the reply repeats the batch: no second delta, no second tool call, no gap in the numbers."""
    held = await claim(ledger, await submit(ledger))
    events = [
        WorkerEvent(kind=EventKind.DELTA, data={"text": "a"}),
        WorkerEvent(kind=STARTED, data={"call_id": "1", "name": "mail"}),
    ]
    batch = EmitEvents(node_id=NODE, epoch=held.epoch, events=events, batch_number=1)
    await ledger.claims.emit(held.intent_id, batch)
    await ledger.claims.emit(held.intent_id, batch)
    following = [WorkerEvent(kind=EventKind.DELTA, data={"text": "b"})]
    await ledger.claims.emit(held.intent_id, batch.model_copy(update={"events": following, "batch_number": 2}))
    log = await ledger.events.after(held.tenant_id, held.thread_id, 0, limit=50)
    assert [event.number for event in log] == list(range(1, len(log) + 1))
    assert [event.data["text"] for event in log if event.kind == EventKind.DELTA] == ["a", "b"]
    assert [event.kind for event in log].count(STARTED) == 1
