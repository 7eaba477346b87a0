"""Health, metrics, and what the gateway says while its database is gone."""

import asyncio

import pytest
from structlog.testing import capture_logs
from support.running_gateway import RunningGateway, SimulatedNode, parse_stream, run_gateway

from ledger.ledger import Ledger
from mesh.contract.errors import unavailable


class _DeadBackplane:
    """A Redis that is configured and does not answer."""

    is_up = False

    async def ping(self) -> bool:
        return False


async def test_ready_gateway_is_green(running: RunningGateway) -> None:
    """Both parts are named."""
    assert (await running.client.get("/healthz")).json() == {"status": "ok"}
    ready = await running.client.get("/readyz")
    assert (ready.status_code, ready.json()["checks"]) == (200, {"ledger": "ok", "backplane": "off"})


async def test_gateway_goes_red_while_the_database_is_gone(
    running: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 as a problem that names the part; alive all the same; green again when it is back."""

    async def gone(*_: object, **__: object) -> None:
        raise unavailable("the database does not answer")

    with monkeypatch.context() as patch:
        for part, name in ((running.ledger, "ping"), (running.ledger.keys, "has_any")):
            patch.setattr(part, name, gone)
        red = await running.client.get("/readyz")
        assert (red.status_code, red.json()["checks"]["ledger"]) == (503, "down")
        assert "INTENTMESH_DATABASE_URL" in red.json()["hint"]
        assert red.headers["content-type"] == "application/problem+json"
        assert int(red.headers["retry-after"]) >= 1
        assert (await running.client.get("/healthz")).status_code == 200
        refused = await running.client.post("/intent", json={"type": "echo", "payload": {"text": "x"}})
        assert (refused.status_code, refused.json()["code"]) == (503, "unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["retryable"] is True
    assert (await running.client.get("/readyz")).status_code == 200


async def test_check_that_hangs_is_red(running: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two seconds, not never."""

    async def hang() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(running.ledger, "ping", hang)
    assert (await running.client.get("/readyz")).status_code == 503


async def test_database_that_goes_while_a_client_waits_is_no_error(
    running: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The intent is durable: 202, not 503."""

    async def gone(*_: object) -> None:
        raise unavailable("the database does not answer")

    monkeypatch.setattr(running.ledger.intents, "get", gone)
    response = await running.client.post("/intent?wait=0.5", json={"type": "echo", "payload": {"text": "x"}})
    assert response.status_code == 202


async def test_stream_survives_a_database_that_goes_and_comes(
    running: RunningGateway, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a gap or a repeat."""
    intent = await running.submit()
    real = running.ledger.events.after
    failures = iter([True] * 3)

    async def flaky(*args: object, **named: object) -> object:
        if next(failures, False):
            raise unavailable("the database does not answer")
        return await real(*args, **named)

    await node.run(intent["intent_id"])
    monkeypatch.setattr(running.ledger.events, "after", flaky)
    events = parse_stream((await running.client.get(f"/intents/{intent['intent_id']}/events")).text)
    numbers = [int(event["id"]) for event in events]
    assert numbers == sorted(set(numbers))
    assert "result.committed" in [event["event"] for event in events]


@pytest.mark.parametrize(("ready_needs_redis", "status"), [(True, 503), (False, 200)])
async def test_redis_that_is_configured_and_gone_is_said(ledger: Ledger, ready_needs_redis: bool, status: int) -> None:
    """Readiness goes red unless told otherwise; calls are served in either case."""
    async with run_gateway(ledger, ready_needs_redis=ready_needs_redis) as running:
        running.gateway.backplane = _DeadBackplane()  # type: ignore[assignment]
        ready = await running.client.get("/readyz")
        assert (ready.status_code, ready.json()["checks"]["backplane"]) == (status, "down")
        assert (await running.client.get("/intents")).status_code == 200


async def test_bug_is_a_problem_without_its_text(running: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 shows the id under which the log has it, and nothing of the error itself."""

    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("canary-secret")

    monkeypatch.setattr(running.ledger.intents, "list", broken)
    with capture_logs() as entries:
        response = await running.client.get("/intents")
    assert (response.status_code, response.json()["code"]) == (500, "internal")
    assert [(entry["event"], entry["route"]) for entry in entries] == [("request_failed", "/intents")]
    assert "canary-secret" not in response.text
    assert response.headers["x-request-id"] in response.json()["hint"]


async def test_metrics_count_by_route(running: RunningGateway) -> None:
    """Routes are templates and unknown paths are one label, so that their number is bounded."""
    await running.submit()
    await running.client.get("/intents/one-of-a-million")
    await running.client.get("/nowhere-canary")
    text = (await running.client.get("/metrics")).text
    assert 'route="/intents/{intent_id}",status="404"' in text
    assert "intentmesh_intents_submitted_total" in text
    assert 'route="unmatched"' in text
    assert "canary" not in text
    assert "one-of-a-million" not in text
