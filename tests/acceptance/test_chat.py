"""`chat` through the node's broker: what the model is sent, how the answer streams, and a real small model."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import local_model
from support.process_list import processes_in
from support.running_mesh import ROOT, RunningMesh, eventually
from support.scripted_model import ScriptedModel

FACT = "My locker number is 4711."
SECRET = "sk-never-in-a-worker"


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Post an intent and yield (event, data) as they come."""
    headers = {"accept": "text/event-stream"}
    async with client.stream("POST", "/intent", json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        kind = ""
        async for line in answer.aiter_lines():
            if line.startswith("event:"):
                kind = line[6:].strip()
            elif line.startswith("data:"):
                yield kind, json.loads(line[5:])


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedModel]:
    """A model that repeats the last message in two pieces."""
    model = ScriptedModel(lambda messages: ["You said: ", messages[-1]["content"]])
    async with model.serving():
        yield model


@pytest.fixture
async def mesh(tmp_path: Path, scripted: ScriptedModel) -> AsyncIterator[RunningMesh]:
    """A mesh whose node knows the scripted model and its key."""
    environment = {"INTENTMESH_LLM_BASE_URL": scripted.url, "INTENTMESH_LLM_API_KEY": SECRET}
    async with RunningMesh(tmp_path, environment=environment) as mesh:
        yield mesh


async def test_the_model_gets_the_thread_and_the_caller_gets_deltas(mesh: RunningMesh, scripted: ScriptedModel) -> None:
    """The tenth turn's request holds the first turn's fact; pieces arrive as deltas; tokens are metered."""
    await mesh.submit("chat", {"text": FACT}, thread_id="lockers")
    for number in range(2, 10):
        await mesh.submit("chat", {"text": f"Turn {number} is about the weather."}, thread_id="lockers")
    pieces, committed = [], {}
    async for kind, data in stream(
        mesh.client, {"type": "chat", "payload": {"text": "What is my locker number?"}, "thread_id": "lockers"}
    ):
        if kind == "delta":
            pieces.append(data["data"]["text"])
        elif kind == "result.committed":
            committed = data["data"]
    sent = scripted.requests[-1]["messages"]
    assert any(FACT in message["content"] for message in sent[:-1])
    assert sent[-1] == {"role": "user", "content": "What is my locker number?"}
    assert "".join(pieces) == "You said: What is my locker number?"
    assert committed
    assert scripted.keys[-1] == f"Bearer {SECRET}"
    latest = (await mesh.client.get("/intents", params={"thread_id": "lockers", "limit": 1})).json()["items"][0]
    assert (latest["usage"]["input_tokens"], latest["usage"]["output_tokens"]) == (7, 2)
    assert latest["turn_number"] == 10


async def test_a_cancelled_chat_keeps_what_was_said_and_no_worker(mesh: RunningMesh, scripted: ScriptedModel) -> None:
    """Cancelling in mid-stream ends the worker and commits the partial text, marked."""
    scripted.script = lambda _: ["one ", "two "] * 500
    scripted.pause_s = 0.05
    answer = await mesh.submit("chat", {"text": "count"}, wait_s=0, thread_id="cut")

    async def has_streamed() -> bool:
        return "result.committed" not in mesh_events and "delta" in mesh_events

    mesh_events: list[str] = []

    async def follow() -> None:
        async with mesh.client.stream("GET", f"/intents/{answer['intent_id']}/events") as events:
            async for line in events.aiter_lines():
                mesh_events.extend([line[6:].strip()] if line.startswith("event:") else [])

    following = asyncio.create_task(follow())
    await eventually(has_streamed, timeout_s=20, what="the first delta")
    cancelled = await mesh.client.post(f"/intents/{answer['intent_id']}/cancel")
    assert cancelled.json()["status"] in {"cancelled", "cancel_requested"}

    async def is_over() -> bool:
        return (await mesh.intent(answer["intent_id"]))["status"] == "cancelled"

    await eventually(is_over, timeout_s=10, what="the intent is cancelled")
    await following
    assert mesh_events[-2:] == ["intent.cancelled", "thread.updated"]
    turns = (await mesh.client.get("/threads/cut/turns")).json()["items"]
    assert [turn["mark"] for turn in turns] == ["cancelled"]
    assert turns[0]["messages"][1]["content"].startswith("one two")
    scripted.pause_s = 0
    scripted.script = lambda messages: ["fine"]
    after = await mesh.submit("chat", {"text": "go on"}, thread_id="cut")
    assert (after["status"], after["turn_number"]) == ("succeeded", 2)


@pytest.mark.parametrize(("status", "attempts"), [(401, 1), (500, 3)])
async def test_a_failing_model_fails_the_intent_with_the_next_step(
    mesh: RunningMesh, scripted: ScriptedModel, status: int, attempts: int
) -> None:
    """A refused key is not tried again; a server's own error is, until the attempts are used up."""
    scripted.status = status
    answer = await mesh.submit("chat", {"text": "hello"})
    assert answer["status"] in {"failed", "dead"}
    assert answer["error"]["code"] == "model_failed"
    assert len((await mesh.intent(answer["intent_id"]))["attempts"]) == attempts
    assert SECRET not in json.dumps(await mesh.intent(answer["intent_id"]))


async def test_the_key_is_in_no_worker_or_zygote(mesh: RunningMesh) -> None:
    """Only the node's own process knows the key."""
    node = mesh.processes["node-1"].pid
    await mesh.submit("echo", {"text": "warm"})
    children = [pid for pid in processes_in(mesh.folder) if pid not in {p.pid for p in mesh.processes.values()}]
    assert children, "zygotes and their children stand by"
    for pid in children:
        assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    assert SECRET.encode() in Path(f"/proc/{node}/environ").read_bytes()


def brief_chat(folder: Path) -> Path:
    """The shipped `chat` with short answers, so that a small model on one core is done soon."""
    copy = folder / "capabilities" / "chat"
    shutil.copytree(ROOT / "capabilities" / "chat", copy)
    template = copy / "template.yaml"
    text = re.sub(r"max_output_tokens: \d+", "max_output_tokens: 24", template.read_text())
    assert "max_output_tokens: 24" in text
    template.write_text(text)
    return copy.parent


@pytest.mark.model
async def test_a_conversation_with_a_real_local_model(tmp_path: Path) -> None:
    """Ten turns through llama.cpp: every turn succeeds with text and tokens, and the tenth carries the first's fact."""
    reason = local_model.why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    port_file = tmp_path / "model.url"
    server = await asyncio.create_subprocess_exec(
        sys.executable, local_model.__file__, str(port_file), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )  # fmt: skip
    try:
        await eventually(port_file.exists, timeout_s=60, what="the local model answers")
        environment = {
            "INTENTMESH_LLM_BASE_URL": port_file.read_text(),
            "INTENTMESH_EMBEDDING_MODEL": "all-MiniLM-L6-v2",
            "INTENTMESH_CAPABILITIES_DIR": str(brief_chat(tmp_path)),
        }
        async with RunningMesh(tmp_path / "mesh", environment=environment) as mesh:
            texts = [
                FACT,
                *(f"Tell me one word about the number {number}." for number in range(2, 10)),
                "What is my locker number?",
            ]
            for number, text in enumerate(texts, start=1):
                answer = await mesh.submit("chat", {"text": text}, wait_s=110, thread_id="real")
                assert (answer["status"], answer["turn_number"]) == ("succeeded", number), answer
                assert answer["result"]["text"].strip()
                assert answer["usage"]["output_tokens"] > 0
            receipt = (await mesh.intent(answer["intent_id"]))["receipt"]
            assert any(entry["turn_number"] == 1 for entry in receipt["messages"])
    finally:
        assert server.stdin is not None
        server.stdin.close()
        await server.wait()
