"""Short words for what ledger tests do again and again, and the one way in which they move time: by moving rows."""

from typing import Any

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.ledger import Ledger
from ledger.models import intents
from mesh.contract.api import IntentView, SubmitIntent
from mesh.contract.errors import Cause
from mesh.contract.messages import (
    Claim,
    ClaimRequest,
    CommitResult,
    EmitEvents,
    EventKind,
    FailAttempt,
    Settled,
    ThreadUpdate,
    WorkerEvent,
)
from mesh.contract.template import Template

CHAT = Template(name="chat", supports_multi_turn=True)
ECHO = Template(name="echo")
TENANT = "local"
NODE = "node-1"


async def submit(
    ledger: Ledger,
    text: str = "hello",
    *,
    tenant: str = TENANT,
    thread: str | None = "t",
    key: str | None = None,
    capability: Template = CHAT,
    **fields: Any,
) -> IntentView:
    """Submit an intent and return it."""
    request = SubmitIntent(type=capability.name, payload={"text": text}, thread_id=thread, **fields)
    submitted = await ledger.intents.submit(tenant, request, capability=capability, idempotency_key=key)
    return submitted.intent


async def claim(ledger: Ledger, intent: IntentView, node: str = NODE) -> Claim:
    """Claim an intent."""
    return await ledger.claims.claim(intent.intent_id, ClaimRequest(node_id=node))


async def commit(
    ledger: Ledger, held: Claim, result: Any = None, *, node: str = NODE, update: ThreadUpdate | None = None
) -> Settled:
    """Commit a result under a claim."""
    result = {"text": "answer"} if result is None else result
    outcome = CommitResult(node_id=node, epoch=held.epoch, result=result, thread_update=update or ThreadUpdate())
    return await ledger.claims.commit(held.intent_id, outcome)


async def fail(
    ledger: Ledger,
    held: Claim,
    cause: Cause = Cause.WORKER_CRASHED,
    *,
    node: str = NODE,
    is_retryable: bool = True,
    partial_text: str = "",
) -> Settled:
    """Fail the attempt of a claim."""
    outcome = FailAttempt(
        node_id=node,
        epoch=held.epoch,
        cause=cause,
        detail="it broke",
        is_retryable=is_retryable,
        partial_text=partial_text,
    )
    return await ledger.claims.fail(held.intent_id, outcome)


async def say(ledger: Ledger, held: Claim, *events: tuple[EventKind, dict[str, Any]], node: str = NODE) -> None:
    """Emit events of a running worker."""
    batch = [WorkerEvent(kind=kind, data=data) for kind, data in events]
    await ledger.claims.emit(held.intent_id, EmitEvents(node_id=node, epoch=held.epoch, events=batch))


async def run(ledger: Ledger, text: str = "hello", *, thread: str = "t", tenant: str = TENANT) -> IntentView:
    """Take an intent through its whole life and return it."""
    intent = await submit(ledger, text, thread=thread, tenant=tenant)
    await commit(ledger, await claim(ledger, intent))
    return await ledger.intents.get(tenant, intent.intent_id)


async def get(ledger: Ledger, intent: IntentView | Claim, *, tenant: str = TENANT) -> IntentView:
    """Look at an intent again."""
    return await ledger.intents.get(tenant, intent.intent_id)


async def kinds(ledger: Ledger, thread: str = "t", *, tenant: str = TENANT) -> list[str]:
    """Return the kinds of a thread's events in order, after checking that the numbers have no gap."""
    found = await ledger.events.after(tenant, thread, 0, limit=1000)
    assert [event.number for event in found] == list(range(1, len(found) + 1))
    return [event.kind for event in found]


async def move(ledger: Ledger, intent: IntentView | Claim, *columns: str, by_s: float) -> None:
    """Move times of an intent's row; negative is into the past."""

    async def work(connection: AsyncConnection) -> None:
        values = {name: intents.c[name] + int(by_s * 1000) for name in columns}
        await connection.execute(update(intents).where(intents.c.intent_id == intent.intent_id).values(**values))

    await ledger.store.write(work)


async def lose_lease(ledger: Ledger, held: Claim) -> None:
    """Let a lease run out."""
    await move(ledger, held, "lease_until_ms", by_s=-3600)


async def column(ledger: Ledger, intent: IntentView, name: str) -> Any:
    """Read one column of an intent's row."""

    async def work(connection: AsyncConnection) -> Any:
        statement = select(intents.c[name]).where(intents.c.intent_id == intent.intent_id)
        return (await connection.execute(statement)).scalar_one()

    return await ledger.store.read(work)
