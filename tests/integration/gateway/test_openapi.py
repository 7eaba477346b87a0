"""The document describes what is served: bodies, answers and the one shape of errors."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from support.running_gateway import RunningGateway, SimulatedNode, open_sqlite_ledger

from ledger.ledger import Ledger

PROBLEM = {"$ref": "#/components/schemas/Problem"}


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    """SQLite is enough here: none of this depends on the database."""
    async with open_sqlite_ledger(tmp_path) as ledger:
        yield ledger


async def _document(running: RunningGateway) -> dict[str, Any]:
    response = await running.client.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    return response.json()


def _check(document: dict[str, Any], schema: dict[str, Any], response: httpx.Response) -> None:
    Draft202012Validator({**schema, "components": document["components"]}).validate(response.json())


async def test_every_call_describes_its_errors(running: RunningGateway) -> None:
    """As application/problem+json, and never as the framework's own shape."""
    document = await _document(running)
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            for status in ("4XX", "5XX"):
                assert call["responses"][status]["content"] == {"application/problem+json": {"schema": PROBLEM}}
            assert "422" not in call["responses"], (method, path)
            assert call["summary"]
            assert call["description"]
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert set(document["components"]["schemas"]["Problem"]["required"]) == {
        "type",
        "title",
        "status",
        "code",
        "detail",
    }


async def test_every_reference_leads_somewhere(running: RunningGateway) -> None:
    """No schema is named that is not there, and each is a JSON Schema."""
    document = await _document(running)
    stack: list[Any] = [document]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if isinstance(target := item.get("$ref"), str):
                assert target.removeprefix("#/components/schemas/") in document["components"]["schemas"], target
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


async def test_bodies_are_described(running: RunningGateway) -> None:
    """Every call that reads a body says so, as JSON and required."""
    document = await _document(running)
    with_body = {
        (method, path)
        for path, calls in document["paths"].items()
        for method, call in calls.items()
        if "requestBody" in call
    }
    assert with_body == {
        ("post", "/intent"),
        ("put", "/threads"),
        ("post", "/threads/{thread_id}/messages"),
        ("post", "/threads/{thread_id}/context:explain"),
        ("put", "/threads/{thread_id}/pins/{key}"),
        ("post", "/admin/keys"),
    }
    for method, path in with_body:
        body = document["paths"][path][method]["requestBody"]
        assert (body["required"], list(body["content"])) == (True, ["application/json"])


async def test_submission_describes_both_answers_and_the_stream(running: RunningGateway) -> None:
    """202 and 200 have their own shapes; 200 is a stream too."""
    responses = (await _document(running))["paths"]["/intent"]["post"]["responses"]
    assert responses["202"]["content"]["application/json"]["schema"]["$ref"].endswith("/Accepted")
    assert responses["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/Finished")
    assert "text/event-stream" in responses["200"]["content"]
    assert "Idempotency-Replayed" in responses["202"]["headers"]


async def test_answers_fit_their_description(running: RunningGateway, node: SimulatedNode) -> None:
    """What is sent validates against what is promised, success and refusal alike."""
    document = await _document(running)
    await node.turn("local", "t", "hello")
    for path, url in {
        "/intents": "/intents",
        "/threads": "/threads",
        "/threads/{thread_id}": "/threads/t",
        "/threads/{thread_id}/turns": "/threads/t/turns",
        "/threads/{thread_id}/context": "/threads/t/context",
        "/threads/{thread_id}/pins": "/threads/t/pins",
        "/capabilities": "/capabilities",
        "/nodes": "/nodes",
        "/healthz": "/healthz",
        "/readyz": "/readyz",
    }.items():
        response = await running.client.get(url)
        assert response.status_code == 200, url
        _check(
            document,
            document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"],
            response,
        )
    for url in ("/nowhere", "/intents/none", "/intents?limit=x"):
        _check(document, PROBLEM, await running.client.get(url))


async def test_page_for_people_needs_nothing_from_elsewhere(running: RunningGateway) -> None:
    """Every call is on it, and no other host is asked for anything."""
    response = await running.client.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    for path in (await _document(running))["paths"]:
        assert path in response.text
    assert "src=" not in response.text
    assert "http://" not in response.text
    assert "https://" not in response.text
