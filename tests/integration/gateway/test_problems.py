"""Whatever is wrong, the answer is a problem document with a 4xx status, and the gateway stands."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.running_gateway import RunningGateway, open_sqlite_ledger

from ledger.ledger import Ledger

JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    """SQLite is enough here: nothing of this reaches the database."""
    async with open_sqlite_ledger(tmp_path) as ledger:
        yield ledger


def _intent(payload: str) -> bytes:
    return b'{"type":"echo","payload":%s}' % payload.encode()


HOSTILE = {
    "no JSON": (b"{", 400),
    "nothing": (b"", 422),
    "white space": (b"  \n", 422),
    "a number": (b"1", 422),
    "an array": (b"[]", 422),
    "null": (b"null", 422),
    "NaN": (_intent('{"text":NaN}'), 400),
    "a NaN payload": (_intent("NaN"), 400),
    "Infinity": (_intent('{"text":-Infinity}'), 400),
    "a number beyond floats": (_intent('{"text":1e999}'), 400),
    "an integer of 65 bits": (_intent('{"text":18446744073709551616}'), 400),
    "an integer of 10,000 digits": (_intent('{"text":' + "9" * 10_000 + "}"), 400),
    "a lone surrogate": (_intent('{"text":"a\\ud800b"}'), 422),
    "a lone surrogate as key": (_intent('{"text":"x","\\udc00":1}'), 422),
    "an escaped NUL": (_intent('{"text":"what\\u0000"}'), 422),
    "a raw NUL": (_intent('{"text":"what\x00"}'), 400),
    "bad UTF-8": (b'{"type":"echo","payload":{"text":"\xff"}}', 400),
    "UTF-16": ('{"type":"echo","payload":{"text":"x"}}'.encode("utf-16"), 400),
    "500 nested arrays": (_intent('{"text":"x","deep":' + "[" * 500 + "]" * 500 + "}"), 400),
    "20,000 nested arrays": (_intent('{"text":"x","deep":' + "[" * 20_000 + "]" * 20_000 + "}"), 400),
    "20,000 open braces": (b'{"a":' * 20_000, 400),
    "a key twice": (b'{"type":"echo","type":"echo","payload":{"text":"x"}}', 422),
    "a nested key twice": (_intent('{"text":"x","text":"y"}'), 422),
    "something behind it": (_intent('{"text":"x"}') + b"{}", 400),
}


WRONG_CALLS = [
    ("GET", "/nowhere", 404),
    ("GET", "/intents/", 404),
    ("POST", "/", 404),
    ("GET", "/intent", 405),
    ("DELETE", "/intents", 405),
    ("PATCH", "/threads/x/pins/y", 405),
    ("OPTIONS", "/intent", 405),
    ("GET", "/intents?limit=0", 422),
    ("GET", "/intents?limit=x", 422),
    ("GET", "/intents?limit=201", 422),
    ("GET", "/intents?status=unknown", 422),
    ("GET", "/intents?stauts=dead", 422),
    ("GET", "/intents?limit=1&limit=2", 422),
    ("GET", "/intents?cursor=nonsense", 422),
    ("GET", "/threads?cursor=%F0%9F%98%80", 422),
    ("GET", "/intents/%00", 422),
    ("GET", "/intents/%ff", 422),
    ("GET", "/intents?type=%00", 422),
    ("GET", "/intents?type=%c3%28", 422),
    ("GET", "/intents/" + "x" * 200, 422),
    ("GET", "/intents/none", 404),
    ("POST", "/intents/none/cancel", 404),
    ("POST", "/intents/none/replay", 404),
    ("GET", "/threads/none", 404),
    ("GET", "/threads/none/turns", 404),
    ("GET", "/threads/none/context", 404),
    ("GET", "/threads/none/pins", 404),
    ("GET", "/threads/none/pins/k", 404),
    ("DELETE", "/threads/none/pins/k", 404),
    ("DELETE", "/threads/none", 404),
    ("POST", "/nodes/none/drain", 404),
    ("DELETE", "/admin/keys/none", 403),
    ("GET", "/threads/none/context?max_tokens=0", 422),
    ("GET", "/threads/none/events?after=-1", 422),
    ("GET", "/threads/none/events?after=99999999999999999999", 422),
]


async def test_hostile_bodies_are_refused(running: RunningGateway) -> None:
    """4xx with code, detail and hint; nothing is stored; the next call is served."""
    for kind, (body, status) in HOSTILE.items():
        response = await running.client.post("/intent", content=body, headers=JSON)
        assert response.status_code == status, (kind, response.text)
        assert response.headers["content-type"] == "application/problem+json"
        problem = response.json()
        assert problem["code"] in {"invalid_json", "invalid_request"}, kind
        assert problem["detail"]
        assert problem["hint"], kind
        assert len(response.content) < 4000, kind
    assert (await running.client.get("/intents")).json()["items"] == []


async def test_value_that_cannot_be_kept_is_named(running: RunningGateway) -> None:
    """A surrogate or NUL deep in the payload comes back as its path."""
    body = b'{"type":"echo","payload":{"text":"x","list":[1,{"deep":"a\\u0000"}]}}'
    problem = (await running.client.post("/intent", content=body, headers=JSON)).json()
    assert problem["field"] == "payload.list[1].deep"


async def test_depth_of_64_is_still_fine(running: RunningGateway) -> None:
    """The limit counts from the outermost object."""
    body = _intent('{"text":"x","deep":' + "[" * 62 + "]" * 62 + "}")
    assert (await running.client.post("/intent", content=body, headers=JSON)).status_code == 202


async def test_only_json_is_read(running: RunningGateway) -> None:
    """Anything else is 415 and says which header to send."""
    for headers, status in (
        ({}, 415),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json; charset=utf-16"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
        ({"Content-Type": "APPLICATION/JSON; charset=UTF-8"}, 202),
    ):
        response = await running.client.post("/intent", content=_intent('{"text":"x"}'), headers=headers)
        assert response.status_code == status, headers


async def test_wrong_calls_are_problems(running: RunningGateway) -> None:
    """Unknown paths, methods, parameters and ids: the same shape everywhere."""
    for method, path, status in WRONG_CALLS:
        response = await running.client.request(method, path)
        assert response.status_code == status, (method, path, response.text)
        assert response.headers["content-type"] == "application/problem+json", (method, path)
        assert {"type", "title", "status", "code", "detail"} <= set(response.json())
        assert response.json()["status"] == status


async def test_wrong_wait_is_refused_before_anything_is_stored(running: RunningGateway) -> None:
    """A wait that cannot be kept is no reason to submit."""
    for wait in ("nan", "inf", "-1", "1e9", "x", "", "301"):
        response = await running.client.post(f"/intent?wait={wait}", json={"type": "echo", "payload": {"text": "x"}})
        assert (response.status_code, response.json()["field"]) == (422, "query.wait"), wait
    assert (await running.client.get("/intents")).json()["items"] == []


async def test_405_names_every_method_of_the_path(running: RunningGateway) -> None:
    """Also where several routes share it."""
    response = await running.client.patch("/threads/x/pins/y")
    assert response.headers["allow"] == "DELETE, GET, PUT"


async def test_several_mistakes_come_back_at_once(running: RunningGateway) -> None:
    """`field` is the first, `errors` are all; no value is echoed."""
    body = {"type": "echo", "payload": {"text": "x"}, "priority": "canary-high", "budget": -1, "paylod": 1}
    problem = (await running.client.post("/intent", json=body)).json()
    assert {mistake["field"] for mistake in problem["errors"]} == {"priority", "budget", "paylod"}
    assert "did you mean 'payload'" in json.dumps(problem["errors"])
    assert "canary-high" not in json.dumps(problem)


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"payload": "x"}, "payload", "a JSON object is required"),
        ({"type": "Echo"}, "type", "a-z, 0-9, _ and -"),
        ({"thread_id": 5}, "thread_id", "text is required"),
        ({"not_before": "tomorrow"}, "not_before", "RFC 3339"),
        ({"deadline": "2026-01-31T12:00:00"}, "deadline", "time zone"),
        ({"parent_intent_id": "none"}, "parent_intent_id", "there is no intent 'none'"),
    ],
)
async def test_a_mistake_is_said_in_plain_words(
    running: RunningGateway, change: dict[str, object], field: str, said: str
) -> None:
    """What is required, and an example where that helps; no pattern and no name of a Python type."""
    body = {"type": "echo", "payload": {"text": "x"}} | change
    problem = (await running.client.post("/intent", json=body)).json()
    assert problem["field"] == field
    assert said in problem["detail"]
    assert "pattern" not in problem["detail"]


async def test_hints_name_paths_that_exist(running: RunningGateway) -> None:
    """A thing that is not there is listed somewhere: the hint says where."""
    await running.client.put("/threads/t/pins/k", json={"text": "x"})
    message = {"role": "user", "content": "x"}
    await running.client.post("/threads/t/messages", json={"messages": [message]})
    hint = (await running.client.get("/threads/t/pins/none")).json()["hint"]
    assert (await running.client.get(hint.rpartition("GET ")[2])).status_code == 200


async def test_answers_are_never_cached_nor_sniffed(running: RunningGateway) -> None:
    """And each carries the id under which the log knows it."""
    headers = (await running.client.get("/intents")).headers
    assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")
    assert headers["x-request-id"]
