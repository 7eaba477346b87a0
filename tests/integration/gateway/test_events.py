"""Server-sent events: every number once, in order, through any number of reconnections."""

import asyncio

import pytest
from support.running_gateway import RunningGateway, SimulatedNode, parse_stream, read_events, run_gateway

STREAM = {"Accept": "text/event-stream"}


async def test_thread_stream_has_every_number_once(running: RunningGateway, node: SimulatedNode) -> None:
    """From 1 on without a gap, while events are being written."""
    first = await running.submit(thread_id="s")
    async with running.client.stream("GET", "/threads/s/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        claim = await node.claim(first["intent_id"])
        for number in range(20):
            await node.say(claim, f"part {number}")
        await node.commit(claim, "done")
        total = (await running.ledger.events.after("local", "s", 0))[-1].number
        events = await asyncio.wait_for(read_events(response.aiter_lines(), total), 10)
    assert [int(event["id"]) for event in events] == list(range(1, total + 1))
    assert [event["data"]["number"] for event in events] == list(range(1, total + 1))
    assert {"intent.discovered", "intent.claimed", "delta", "result.committed", "thread.updated"} <= {
        event["event"] for event in events
    }
    deltas = [event["data"]["data"]["text"] for event in events if event["event"] == "delta"]
    assert deltas == [f"part {number}" for number in range(20)]


async def test_resuming_at_any_number_neither_skips_nor_repeats(running: RunningGateway, node: SimulatedNode) -> None:
    """Last-Event-ID n is followed by n + 1, for every n."""
    intent = await running.submit(thread_id="r")
    claim = await node.claim(intent["intent_id"])
    await node.say(claim, "a", "b", "c")
    await node.commit(claim, "abc")
    url = f"/intents/{intent['intent_id']}/events"
    whole = parse_stream((await running.client.get(url)).text)
    for seen in range(1, len(whole)):
        rest = await running.client.get(url, headers={"Last-Event-ID": whole[seen - 1]["id"]})
        assert parse_stream(rest.text) == whole[seen:]
        assert parse_stream((await running.client.get(f"{url}?after={whole[seen - 1]['id']}")).text) == whole[seen:]


async def test_intent_stream_ends_with_the_intent(running: RunningGateway, node: SimulatedNode) -> None:
    """It holds this intent's events alone, the outcome and what it did to the thread included."""
    first = await running.submit(thread_id="e")
    second = await running.submit(thread_id="e")
    reading = asyncio.create_task(running.client.get(f"/intents/{first['intent_id']}/events"))
    await node.run(first["intent_id"])
    events = parse_stream((await asyncio.wait_for(reading, 10)).text)
    assert {event["data"]["intent_id"] for event in events} == {first["intent_id"]}
    assert second["intent_id"] not in str(events)
    assert "result.committed" in [event["event"] for event in events]
    assert "thread.updated" in [event["event"] for event in events]


async def test_finished_stream_tells_a_browser_to_stay_away(running: RunningGateway, node: SimulatedNode) -> None:
    """Resuming after the last event of an intent that is over is 204."""
    intent = await running.submit()
    await node.run(intent["intent_id"])
    url = f"/intents/{intent['intent_id']}/events"
    last = parse_stream((await running.client.get(url)).text)[-1]["id"]
    assert (await running.client.get(url, headers={"Last-Event-ID": last})).status_code == 204


async def test_replayed_intent_is_followed_to_its_new_end(running: RunningGateway, node: SimulatedNode) -> None:
    """A failure in its past does not end the stream of an intent that runs again."""
    intent = await running.submit()
    await node.fail(await node.claim(intent["intent_id"]))
    await running.client.post(f"/intents/{intent['intent_id']}/replay")
    reading = asyncio.create_task(running.client.get(f"/intents/{intent['intent_id']}/events"))
    await node.run(intent["intent_id"])
    events = parse_stream((await asyncio.wait_for(reading, 10)).text)
    assert "result.committed" in [event["event"] for event in events]


async def test_submission_streams_when_asked_to(running: RunningGateway, node: SimulatedNode) -> None:
    """POST /intent with Accept: text/event-stream answers with the intent's events until it ends."""
    body = {"type": "echo", "payload": {"text": "hi"}}
    async with running.client.stream("POST", "/intent", json=body, headers=STREAM) as response:
        assert response.status_code == 200
        intent_id = response.headers["location"].rpartition("/")[2]
        claim = await node.claim(intent_id)
        await node.say(claim, "so ", "far")
        await node.commit(claim, {"text": "so far"})
        events = parse_stream((await asyncio.wait_for(response.aread(), 10)).decode())
    assert "".join(event["data"]["data"]["text"] for event in events if event["event"] == "delta") == "so far"
    assert "result.committed" in [event["event"] for event in events]


async def test_refused_submission_is_a_problem_even_for_a_stream(running: RunningGateway) -> None:
    """Nothing is streamed before the intent is durable."""
    response = await running.client.post("/intent", json={"type": "none", "payload": {}}, headers=STREAM)
    assert (response.status_code, response.headers["content-type"]) == (422, "application/problem+json")


@pytest.mark.parametrize("path", ["/intents/none/events", "/threads/none/events"])
async def test_stream_of_nothing_is_404(running: RunningGateway, path: str) -> None:
    """Before the stream begins, and as a problem document."""
    response = await running.client.get(path)
    assert (response.status_code, response.json()["code"]) == (404, "not_found")


async def test_stream_of_a_thread_that_is_erased_ends_with_a_problem(
    running: RunningGateway, node: SimulatedNode
) -> None:
    """Not with silence."""
    intent = await running.submit(thread_id="gone")
    await node.run(intent["intent_id"])
    async with running.client.stream("GET", "/threads/gone/events") as response:
        lines = response.aiter_lines()
        await read_events(lines, 1)
        assert (await running.client.delete("/threads/gone")).status_code == 204
        async with asyncio.timeout(10):
            rest = parse_stream("\n".join([line async for line in lines]))
    assert (rest[-1]["event"], rest[-1]["data"]["code"]) == ("problem", "not_found")
    assert "id" not in rest[-1]


async def test_silent_stream_carries_comments(ledger, node: SimulatedNode) -> None:
    """So that proxies keep it open and dead clients are noticed."""
    async with run_gateway(ledger, ping_interval_s=0.1) as running:
        await running.submit(thread_id="quiet")
        async with running.client.stream("GET", "/threads/quiet/events") as response:
            async with asyncio.timeout(10):
                async for line in response.aiter_lines():
                    if line.startswith(":"):
                        break


async def test_stream_ends_after_its_time(ledger, node: SimulatedNode) -> None:
    """A revoked key cannot be listened with for ever; a client resumes."""
    async with run_gateway(ledger, stream_max_s=0.3) as running:
        await running.submit(thread_id="t")
        response = await asyncio.wait_for(running.client.get("/threads/t/events"), 10)
        assert parse_stream(response.text)


async def test_streams_of_a_tenant_are_bounded(ledger, node: SimulatedNode) -> None:
    """One more than the bound is 429 with Retry-After, and a slot is given back when a client goes."""
    async with run_gateway(ledger, tenant_streams_max=1) as running:
        await running.submit(thread_id="t")
        async with running.client.stream("GET", "/threads/t/events"):
            refused = await running.client.get("/threads/t/events")
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
            assert refused.headers["retry-after"]
        async with asyncio.timeout(10):
            while running.gateway.streams._open:
                await asyncio.sleep(0.02)


async def test_shutdown_ends_streams_and_waits(ledger, node: SimulatedNode) -> None:
    """A stopping gateway closes its streams cleanly and answers its waits with 202, all within seconds."""
    async with run_gateway(ledger) as running:
        await running.submit(thread_id="t")
        body = {"type": "echo", "payload": {"text": "x"}}
        reading = asyncio.create_task(running.client.get("/threads/t/events"))
        waiting = asyncio.create_task(running.client.post("/intent?wait=60", json=body))
        async with asyncio.timeout(10):
            while not running.gateway.streams._open or len((await running.ledger.intents.list("local"))[0]) < 2:
                await asyncio.sleep(0.02)
        running.server.should_exit = True
        async with asyncio.timeout(5):
            assert (await reading).status_code == 200
            assert (await waiting).status_code == 202
