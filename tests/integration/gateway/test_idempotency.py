"""The same Idempotency-Key and body are one intent, whoever sends them how often."""

import asyncio

import pytest
from support.running_gateway import RunningGateway, SimulatedNode

BODY = {"type": "echo", "payload": {"text": "once", "parts": [1, 2]}}


async def test_fifty_parallel_submissions_are_one_intent(running: RunningGateway) -> None:
    """One is made; all others are told that they are replays."""
    headers = {"Idempotency-Key": "k1"}
    answers = await asyncio.gather(*(running.client.post("/intent", json=BODY, headers=headers) for _ in range(50)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["intent_id"] for answer in answers}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
    assert len((await running.client.get("/intents")).json()["items"]) == 1


async def test_other_body_under_the_same_key_is_a_conflict(running: RunningGateway) -> None:
    """409, and the first intent stays as it is."""
    headers = {"Idempotency-Key": "k2"}
    first = await running.client.post("/intent", json=BODY, headers=headers)
    other = await running.client.post("/intent", json={**BODY, "priority": 1}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")
    again = await running.client.post("/intent", json=BODY, headers=headers)
    assert again.json()["intent_id"] == first.json()["intent_id"]


async def test_order_of_members_and_white_space_do_not_matter(running: RunningGateway) -> None:
    """The canonical value counts, not its bytes."""
    headers = {"Idempotency-Key": "k3", "Content-Type": "application/json"}
    texts = ('{"type":"echo","payload":{"text":"a"}}', ' {"payload" : {"text":"\\u0061"}, "type":"echo"} ')
    answers = [await running.client.post("/intent", content=text, headers=headers) for text in texts]
    assert answers[0].json()["intent_id"] == answers[1].json()["intent_id"]
    assert answers[1].headers["idempotency-replayed"] == "true"


async def test_replay_of_a_finished_intent_answers_with_its_outcome(
    running: RunningGateway, node: SimulatedNode
) -> None:
    """200 in the same shape as a wait that saw the end."""
    headers = {"Idempotency-Key": "k4"}
    first = await running.client.post("/intent", json=BODY, headers=headers)
    await node.run(first.json()["intent_id"])
    again = await running.client.post("/intent", json=BODY, headers=headers)
    assert (again.status_code, again.headers["idempotency-replayed"]) == (200, "true")
    assert (again.json()["status"], again.json()["result"]) == ("succeeded", BODY["payload"])


async def test_replay_waits_like_the_first_call(running: RunningGateway, node: SimulatedNode) -> None:
    """A client that lost its answer asks again with the same key and gets the outcome."""
    headers = {"Idempotency-Key": "k5"}
    first = await running.client.post("/intent", json=BODY, headers=headers)
    asking = asyncio.create_task(running.client.post("/intent?wait=10", json=BODY, headers=headers))
    await node.run(first.json()["intent_id"])
    assert (await asking).status_code == 200


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\u00e9"])
async def test_key_that_cannot_be_kept_is_refused(running: RunningGateway, key: str) -> None:
    """Empty, too long or beyond ASCII: 422 that names the header."""
    response = await running.client.post("/intent", json=BODY, headers={"Idempotency-Key": key.encode("latin-1")})
    assert response.status_code == 422
    assert "idempotency" in response.json()["field"].lower()
