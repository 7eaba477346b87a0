"""Two tenants with equal thread ids see nothing of each other, by any method; on both databases."""

from collections.abc import Awaitable, Callable

import pytest
from support.ledger_rows import claim, commit, fail, run, submit

from ledger.ledger import Ledger
from mesh.contract.api import ImportMessages, OwnerBody
from mesh.contract.errors import Cause, ErrorCode, MeshError
from mesh.contract.template import ContextShare

CANARY = "canary-7f3a"
Call = Callable[[Ledger, str], Awaitable[object]]

BY_INTENT: dict[str, Call] = {
    "get": lambda ledger, intent: ledger.intents.get("b", intent),
    "cancel": lambda ledger, intent: ledger.intents.cancel("b", intent),
    "replay": lambda ledger, intent: ledger.intents.replay("b", intent),
    "events": lambda ledger, intent: ledger.events.after("b", "t", 0, intent_id=intent),
    "child": lambda ledger, intent: submit(ledger, tenant="b", parent_intent_id=intent),
}
BY_THREAD: dict[str, Call] = {
    "get": lambda ledger, thread: ledger.threads.get("b", thread),
    "turns": lambda ledger, thread: ledger.threads.turns("b", thread),
    "pins": lambda ledger, thread: ledger.threads.pins("b", thread),
    "get_pin": lambda ledger, thread: ledger.threads.get_pin("b", thread, "k"),
    "put_pin": lambda ledger, thread: ledger.threads.put_pin("b", thread, "k", "x"),
    "delete_pin": lambda ledger, thread: ledger.threads.delete_pin("b", thread, "k"),
    "delete": lambda ledger, thread: ledger.threads.delete("b", thread),
    "events": lambda ledger, thread: ledger.events.after("b", thread, 0),
    "context": lambda ledger, thread: ledger.context.build("b", thread, query="x", share=ContextShare()),
}


@pytest.mark.parametrize("name", BY_INTENT)
async def test_an_intent_of_another_tenant_does_not_exist(ledger: Ledger, name: str) -> None:
    """Exactly as an intent that nobody has, and it is unharmed."""
    theirs = await submit(ledger, CANARY, tenant="a")
    await fail(ledger, await claim(ledger, theirs), Cause.HANDLER_REFUSED)
    await submit(ledger, "mine", tenant="b")
    for intent_id in (theirs.intent_id, "nobody's"):
        with pytest.raises(MeshError) as refused:
            await BY_INTENT[name](ledger, intent_id)
        assert refused.value.code is ErrorCode.NOT_FOUND
        assert CANARY not in str(refused.value)
    assert (await ledger.intents.get("a", theirs.intent_id)).status == "failed"


@pytest.mark.parametrize("name", BY_THREAD)
async def test_a_thread_of_another_tenant_does_not_exist(ledger: Ledger, name: str) -> None:
    """Exactly as a thread that nobody has, and it is unharmed."""
    await run(ledger, CANARY, thread="theirs", tenant="a")
    await ledger.threads.put_pin("a", "theirs", "k", CANARY)
    for thread_id in ("theirs", "nobody's"):
        with pytest.raises(MeshError) as refused:
            await BY_THREAD[name](ledger, thread_id)
        assert refused.value.code is ErrorCode.NOT_FOUND
    thread = await ledger.threads.get("a", "theirs")
    assert (thread.turn_count, thread.pins[0].text) == (1, CANARY)


async def test_equal_thread_ids_are_two_threads(ledger: Ledger) -> None:
    """Seq, turns, events, pins, history and context are each tenant's own."""
    for tenant in ("a", "b"):
        await run(ledger, f"{tenant}-{CANARY}", tenant=tenant)
        await ledger.threads.put_pin(tenant, "t", "k", f"pin of {tenant}")
        history = ImportMessages.model_validate({"messages": [{"role": "user", "content": f"of {tenant}", "id": "1"}]})
        assert (await ledger.threads.import_messages(tenant, "t", history))["imported"] == 1
        await ledger.threads.get_or_create_by_owner(tenant, OwnerBody(channel="c", external_id="x"))
    for tenant, other in (("a", "b"), ("b", "a")):
        held = await claim(ledger, await submit(ledger, "what?", tenant=tenant))
        seen = [
            held.model_dump_json(),
            *(intent.model_dump_json() for intent in (await ledger.intents.list(tenant))[0]),
            *(thread.model_dump_json() for thread in (await ledger.threads.list(tenant))[0]),
            *(turn.model_dump_json() for turn in (await ledger.threads.turns(tenant, "t"))[0]),
            *(event.model_dump_json() for event in await ledger.events.after(tenant, "t", 0)),
        ]
        text = "\n".join(seen)
        assert f"{tenant}-{CANARY}" in text
        for secret in (f"{other}-{CANARY}", f"pin of {other}", f"of {other}"):
            assert secret not in text
        await commit(ledger, held)
    await ledger.threads.delete("a", "t")
    assert (await ledger.threads.get("b", "t")).turn_count == 3
