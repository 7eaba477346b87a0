"""POST /intent and its sisters over a real socket and a real database."""

import asyncio
import time
from contextlib import suppress
from typing import Any

from support.running_gateway import RunningGateway, SimulatedNode

from mesh.contract.errors import Cause


async def test_submission_is_accepted_with_its_place(running: RunningGateway) -> None:
    """202 with ids, status, seq and links; the Location leads to the intent."""
    response = await running.client.post("/intent", json={"type": "echo", "payload": {"text": "hi"}})
    body = response.json()
    assert response.status_code == 202
    assert set(body) == {"intent_id", "thread_id", "status", "seq", "links"}
    assert (body["status"], body["seq"]) == ("ready", 1)
    shown = (await running.client.get(response.headers["location"])).json()
    assert (shown["intent_id"], shown["payload"], shown["status"]) == (body["intent_id"], {"text": "hi"}, "ready")
    for link in body["links"].values():
        assert link.startswith("/")


async def test_second_intent_of_a_thread_waits_behind_the_first(running: RunningGateway) -> None:
    """seq counts in accept order; only the head is ready."""
    first = await running.submit(thread_id="t")
    second = await running.submit(thread_id="t")
    assert [(i["status"], i["seq"]) for i in (first, second)] == [("ready", 1), ("accepted", 2)]


async def test_wait_answers_with_the_outcome(running: RunningGateway, node: SimulatedNode) -> None:
    """200 with result, turn number and usage as soon as the result is committed."""
    asking = asyncio.create_task(
        running.client.post(
            "/intent", params={"wait": 10}, json={"type": "echo", "payload": {"text": "hi"}, "thread_id": "w"}
        )
    )
    intent_id = await _first_intent(running)
    await node.run(intent_id)
    started = time.monotonic()
    response = await asking
    assert time.monotonic() - started < 1
    body = response.json()
    assert response.status_code == 200
    assert set(body) == {
        *("intent_id", "thread_id", "status", "seq", "links"),
        *("result", "error", "turn_number", "usage"),
    }
    assert (body["status"], body["result"], body["turn_number"]) == ("succeeded", {"text": "hi"}, 1)
    assert body["error"] is None
    assert body["usage"]["model_calls"] == 0


async def test_wait_answers_with_a_failure(running: RunningGateway, node: SimulatedNode) -> None:
    """A failed intent is an answer too: 200 with the error."""
    asking = asyncio.create_task(
        running.client.post("/intent?wait=10", json={"type": "echo", "payload": {"text": "hi"}})
    )
    claim = await node.claim(await _first_intent(running))
    await node.fail(claim, Cause.HANDLER_REFUSED)
    body = (await asking).json()
    assert body["status"] in {"failed", "dead"}
    assert body["error"]["code"] == "handler_refused"
    assert body["result"] is None


async def test_wait_that_is_too_short_is_202(running: RunningGateway) -> None:
    """The intent lives on."""
    started = time.monotonic()
    response = await running.client.post("/intent?wait=0.3", json={"type": "echo", "payload": {"text": "hi"}})
    assert response.status_code == 202
    assert 0.25 < time.monotonic() - started < 2
    assert set(response.json()) == {"intent_id", "thread_id", "status", "seq", "links"}


async def test_list_is_filtered_and_paged(running: RunningGateway, node: SimulatedNode) -> None:
    """Newest first, by status, type and thread; `next` leads through all of them once."""
    ids = [(await running.submit(thread_id=f"t{n}"))["intent_id"] for n in range(5)]
    await node.run(ids[0])
    seen: list[str] = []
    params: dict[str, str] = {"limit": "2"}
    while True:
        page = (await running.client.get("/intents", params=params)).json()
        assert set(page) == {"items", "next"}
        seen += [item["intent_id"] for item in page["items"]]
        if page["next"] is None:
            break
        params["cursor"] = page["next"]
    assert seen == ids[::-1]
    for query, expected in (("status=succeeded", ids[:1]), ("thread_id=t3", [ids[3]]), ("type=chat", [])):
        page = (await running.client.get(f"/intents?{query}")).json()
        assert [item["intent_id"] for item in page["items"]] == expected


async def test_cancel_says_what_it_did(running: RunningGateway, node: SimulatedNode) -> None:
    """At once while nobody runs it, as a request while a node does, 409 with the state afterwards."""
    waiting = (await running.submit())["intent_id"]
    assert (await running.client.post(f"/intents/{waiting}/cancel")).json() == {"status": "cancelled"}
    again = await running.client.post(f"/intents/{waiting}/cancel")
    assert (again.status_code, again.json()["code"], again.json()["state"]) == (409, "already_terminal", "cancelled")
    held = (await running.submit())["intent_id"]
    await node.claim(held)
    assert (await running.client.post(f"/intents/{held}/cancel")).json() == {"status": "cancel_requested"}


async def test_replay_queues_a_failed_intent_again(running: RunningGateway, node: SimulatedNode) -> None:
    """The same intent at the end of its thread; one that did not fail is 409 with its state."""
    intent = await running.submit(thread_id="r")
    early = await running.client.post(f"/intents/{intent['intent_id']}/replay")
    assert (early.status_code, early.json()["code"]) == (409, "not_replayable")
    await node.fail(await node.claim(intent["intent_id"]))
    replayed = await running.client.post(f"/intents/{intent['intent_id']}/replay")
    assert replayed.status_code == 202
    assert replayed.json()["intent_id"] == intent["intent_id"]
    assert replayed.json()["seq"] > intent["seq"]
    await node.run(intent["intent_id"])
    shown = (await running.client.get(f"/intents/{intent['intent_id']}")).json()
    assert (shown["status"], len(shown["attempts"])) == ("succeeded", 2)


async def test_busy_thread_is_refused_when_asked_to(running: RunningGateway) -> None:
    """on_busy reject: 409 with Retry-After."""
    await running.submit(thread_id="b")
    response = await running.client.post(
        "/intent", json={"type": "echo", "payload": {"text": "x"}, "thread_id": "b", "on_busy": "reject"}
    )
    assert (response.status_code, response.json()["code"]) == (409, "thread_busy")
    assert int(response.headers["retry-after"]) >= 1


async def test_passed_deadline_is_refused(running: RunningGateway) -> None:
    """422, and nothing is stored."""
    response = await running.client.post(
        "/intent", json={"type": "echo", "payload": {"text": "x"}, "deadline": "2001-01-01T00:00:00Z"}
    )
    assert (response.status_code, response.json()["code"]) == (422, "deadline_passed")
    assert (await running.client.get("/intents")).json()["items"] == []


WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"type": "echo", "payload": {"text": 1}}, "payload.text"),
    ({"type": "echo", "payload": {"text": "x", "parts": [1, "two"]}}, "payload.parts[1]"),
    ({"type": "echo", "payload": {}}, "payload"),
    ({"type": "ecko", "payload": {}}, "type"),
    ({"type": "Echo!", "payload": {}}, "type"),
    ({"type": "echo"}, "payload"),
    ({"type": "echo", "payload": []}, "payload"),
    ({"type": "echo", "payload": {"text": "x"}, "budgt": 1}, "budgt"),
    ({"type": "echo", "payload": {"text": "x"}, "priority": "1"}, "priority"),
    ({"type": "echo", "payload": {"text": "x"}, "priority": 1000}, "priority"),
    ({"type": "echo", "payload": {"text": "x"}, "thread_id": "a b"}, "thread_id"),
    ({"type": "echo", "payload": {"text": "x"}, "thread_id": ""}, "thread_id"),
    ({"type": "echo", "payload": {"text": "x"}, "not_before": 1700000000}, "not_before"),
    ({"type": "echo", "payload": {"text": "x"}, "deadline": "2026-01-01T00:00:00"}, "deadline"),
    ({"type": "echo", "payload": {"text": "x"}, "on_busy": "panic"}, "on_busy"),
]


async def test_wrong_field_is_named(running: RunningGateway) -> None:
    """422 with the path of what is wrong, and nothing is stored."""
    for body, field in WRONG_FIELDS:
        response = await running.client.post("/intent", json=body)
        assert (response.status_code, response.json()["field"]) == (422, field), body
    assert (await running.client.get("/intents")).json()["items"] == []


async def test_client_that_goes_away_leaves_the_intent_alone(running: RunningGateway, node: SimulatedNode) -> None:
    """Cut off while it waits or streams, the client changes nothing: the intent ends as it would have."""
    body = b'{"type":"echo","payload":{"text":"gone"}}'
    for number in range(10):
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        accept = b"text/event-stream" if number % 2 else b"application/json"
        writer.write(
            b"POST /intent?wait=30 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nAccept: "
            + accept
            + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        await writer.drain()
        await asyncio.sleep(number * 0.004)
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()
    async with asyncio.timeout(10):
        while running.gateway.requests._open or running.gateway.streams._open:
            await asyncio.sleep(0.02)
    intents = (await running.client.get("/intents?limit=200")).json()["items"]
    assert {item["status"] for item in intents} <= {"ready"}
    for item in intents:
        await node.run(item["intent_id"])
    done = (await running.client.get("/intents?status=succeeded")).json()["items"]
    assert len(done) == len(intents) > 0


async def _first_intent(running: RunningGateway) -> str:
    async with asyncio.timeout(10):
        while True:
            items = (await running.client.get("/intents")).json()["items"]
            if items:
                return str(items[0]["intent_id"])
            await asyncio.sleep(0.01)
