"""The ledger's internal HTTP face and its client, over a real socket; on both databases."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from pydantic import SecretStr
from support.ledger_rows import NODE, TENANT, get, submit

from ledger.app import build_ledger_app
from ledger.client import LedgerClient, RemoteEmbedder
from ledger.ledger import Ledger
from mesh.contract.errors import Cause, ErrorCode, MeshError
from mesh.contract.messages import (
    Award,
    ClaimRequest,
    CommitResult,
    EmitEvents,
    EventKind,
    FailAttempt,
    Heartbeat,
    LeaseRef,
    PriceParts,
    RegisterNode,
    WorkerEvent,
)
from mesh.contract.states import State
from mesh.contract.template import Template

TOKEN = "mesh-secret"


class _FixedEmbedder:
    """Two dimensions, always the same."""

    model_id = "fixed"
    is_ready = True

    async def embed(self, texts: Sequence[str], *, timeout_s: float) -> Any:
        return np.array([[1.0, 0.0]] * len(texts), dtype=np.float32)


@pytest.fixture
async def url(ledger: Ledger) -> AsyncIterator[str]:
    """A ledger that serves on loopback."""
    ledger.embedder = _FixedEmbedder()
    config = uvicorn.Config(build_ledger_app(ledger, SecretStr(TOKEN)), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(10):
        while not server.started:
            await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


@pytest.fixture
async def client(url: str) -> AsyncIterator[LedgerClient]:
    """A node's client."""
    opened = LedgerClient(url, TOKEN)
    yield opened
    await opened.close()


async def test_a_node_lives_by_http_alone(ledger: Ledger, client: LedgerClient) -> None:
    """Register, poll, claim, emit, heartbeat, commit; errors come back as they were raised."""
    await client.register(RegisterNode(node_id=NODE, host="h", slots=2, capabilities=[Template(name="chat")]))
    intent = await submit(ledger, "hi")
    offered = (await client.claimable(NODE, ["chat"], 5)).intents
    assert [item.intent_id for item in offered] == [intent.intent_id]
    award = Award(
        tenant_id=TENANT,
        intent_id=intent.intent_id,
        thread_id="t",
        capability="chat",
        node_id=NODE,
        price=1.0,
        parts=PriceParts(),
        awarded_at_ms=1,
    )
    held = await client.claim(intent.intent_id, ClaimRequest(node_id=NODE, award=award))
    delta = WorkerEvent(kind=EventKind.DELTA, data={"text": "a\udc97"})
    await client.emit(intent.intent_id, EmitEvents(node_id=NODE, epoch=held.epoch, events=[delta]))
    lease = LeaseRef(intent_id=intent.intent_id, epoch=held.epoch)
    assert (await client.heartbeat(Heartbeat(node_id=NODE, leases=[lease]))).renewed == [intent.intent_id]
    settled = await client.commit(
        intent.intent_id, CommitResult(node_id=NODE, epoch=held.epoch, result={"text": "x\x00"})
    )
    assert (settled.state, settled.turn_number) == (State.SUCCEEDED, 1)
    assert (await get(ledger, intent)).result == {"text": "x\ufffd"}
    with pytest.raises(MeshError) as stale:
        await client.emit(intent.intent_id, EmitEvents(node_id=NODE, epoch=held.epoch, events=[delta]))
    assert stale.value.code is ErrorCode.STALE_EPOCH
    with pytest.raises(MeshError) as refused:
        await client.claim(intent.intent_id, ClaimRequest(node_id=NODE))
    assert (refused.value.code, refused.value.extra) == (ErrorCode.NOT_CLAIMABLE, {"state": "succeeded"})
    with pytest.raises(MeshError) as unknown:
        await client.claim("a/b?c", ClaimRequest(node_id=NODE))
    assert unknown.value.code is ErrorCode.NOT_FOUND


async def test_a_result_that_is_not_json_is_never_sent(ledger: Ledger, client: LedgerClient) -> None:
    """NaN is refused for good, not turned into null."""
    intent = await submit(ledger)
    held = await client.claim(intent.intent_id, ClaimRequest(node_id=NODE))
    with pytest.raises(MeshError) as refused:
        await client.commit(intent.intent_id, CommitResult(node_id=NODE, epoch=held.epoch, result={"n": float("nan")}))
    assert (refused.value.code, refused.value.retryable) == (ErrorCode.INVALID_JSON, False)
    failure = FailAttempt(
        node_id=NODE, epoch=held.epoch, cause=Cause.RESULT_INVALID, detail=refused.value.detail, is_retryable=False
    )
    assert (await client.fail(intent.intent_id, failure)).state is State.DEAD


async def test_nothing_but_health_is_answered_without_the_token(url: str) -> None:
    """401 with a hint."""
    for token in (None, "wrong", TOKEN + "x"):
        client = LedgerClient(url, token)
        with pytest.raises(MeshError) as refused:
            await client.claimable(NODE, ["chat"], 1)
        assert refused.value.code is ErrorCode.UNAUTHORIZED
        assert (await client.health())["status"] == "ok"
        await client.close()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b'{"node_id":"node-1","leases":NaN}', 422),
        (b'{"node_id":"node-1","node_id":"node-1"}', 422),
        (b'{"node_id":"other"}', 422),
        (b"[" * 100_000, 422),
        (b'"\\ud800"', 422),
        (b'{"node_id":1}', 422),
        (b" " * (33 * 1024 * 1024), 413),
    ],
)
async def test_a_bad_body_is_a_clear_error(url: str, body: bytes, status: int) -> None:
    """Never a 500."""
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        response = await http.post(f"/nodes/{NODE}/heartbeat", content=body)
        assert response.status_code == status
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["detail"]
        assert (await http.get("/nowhere")).json()["code"] == "not_found"
        assert (await http.get("/embed")).json()["code"] == "method_not_allowed"


async def test_the_embedder_is_reached_through_the_ledger(ledger: Ledger, client: LedgerClient) -> None:
    """Vectors and the model's id arrive; without one the error is `unavailable`, and the port says it is not ready."""
    remote = RemoteEmbedder(client)
    await remote.start()
    assert (remote.model_id, remote.is_ready) == ("fixed", True)
    vectors = await remote.embed(["a", "b"], timeout_s=2)
    assert vectors.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    ledger.embedder = None
    with pytest.raises(MeshError) as refused:
        await remote.embed(["a"], timeout_s=2)
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert not remote.is_ready


async def test_a_ledger_that_is_gone_is_unavailable() -> None:
    """Not a foreign exception."""
    client = LedgerClient("http://127.0.0.1:9", TOKEN, timeout_s=1)
    with pytest.raises(MeshError) as refused:
        await client.heartbeat(Heartbeat(node_id=NODE))
    assert refused.value.code is ErrorCode.UNAVAILABLE
    await client.close()
