"""Threads, turns, pins, imports, context and erasing over HTTP."""

from support.running_gateway import RunningGateway, SimulatedNode


async def test_owner_gets_the_same_thread_again(running: RunningGateway) -> None:
    """201 when it is made, 200 with the same id afterwards."""
    owner = {"channel": "mail", "external_id": "42", "url": "https://example.org/42", "title": "Order 42"}
    first = await running.client.put("/threads", json=owner)
    again = await running.client.put("/threads", json=owner)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["thread_id"] == again.json()["thread_id"]
    shown = (await running.client.get(first.headers["location"])).json()
    assert (shown["channel"], shown["external_id"], shown["title"]) == ("mail", "42", "Order 42")


async def test_thread_shows_its_state_and_turns(running: RunningGateway, node: SimulatedNode) -> None:
    """Counts, status and the raw turns, oldest first and paged."""
    for number in range(3):
        await node.turn("local", "t", f"message {number}")
    shown = (await running.client.get("/threads/t")).json()
    assert (shown["turn_count"], shown["message_count"], shown["status"]) == (3, 6, "idle")
    page = (await running.client.get("/threads/t/turns?limit=2")).json()
    assert [turn["turn_number"] for turn in page["items"]] == [1, 2]
    rest = (await running.client.get("/threads/t/turns", params={"cursor": page["next"]})).json()
    assert ([turn["turn_number"] for turn in rest["items"]], rest["next"]) == ([3], None)
    assert [message["role"] for message in rest["items"][0]["messages"]] == ["user", "assistant"]
    listed = (await running.client.get("/threads")).json()["items"]
    assert [thread["thread_id"] for thread in listed] == ["t"]


async def test_import_is_repeatable(running: RunningGateway) -> None:
    """A thread that did not exist is made; known ids are skipped."""
    messages = [
        {"role": "user", "content": "My name is Ada", "id": "1", "at": "2026-01-01T10:00:00Z", "name": "ada"},
        {"role": "assistant", "content": "Hello Ada", "id": "2"},
    ]
    first = await running.client.post("/threads/new/messages", json={"messages": messages})
    assert first.json() == {"imported": 2, "skipped": 0, "turn_count": 1}
    again = await running.client.post("/threads/new/messages", json={"messages": messages})
    assert again.json() == {"imported": 0, "skipped": 2, "turn_count": 1}


WRONG_IMPORTS: list[tuple[list[dict[str, str]], str]] = [
    ([], "messages"),
    ([{"role": "user", "content": "x"}] * 201, "messages"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": "x", "at": "yesterday"}], "messages[0].at"),
    ([{"role": "user", "content": "a\u0000"}], "messages[0].content"),
]


async def test_wrong_import_is_refused_whole(running: RunningGateway) -> None:
    """422 with the path, and no thread is made; neither under an id that cannot name one."""
    for messages, field in WRONG_IMPORTS:
        response = await running.client.post("/threads/new/messages", json={"messages": messages})
        assert (response.status_code, response.json()["field"]) == (422, field)
    assert (await running.client.get("/threads/new")).status_code == 404
    for thread_id in ("a%20b", "a%25b", "%23"):
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert (await running.client.post(f"/threads/{thread_id}/messages", json=body)).status_code == 422


async def test_pins_are_set_read_and_removed(running: RunningGateway, node: SimulatedNode) -> None:
    """And every context carries them word for word."""
    await node.turn("local", "t", "hello")
    put = await running.client.put("/threads/t/pins/name", json={"text": "Her name is Ada"})
    assert (put.status_code, put.json()["key"], put.json()["text"]) == (200, "name", "Her name is Ada")
    assert (await running.client.get("/threads/t/pins/name")).json()["text"] == "Her name is Ada"
    assert [pin["key"] for pin in (await running.client.get("/threads/t/pins")).json()["items"]] == ["name"]
    context = (await running.client.get("/threads/t/context?query=name")).json()
    assert "Her name is Ada" in str(context["messages"])
    assert (await running.client.delete("/threads/t/pins/name")).status_code == 204
    assert (await running.client.get("/threads/t/pins/name")).status_code == 404
    assert (await running.client.put("/threads/t/pins/name", json={"text": ""})).status_code == 422


async def test_context_is_messages_and_a_receipt(running: RunningGateway, node: SimulatedNode) -> None:
    """Within the budget, in order, and explained; trying other settings changes nothing."""
    for text in ("The parcel went to Oslo", "What is the weather?", "Tell me a joke"):
        await node.turn("local", "t", text)
    context = (await running.client.get("/threads/t/context?query=parcel&max_tokens=500")).json()
    assert all(set(message) <= {"role", "name", "content"} for message in context["messages"])
    assert any("Oslo" in message["content"] for message in context["messages"])
    assert context["receipt"]["tokens"] <= context["receipt"]["budget"] == 500
    tried = await running.client.post(
        "/threads/t/context:explain", json={"query": "parcel", "max_tokens": 50, "recent_turns": 0, "older_turns": 1}
    )
    assert tried.json()["receipt"]["tokens"] <= 50
    assert (await running.client.get("/threads/t/context?query=parcel&max_tokens=500")).json()["messages"] == context[
        "messages"
    ]
    wrong = await running.client.post("/threads/t/context:explain", json={"max_token": 1})
    assert (wrong.status_code, wrong.json()["field"]) == (422, "max_token")


async def test_erased_thread_is_gone(running: RunningGateway, node: SimulatedNode) -> None:
    """409 while an intent of it is unfinished, then 204, then 404."""
    await node.turn("local", "t", "secret")
    intent = await running.submit(thread_id="t")
    busy = await running.client.delete("/threads/t")
    assert (busy.status_code, busy.json()["code"]) == (409, "conflict")
    await node.run(intent["intent_id"])
    assert (await running.client.delete("/threads/t")).status_code == 204
    for path in ("/threads/t", "/threads/t/turns", "/threads/t/context", f"/intents/{intent['intent_id']}"):
        assert (await running.client.get(path)).status_code == 404, path


async def test_capabilities_and_nodes_are_listed(running: RunningGateway, node: SimulatedNode) -> None:
    """With the schema to write a payload by, and whether a node is up that has it."""
    capabilities = (await running.client.get("/capabilities")).json()["items"]
    echo = next(item for item in capabilities if item["name"] == "echo")
    assert echo["is_available"] is True
    assert echo["input_schema"]["required"] == ["text"]
    nodes = (await running.client.get("/nodes")).json()["items"]
    assert [(item["node_id"], item["status"]) for item in nodes] == [("node-1", "up")]
    drained = await running.client.post("/nodes/node-1/drain")
    assert (drained.status_code, drained.json()["status"]) == (200, "draining")
