"""A node asks again for a claim whose answer it never got."""

import pytest
from support.ledger_rows import CHAT, NODE, claim, column, commit, kinds, lose_lease, submit

from ledger.ledger import Ledger
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.messages import Claim, ClaimRequest, EmitEvents, EventKind, WorkerEvent


async def again(ledger: Ledger, intent_id: str, node: str = NODE) -> Claim:
    """Claim as a node does whose first call got no answer."""
    return await ledger.claims.claim(intent_id, ClaimRequest(node_id=node, is_repeat=True))


async def test_the_same_claim_is_handed_out_once_more(ledger: Ledger) -> None:
    """Epoch, attempt, payload and context are those of the first; no event is added; the lease begins anew."""
    await commit(ledger, await claim(ledger, await submit(ledger, "before")))
    intent = await submit(ledger, "now")
    first = await claim(ledger, intent)
    await lose_lease(ledger, first)
    told = await kinds(ledger)
    second = await again(ledger, intent.intent_id)
    different = {"sent_at", "receipt"}
    assert second.model_dump(exclude=different) == first.model_dump(exclude=different)
    assert second.messages
    assert await kinds(ledger) == told
    await ledger.sweeper.tick()
    assert (await column(ledger, intent, "state")) == "running"
    await commit(ledger, second)


async def test_a_repetition_of_a_claim_that_was_never_made_is_a_claim(ledger: Ledger) -> None:
    """It is the call that was lost then, and not its answer."""
    intent = await submit(ledger)
    assert (await again(ledger, intent.intent_id)).attempt == 1


@pytest.mark.parametrize("why", ["another node", "not a repetition", "it has spoken", "it has ended"])
async def test_a_claim_that_may_be_at_work_is_not_handed_out_again(ledger: Ledger, why: str) -> None:
    """A worker that had an effect must not be joined by another under the same epoch."""
    intent = await submit(ledger, capability=CHAT)
    held = await claim(ledger, intent)
    node, is_repeat = NODE, True
    if why == "another node":
        node = "node-2"
    elif why == "not a repetition":
        is_repeat = False
    elif why == "it has spoken":
        event = WorkerEvent(kind=EventKind.TOOL_STARTED, data={"call_id": "1", "name": "pay"})
        batch = EmitEvents(node_id=NODE, epoch=held.epoch, events=[event], batch_number=1)
        await ledger.claims.emit(intent.intent_id, batch)
    else:
        await commit(ledger, held)
    with pytest.raises(MeshError) as caught:
        await ledger.claims.claim(intent.intent_id, ClaimRequest(node_id=node, is_repeat=is_repeat))
    assert caught.value.code is ErrorCode.NOT_CLAIMABLE
