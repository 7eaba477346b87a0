"""What a mesh of real processes does when a part is missing, joins, stops, or is asked to stop."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.running_mesh import ROOT, RunningMesh, eventually


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[RunningMesh]:
    """One gateway and one node, without the embedding model."""
    async with RunningMesh(tmp_path) as mesh:
        yield mesh


async def test_without_redis_intents_still_finish(mesh: RunningMesh) -> None:
    """Redis is a hint: when it is gone for good, nodes find work by polling; when it is back, it is used again."""
    assert (await mesh.submit("echo", {"text": "before"}))["status"] == "succeeded"
    mesh.kill("redis")
    answer = await mesh.submit("echo", {"text": "during"}, thread_id="without-redis")
    assert answer["status"] == "succeeded"
    await mesh.start_redis()
    answer = await mesh.submit("echo", {"text": "after"}, thread_id="without-redis")
    assert (answer["status"], answer["turn_number"]) == ("succeeded", 2)


async def test_a_mesh_that_never_had_redis_works(tmp_path: Path) -> None:
    """Without INTENTMESH_REDIS_URL the mesh polls the ledger."""
    async with RunningMesh(tmp_path, with_redis=False) as mesh:
        assert (await mesh.submit("echo", {"text": "hello"}))["result"] == {"text": "hello"}


async def test_a_node_joins_a_running_mesh_and_leaves_it(mesh: RunningMesh) -> None:
    """A second node takes part at once, and its end by SIGTERM loses nothing."""
    mesh.start_node("node-2")

    async def is_up() -> bool:
        nodes = (await mesh.client.get("/nodes")).json()["items"]
        return {"node-1", "node-2"} <= {node["node_id"] for node in nodes if node["status"] == "up"}

    await eventually(is_up, timeout_s=30, what="node-2 is up")
    sent = [asyncio.create_task(mesh.submit("echo", {"text": str(number)})) for number in range(60)]
    answers = await asyncio.gather(*sent)
    assert {answer["status"] for answer in answers} == {"succeeded"}
    workers = {(await mesh.intent(answer["intent_id"]))["node_id"] for answer in answers}
    assert workers == {"node-1", "node-2"}
    leaving = mesh.processes.pop("node-2")
    sent = [asyncio.create_task(mesh.submit("echo", {"text": str(number)})) for number in range(20)]
    leaving.terminate()
    assert {answer["status"] for answer in await asyncio.gather(*sent)} == {"succeeded"}
    assert await asyncio.to_thread(leaving.wait, 20) == 0


async def test_the_award_says_why_this_node(mesh: RunningMesh) -> None:
    """Price parts and losers stand with the intent."""
    answer = await mesh.submit("echo", {"text": "why"})
    award = (await mesh.intent(answer["intent_id"]))["award"]
    assert award["node_id"] == "node-1"
    assert award["price"] == pytest.approx(max(0.0, sum(award["parts"].values())))
    assert award["losers"] == []


async def test_a_budget_below_every_price_waits_and_can_be_cancelled(mesh: RunningMesh) -> None:
    """An intent that no node will take for its budget stays ready, in its own thread, until someone decides."""
    poor = await mesh.submit("echo", {"text": "cheap"}, wait_s=0, budget=0.01)
    assert (await mesh.submit("echo", {"text": "rich"}))["status"] == "succeeded"
    assert (await mesh.intent(poor["intent_id"]))["status"] == "ready"
    answer = await mesh.client.post(f"/intents/{poor['intent_id']}/cancel")
    assert answer.json()["status"] == "cancelled"


async def test_a_new_capability_runs_without_a_restart(tmp_path: Path) -> None:
    """`capability new` writes a multi-turn capability, and a running node offers it by itself."""
    folder = tmp_path / "capabilities"
    folder.mkdir()
    places = f"{ROOT / 'capabilities'}:{folder}"
    async with RunningMesh(tmp_path, environment={"INTENTMESH_CAPABILITIES_DIR": places}) as mesh:
        made = subprocess.run(
            [sys.executable, "-m", "cli.main", "capability", "new", "greeter", "--dir", str(folder)],
            env=mesh.environment(), cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr

        async def is_known() -> bool:
            items = (await mesh.client.get("/capabilities")).json()["items"]
            return any(item["name"] == "greeter" for item in items)

        await eventually(is_known, timeout_s=20, what="the node offers greeter")
        first = await mesh.submit("greeter", {"text": "hello"}, thread_id="greetings")
        second = await mesh.submit("greeter", {"text": "again"}, thread_id="greetings")
        assert (first["status"], second["turn_number"]) == ("succeeded", 2), json.dumps([first, second])


async def test_a_chat_without_a_model_says_how_to_set_one(mesh: RunningMesh) -> None:
    """The failure is not tried again, and its text is the next step."""
    answer = await mesh.submit("chat", {"text": "hello"})
    assert (answer["status"], answer["error"]["code"]) == ("failed", "model_not_configured")
    assert "INTENTMESH_LLM_BASE_URL" in answer["error"]["hint"]
    assert len((await mesh.intent(answer["intent_id"]))["attempts"]) == 1
