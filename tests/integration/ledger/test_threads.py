"""Threads, imported history, pins, erasing; on both databases."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection
from support.ledger_rows import TENANT, claim, commit, kinds, run, say, submit

from ledger import models
from ledger.ledger import Ledger
from mesh.contract.api import ImportMessages, OwnerBody
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.messages import EventKind, ThreadUpdate


def _history(*messages: dict[str, Any]) -> ImportMessages:
    return ImportMessages.model_validate({"messages": list(messages)})


def _message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


async def _roles(ledger: Ledger, thread: str = "t") -> list[list[str]]:
    turns, _ = await ledger.threads.turns(TENANT, thread)
    assert [turn.turn_number for turn in turns] == list(range(1, len(turns) + 1))
    return [[message.role for message in turn.messages] for turn in turns]


async def test_pairs_become_turns(ledger: Ledger) -> None:
    """A user's message and the assistant's after it are one turn; any other message is one by itself."""
    history = _history(
        _message("system", "rules"),
        _message("user", "a", name="Ada", at="2024-05-01T10:00:00Z"),
        _message("assistant", "b"),
        _message("user", "c"),
        _message("user", "d"),
        _message("assistant", "e"),
        _message("assistant", "f"),
    )
    counts = await ledger.threads.import_messages(TENANT, "t", history)
    assert counts == {"imported": 7, "skipped": 0, "turn_count": 5}
    assert await _roles(ledger) == [["system"], ["user", "assistant"], ["user"], ["user", "assistant"], ["assistant"]]
    turns, _ = await ledger.threads.turns(TENANT, "t")
    assert turns[1].messages[0].name == "Ada"
    assert turns[1].messages[0].at == datetime(2024, 5, 1, 10, tzinfo=UTC)
    assert turns[1].messages[0].tokens > 4
    thread = await ledger.threads.get(TENANT, "t")
    assert (thread.message_count, thread.turn_count) == (7, 5)
    held = await claim(ledger, await submit(ledger, "g"))
    assert held.turn_number_next == 6


async def test_an_import_is_repeatable_when_messages_have_ids(ledger: Ledger) -> None:
    """Known ids are skipped, in one call and across calls, also at the same time."""
    history = _history(_message("user", "a", id="1"), _message("assistant", "b", id="2"), _message("user", "a", id="1"))
    answers = await asyncio.gather(*(ledger.threads.import_messages(TENANT, "t", history) for _ in range(5)))
    assert sorted(answer["imported"] for answer in answers) == [0, 0, 0, 0, 2]
    assert await _roles(ledger) == [["user", "assistant"]]
    more = _history(_message("assistant", "b", id="2"), _message("user", "c", id="3"))
    assert (await ledger.threads.import_messages(TENANT, "t", more))["skipped"] == 1
    assert await _roles(ledger) == [["user", "assistant"], ["user"]]


async def test_a_call_may_end_between_question_and_answer(ledger: Ledger) -> None:
    """The assistant's message that begins the next call completes the open turn."""
    await ledger.threads.import_messages(TENANT, "t", _history(_message("user", "a")))
    await ledger.threads.import_messages(TENANT, "t", _history(_message("assistant", "b"), _message("assistant", "c")))
    assert await _roles(ledger) == [["user", "assistant"], ["assistant"]]
    thread = await ledger.threads.get(TENANT, "t")
    assert (thread.message_count, thread.turn_count) == (3, 2)


async def test_history_imported_while_a_context_is_built_is_in_the_claim(ledger: Ledger) -> None:
    """A claim's context is the thread as of the claim, or it is built anew."""
    intent = await submit(ledger, "and?")
    build, grown = ledger.context.build, []

    async def build_while_it_grows(*args: Any, **options: Any) -> Any:
        built = await build(*args, **options)
        if not grown:
            grown.append(await ledger.threads.import_messages(TENANT, "t", _history(_message("user", "late"))))
        return built

    ledger.context.build = build_while_it_grows  # type: ignore[method-assign]
    held = await claim(ledger, intent)
    assert [message.content for message in held.messages] == ["late"]
    assert held.turn_number_next == 2


async def test_bad_text_is_refused_with_its_path(ledger: Ledger) -> None:
    """NUL in an imported message."""
    with pytest.raises(MeshError) as refused:
        await ledger.threads.import_messages(TENANT, "t", _history(_message("user", "a\x00")))
    assert refused.value.field == "messages[0].content"


async def test_turns_are_paged(ledger: Ledger) -> None:
    """Oldest first, without gap or repeat."""
    history = _history(*(_message("user", str(number)) for number in range(7)))
    await ledger.threads.import_messages(TENANT, "t", history)
    seen: list[str] = []
    cursor: str | None = None
    while True:
        turns, cursor = await ledger.threads.turns(TENANT, "t", cursor=cursor, limit=3)
        seen += [turn.messages[0].content for turn in turns]
        if cursor is None:
            break
    assert seen == [str(number) for number in range(7)]


async def test_a_thread_is_found_by_its_owner(ledger: Ledger) -> None:
    """Get or create: many at once make one, and a later title is kept."""
    owner = OwnerBody(channel="slack", external_id="C1")
    answers = await asyncio.gather(*(ledger.threads.get_or_create_by_owner(TENANT, owner) for _ in range(10)))
    assert len({thread.thread_id for thread, _ in answers}) == 1
    assert sum(is_new for _, is_new in answers) == 1
    titled = OwnerBody(channel="slack", external_id="C1", title="Trip")
    thread, is_new = await ledger.threads.get_or_create_by_owner(TENANT, titled)
    assert (thread.title, thread.channel, thread.status, is_new) == ("Trip", "slack", "idle", False)
    other, is_new = await ledger.threads.get_or_create_by_owner("other", owner)
    assert is_new
    assert other.thread_id != thread.thread_id


async def test_threads_are_paged_newest_first(ledger: Ledger) -> None:
    """With their status and pins."""
    for name in "abcde":
        await submit(ledger, thread=f"ü-{name}")
    await ledger.threads.put_pin(TENANT, "ü-c", "city", "Rome")
    first, cursor = await ledger.threads.list(TENANT, limit=3)
    assert cursor is not None
    rest, end = await ledger.threads.list(TENANT, cursor=cursor, limit=3)
    assert [thread.thread_id for thread in first + rest] == ["ü-e", "ü-d", "ü-c", "ü-b", "ü-a"]
    assert end is None
    assert [pin.text for pin in first[2].pins] == ["Rome"]
    assert {thread.status for thread in first} == {"queued"}


async def test_pins_are_set_replaced_and_removed(ledger: Ledger) -> None:
    """Each change is an event, and every claim carries the pin word for word."""
    await run(ledger)
    made = await ledger.threads.put_pin(TENANT, "t", "city", "Rome")
    changed = await ledger.threads.put_pin(TENANT, "t", "city", "Oslo")
    assert (changed.text, changed.created_at) == ("Oslo", made.created_at)
    assert (await ledger.threads.get_pin(TENANT, "t", "city")).text == "Oslo"
    held = await claim(ledger, await submit(ledger))
    assert any("Oslo" in message.content for message in held.messages)
    await ledger.threads.delete_pin(TENANT, "t", "city")
    assert await ledger.threads.pins(TENANT, "t") == []
    with pytest.raises(MeshError):
        await ledger.threads.delete_pin(TENANT, "t", "city")
    assert (await kinds(ledger)).count("thread.updated") == 4


@pytest.mark.parametrize(("key", "text"), [("", "x"), ("a/b", "x"), ("k" * 129, "x"), ("k", ""), ("k", "x\x00")])
async def test_a_pin_that_no_context_can_carry_is_refused(ledger: Ledger, key: str, text: str) -> None:
    """Bounds of key and text."""
    await submit(ledger)
    with pytest.raises(MeshError) as refused:
        await ledger.threads.put_pin(TENANT, "t", key, text)
    assert refused.value.code is ErrorCode.INVALID_REQUEST


async def test_a_thread_has_a_bounded_number_of_pins(ledger: Ledger) -> None:
    """The one too many changes nothing."""
    pins = {f"k{number}": "x" for number in range(100)}
    await commit(ledger, await claim(ledger, await submit(ledger)), update=ThreadUpdate(pins=pins))
    with pytest.raises(MeshError) as refused:
        await ledger.threads.put_pin(TENANT, "t", "more", "x")
    assert refused.value.code is ErrorCode.TOO_LARGE
    await ledger.threads.put_pin(TENANT, "t", "k1", "replaced")
    assert len(await ledger.threads.pins(TENANT, "t")) == 100


async def test_erasing_leaves_no_row_behind(ledger: Ledger) -> None:
    """Every table that holds a tenant's data; refused while an intent is unfinished."""
    intent = await submit(ledger, key="k")
    held = await claim(ledger, intent)
    await say(ledger, held, (EventKind.TOOL_STARTED, {"call_id": "1", "name": "x"}))
    with pytest.raises(MeshError) as refused:
        await ledger.threads.delete(TENANT, "t")
    assert refused.value.code is ErrorCode.CONFLICT
    await commit(ledger, held, update=ThreadUpdate(pins={"a": "b"}))
    await run(ledger, thread="stays")
    await ledger.threads.delete(TENANT, "t")

    async def work(connection: AsyncConnection) -> dict[str, int]:
        counts = {}
        for table in models.metadata.sorted_tables:
            if "thread_id" in table.c:
                count = select(func.count()).select_from(table).where(table.c.thread_id == "t")
            elif "intent_id" in table.c:
                count = select(func.count()).select_from(table).where(table.c.intent_id == intent.intent_id)
            else:
                continue
            counts[table.name] = (await connection.execute(count)).scalar_one()
        return counts

    counts = await ledger.store.read(work)
    assert len(counts) >= 9
    assert set(counts.values()) == {0}
    for lookup in (ledger.threads.get(TENANT, "t"), ledger.threads.delete(TENANT, "t")):
        with pytest.raises(MeshError) as gone:
            await lookup
        assert gone.value.code is ErrorCode.NOT_FOUND
    assert (await ledger.threads.get(TENANT, "stays")).turn_count == 1
    assert (await submit(ledger, "again", key="k")).seq == 1
