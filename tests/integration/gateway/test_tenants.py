"""Two tenants: whatever call there is, one never sees the other's."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from support.running_gateway import ECHO, RunningGateway, SimulatedNode, run_gateway

from ledger.ledger import Ledger

CANARY = "canary-7f3a"
TOKEN = "mesh-token-for-tests"

# What tenant B gets for a call that names tenant A's things. `404`: it does not exist for him. `own`: the call makes
# or lists B's own, without a trace of A's. `mesh`: it concerns no tenant. `operator`: it is for operators alone.
EXPECTED = {
    ("post", "/intent"): "own",
    ("get", "/intents"): "own",
    ("get", "/intents/{intent_id}"): "404",
    ("post", "/intents/{intent_id}/cancel"): "404",
    ("post", "/intents/{intent_id}/replay"): "404",
    ("get", "/intents/{intent_id}/events"): "404",
    ("get", "/threads"): "own",
    ("put", "/threads"): "own",
    ("get", "/threads/{thread_id}"): "404",
    ("delete", "/threads/{thread_id}"): "404",
    ("get", "/threads/{thread_id}/turns"): "404",
    ("get", "/threads/{thread_id}/context"): "404",
    ("post", "/threads/{thread_id}/context:explain"): "404",
    ("post", "/threads/{thread_id}/messages"): "own",
    ("get", "/threads/{thread_id}/events"): "404",
    ("get", "/threads/{thread_id}/pins"): "404",
    ("get", "/threads/{thread_id}/pins/{key}"): "404",
    ("put", "/threads/{thread_id}/pins/{key}"): "404",
    ("delete", "/threads/{thread_id}/pins/{key}"): "404",
    ("get", "/capabilities"): "mesh",
    ("get", "/nodes"): "mesh",
    ("post", "/nodes/{node_id}/drain"): "operator",
    ("post", "/admin/keys"): "operator",
    ("get", "/admin/keys"): "operator",
    ("delete", "/admin/keys/{key_id}"): "operator",
    ("get", "/healthz"): "mesh",
    ("get", "/readyz"): "mesh",
    ("get", "/metrics"): "mesh",
}
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("post", "/intent"): {"type": "echo", "payload": {"text": "mine"}, "thread_id": CANARY},
    ("put", "/threads"): {"channel": "mail", "external_id": CANARY},
    ("post", "/threads/{thread_id}/context:explain"): {"query": "x"},
    ("post", "/threads/{thread_id}/messages"): {"messages": [{"role": "user", "content": "mine", "id": "1"}]},
    ("put", "/threads/{thread_id}/pins/{key}"): {"text": "mine"},
    ("post", "/admin/keys"): {"tenant_id": "c"},
}


class Tenants:
    """Tenant A with one of everything, and tenant B with nothing."""

    def __init__(self, running: RunningGateway, secrets: dict[str, str], ids: dict[str, str]) -> None:
        self.running = running
        self.ids = ids
        self._secrets = secrets

    async def call(self, tenant: str | None, method: str, path: str) -> httpx.Response:
        """Make a call that names A's things, as one of the tenants."""
        headers = {"Authorization": f"Bearer {self._secrets[tenant]}"} if tenant else {}
        return await self.running.client.request(
            method, path.format(**self.ids), json=BODIES.get((method, path)), headers=headers
        )


@pytest.fixture
async def tenants(ledger: Ledger, node: SimulatedNode) -> AsyncIterator[Tenants]:
    """A's things are named after the canary; B has a key and nothing else."""
    secrets = {}
    for tenant in ("a", "b"):
        key, secrets[tenant] = await ledger.keys.add(tenant, "test")
    async with run_gateway(ledger, mesh_token=TOKEN) as running:
        await node.turn("a", CANARY, f"{CANARY} is the word")
        headers = {"Authorization": f"Bearer {secrets['a']}"}
        client = running.client
        body = {"type": "echo", "payload": {"text": CANARY}, "thread_id": CANARY}
        intent = (await client.post("/intent", json=body, headers=headers)).json()
        await client.put(f"/threads/{CANARY}/pins/k", json={"text": CANARY}, headers=headers)
        await client.put("/threads", json={"channel": "mail", "external_id": CANARY}, headers=headers)
        ids = {"intent_id": intent["intent_id"], "thread_id": CANARY, "key": "k"}
        ids |= {"node_id": node.node_id, "key_id": key.key_id}
        yield Tenants(running, secrets, ids)


def _calls(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method, path) for path, calls in document["paths"].items() for method in calls}


async def test_every_call_keeps_tenants_apart(tenants: Tenants) -> None:
    """Each call of the OpenAPI document stands in the table above and does what it says there."""
    document = tenants.running.document()
    assert _calls(document) == set(EXPECTED), "a new call needs a line in EXPECTED"
    # First what must not exist for B: later calls make things of his own under A's names.
    for (method, path), expected in sorted(EXPECTED.items(), key=lambda line: line[1] != "404"):
        response = await tenants.call("b", method, path)
        where = f"{method} {path}: {response.status_code} {response.text[:300]}"
        match expected:
            case "404":
                assert (response.status_code, response.json()["code"]) == (404, "not_found"), where
            case "own":
                assert response.status_code in {200, 201, 202}, where
                assert "is the word" not in response.text, where
                assert tenants.ids["intent_id"] not in response.text, where
            case "operator":
                assert (response.status_code, response.json()["code"]) == (403, "forbidden"), where
            case _:
                assert response.status_code == 200, where
                assert CANARY not in response.text, where


async def test_equal_thread_ids_are_two_threads(tenants: Tenants) -> None:
    """B may use A's thread id: it is another thread, counted from one."""
    mine = (await tenants.call("b", "post", "/intent")).json()
    assert (mine["thread_id"], mine["seq"]) == (CANARY, 1)
    assert (await tenants.call("b", "get", "/threads/{thread_id}")).json()["turn_count"] == 0
    assert (await tenants.call("a", "get", "/threads/{thread_id}")).json()["turn_count"] == 1


async def test_a_sees_its_own_in_every_call(tenants: Tenants) -> None:
    """The 404s above are B's alone."""
    for (method, path), expected in EXPECTED.items():
        if expected == "404" and method == "get" and not path.endswith("/events"):
            assert (await tenants.call("a", method, path)).status_code == 200, path


async def test_every_call_but_health_needs_a_key(tenants: Tenants) -> None:
    """401 with the scheme, for no key, a wrong one and a malformed one; the document and its page too."""
    paths = [*EXPECTED, ("get", "/openapi.json"), ("get", "/docs")]
    for method, path in paths:
        response = await tenants.call(None, method, path)
        if path in {"/healthz", "/readyz"}:
            assert response.status_code == 200
        else:
            assert (response.status_code, response.json()["code"]) == (401, "unauthorized"), path
            assert response.headers["www-authenticate"].startswith("Bearer")
    for header in ("Bearer wrong", "Basic YTpi", "bearer", "Bearer \u00e9"):
        response = await tenants.running.client.get("/intents", headers={"Authorization": header.encode("latin-1")})
        assert response.status_code == 401, header


async def test_body_of_an_unknown_caller_is_not_read(tenants: Tenants) -> None:
    """401 comes before anything else about the request is looked at."""
    response = await tenants.running.client.post("/intent?nonsense=1", content=b"{")
    assert response.status_code == 401


async def test_same_idempotency_key_of_two_tenants_is_two_intents(tenants: Tenants) -> None:
    """A key is unique for each tenant."""
    ids = set()
    for tenant in ("a", "b"):
        headers = {"Authorization": f"Bearer {tenants._secrets[tenant]}", "Idempotency-Key": "same"}
        body = {"type": "echo", "payload": {"text": "x"}}
        response = await tenants.running.client.post("/intent", json=body, headers=headers)
        assert "idempotency-replayed" not in response.headers
        ids.add(response.json()["intent_id"])
    assert len(ids) == 2


async def test_operator_keeps_keys(tenants: Tenants) -> None:
    """With the mesh token: make, use, list without secrets, revoke; a revoked key is useless at once."""
    client = tenants.running.client
    operator = {"Authorization": f"Bearer {TOKEN}"}
    made = await client.post("/admin/keys", json={"tenant_id": "c", "label": "laptop"}, headers=operator)
    assert made.status_code == 201
    key = {"Authorization": f"Bearer {made.json()['secret']}"}
    assert (await client.get("/intents", headers=key)).status_code == 200
    listed = (await client.get("/admin/keys", headers=operator)).json()["items"]
    assert {item["tenant_id"] for item in listed} == {"a", "b", "c"}
    assert made.json()["secret"] not in str(listed)
    gone = await client.delete(f"/admin/keys/{made.json()['key_id']}", headers=operator)
    assert gone.json()["revoked_at"] is not None
    assert (await client.get("/intents", headers=key)).status_code == 401
    for wrong in ("a b", "", "x" * 65, "\u00e9"):
        assert (await client.post("/admin/keys", json={"tenant_id": wrong}, headers=operator)).status_code == 422


async def test_mesh_stays_locked_when_all_keys_are_revoked(ledger: Ledger) -> None:
    """Revoking the last key does not open the door."""
    key, _ = await ledger.keys.add("a", "test")
    await ledger.keys.revoke(key.key_id)
    async with run_gateway(ledger, mesh_token=TOKEN) as running:
        assert (await running.client.get("/intents")).status_code == 401


async def test_locked_gateway_needs_keys_before_there_is_one(ledger: Ledger) -> None:
    """access locked: the mesh token alone gets in, and makes the first key."""
    async with run_gateway(ledger, access="locked", mesh_token=TOKEN) as running:
        assert (await running.client.get("/intents")).status_code == 401
        operator = {"Authorization": f"Bearer {TOKEN}"}
        assert (await running.client.post("/admin/keys", json={}, headers=operator)).status_code == 201


async def test_without_keys_the_token_still_guards_keys(ledger: Ledger) -> None:
    """On an open loopback gateway nobody makes a key without the mesh token, which locks the others out."""
    async with run_gateway(ledger, mesh_token=TOKEN) as running:
        assert (await running.client.get("/nodes")).status_code == 200
        assert (await running.client.post("/admin/keys", json={})).status_code == 403
        operator = {"Authorization": f"Bearer {TOKEN}"}
        assert (await running.client.post("/admin/keys", json={}, headers=operator)).status_code == 201
        assert (await running.client.get("/nodes")).status_code == 401


def test_echo_is_a_capability_for_everybody() -> None:
    """The table's `mesh` lines rest on this: templates hold nothing of a tenant."""
    assert CANARY not in ECHO.model_dump_json()
