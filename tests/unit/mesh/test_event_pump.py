"""The event pump over a ledger that the test scripts."""

import asyncio
import contextlib

import pytest
from support.capability_files import claim_of

from mesh import event_pump
from mesh.contract.errors import ErrorCode, MeshError, unavailable
from mesh.contract.messages import EmitEvents, EventKind, WorkerEvent
from mesh.event_pump import EventPump, until_accepted


class ScriptedLedger:
    """Stores batches as the ledger does: one that was stored before is not stored again."""

    def __init__(self) -> None:
        self.calls: list[EmitEvents] = []
        self.stored: list[WorkerEvent] = []
        self.newest = 0
        self.errors: list[Exception] = []
        self.is_away = asyncio.Event()
        self.is_away.set()

    async def emit(self, intent_id: str, batch: EmitEvents) -> None:
        """Take a batch, unless a scripted error comes first; wait while it is away."""
        self.calls.append(batch)
        await self.is_away.wait()
        if self.errors:
            raise self.errors.pop(0)
        if batch.batch_number > self.newest:
            self.newest = batch.batch_number
            self.stored += batch.events

    @property
    def text(self) -> str:
        """All text that was stored."""
        return "".join(event.data["text"] for event in self.stored if event.kind is EventKind.DELTA)


@pytest.fixture
def ledger() -> ScriptedLedger:
    """The ledger."""
    return ScriptedLedger()


@pytest.fixture
def pump(ledger: ScriptedLedger) -> EventPump:
    """A pump to it."""
    return EventPump(ledger, claim_of(), "node-1")  # type: ignore[arg-type]


async def test_pieces_of_text_travel_together(pump: EventPump, ledger: ScriptedLedger) -> None:
    """A hundred deltas are one event of one batch."""
    for number in range(100):
        await pump.put(EventKind.DELTA, {"text": f"{number} "})
    await pump.close()
    assert len(ledger.calls) == len(ledger.stored) == 1
    assert ledger.text == "".join(f"{number} " for number in range(100))


async def test_events_keep_their_order(pump: EventPump, ledger: ScriptedLedger) -> None:
    """Only neighbours are joined, and a tool record waits for all before it."""
    await pump.put(EventKind.DELTA, {"text": "a"})
    await pump.put(EventKind.PROGRESS, {"fraction": 0.5})
    await pump.put(EventKind.DELTA, {"text": "b"})
    await pump.put_and_wait(EventKind.TOOL_STARTED, {"call_id": "1", "name": "pay"})
    assert [str(event.kind) for event in ledger.stored] == ["delta", "progress", "delta", "tool.started"]


async def test_an_event_has_a_bound(pump: EventPump, ledger: ScriptedLedger) -> None:
    """Text is joined up to a size, and no batch holds more than it may."""
    for _ in range(1000):
        await pump.put(EventKind.DELTA, {"text": "x" * 1000})
    await pump.close()
    assert max(len(event.data["text"]) for event in ledger.stored) <= event_pump.EVENT_CHARS_MAX
    assert len(ledger.text) == 1_000_000


async def test_of_progress_the_newest_counts(pump: EventPump, ledger: ScriptedLedger) -> None:
    """A worker that tells it a thousand times a second does not fill the ledger with it."""
    for number in range(1000):
        await pump.put(EventKind.PROGRESS, {"fraction": number / 1000})
    await pump.close()
    assert [event.data for event in ledger.stored] == [{"fraction": 0.999}]


@pytest.mark.parametrize("is_mixed", [False, True])
async def test_a_ledger_that_is_away_holds_the_worker_back(
    pump: EventPump, ledger: ScriptedLedger, is_mixed: bool
) -> None:
    """What waits is bounded: a worker that says too much waits until the ledger takes it. Nothing is lost."""
    ledger.is_away.clear()
    said = 0

    async def talk() -> None:
        nonlocal said
        while said < 20_000:
            await pump.put(EventKind.DELTA, {"text": "x" * 100})
            if is_mixed:
                await pump.put(EventKind.PROGRESS, {"fraction": 0.5})
            said += 1

    talking = asyncio.create_task(talk())
    await asyncio.sleep(0.2)
    assert 0 < said * 100 <= 2 * event_pump.WAITING_CHARS_MAX
    ledger.is_away.set()
    await talking
    await pump.close()
    assert len(ledger.text) == 2_000_000


async def test_a_cancelled_flush_leaves_no_gap(pump: EventPump, ledger: ScriptedLedger) -> None:
    """A batch that was under way is sent again under its number: stored once, and before what came later."""
    ledger.is_away.clear()
    first = asyncio.create_task(pump.put_and_wait(EventKind.DELTA, {"text": "first "}))
    await asyncio.sleep(0)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    await pump.put(EventKind.DELTA, {"text": "second"})
    ledger.is_away.set()
    await pump.close()
    assert ledger.text == "first second"
    assert [batch.batch_number for batch in ledger.calls] == [1, 1, 2]


async def test_a_call_is_repeated_while_the_ledger_is_away(pump: EventPump, ledger: ScriptedLedger) -> None:
    """The same batch, until it is taken."""
    ledger.errors = [unavailable("away"), unavailable("away")]
    await pump.put_and_wait(EventKind.TOOL_STARTED, {"call_id": "1", "name": "pay"})
    assert [batch.batch_number for batch in ledger.calls] == [1, 1, 1]
    assert len(ledger.stored) == 1


async def test_a_stale_attempt_may_say_nothing_more(pump: EventPump, ledger: ScriptedLedger) -> None:
    """The first refusal reaches the worker's next word."""
    ledger.errors = [MeshError(ErrorCode.STALE_EPOCH, "stale")]
    with pytest.raises(MeshError, match="stale"):
        await pump.put_and_wait(EventKind.TOOL_STARTED, {"call_id": "1", "name": "pay"})
    with pytest.raises(MeshError, match="stale"):
        await pump.put(EventKind.DELTA, {"text": "more"})
    await pump.close()
    assert len(ledger.calls) == 1


async def test_refused_text_costs_the_text_only(pump: EventPump, ledger: ScriptedLedger) -> None:
    """What the ledger has against an event is no reason to lose the result; nothing piles up behind it."""
    ledger.errors = [MeshError(ErrorCode.INVALID_REQUEST, "no")]
    await pump.put(EventKind.DELTA, {"text": "a"})
    await pump.close()
    for _ in range(10):
        await pump.put(EventKind.DELTA, {"text": "b"})
    await pump.close()
    assert len(ledger.calls) == 1
    with pytest.raises(MeshError):
        await pump.put_and_wait(EventKind.TOOL_STARTED, {"call_id": "1", "name": "pay"})


async def test_closing_takes_a_moment_only(
    pump: EventPump, ledger: ScriptedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger that is away does not hold up the outcome."""
    monkeypatch.setattr(event_pump, "CLOSE_TIMEOUT_S", 0.05)
    ledger.is_away.clear()
    await pump.put(EventKind.DELTA, {"text": "a"})
    async with asyncio.timeout(1):
        await pump.close()


async def tries_of(error: MeshError, *, patience_s: float | None = None) -> int:
    """How often a call that always fails is made before its error is raised."""
    tries = 0

    async def call() -> None:
        nonlocal tries
        async for attempt in until_accepted(patience_s=patience_s):
            with attempt:
                tries += 1
                raise error

    with pytest.raises(MeshError) as raised:
        await call()
    assert raised.value is error
    return tries


async def test_a_ledger_that_fails_in_itself_is_asked_a_few_times() -> None:
    """It may do better the next time; a call that it always fails at ends."""
    assert await tries_of(MeshError(ErrorCode.INTERNAL, "bug")) == event_pump.INTERNAL_TRIES_MAX
    assert await tries_of(MeshError(ErrorCode.INVALID_REQUEST, "no")) == 1


async def test_patience_has_an_end() -> None:
    """The last error is raised."""
    assert await tries_of(unavailable("away"), patience_s=0.2) > 1


async def test_a_cancellation_ends_the_repetition() -> None:
    """Inside a call as well as between two."""

    async def repeat() -> None:
        async for attempt in until_accepted():
            with attempt:
                await asyncio.sleep(60)

    task = asyncio.create_task(repeat())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
