"""A thousand intents over fifty threads and three nodes: all succeed, in order, and nothing is left over."""

import asyncio
import collections
import random
from pathlib import Path
from typing import Any

import pytest
from support.databases import Database
from support.running_mesh import RunningMesh, eventually

INTENTS, THREADS, NODES = 1000, 50, 3
FINISH_TIMEOUT_S = 150.0


def workload(seed: int) -> list[tuple[str, dict[str, Any], str]]:
    """(capability, payload, thread) of every intent. `n` in the payload counts inside the thread."""
    rng = random.Random(seed)
    counts: collections.Counter[str] = collections.Counter()
    jobs = []
    for _ in range(INTENTS):
        thread = f"thread-{rng.randrange(THREADS)}"
        counts[thread] += 1
        capability = rng.choice(["echo", "echo", "recall", "wordcount"])
        jobs.append((capability, {"text": f"statement {counts[thread]} of {thread}"}, thread))
    return jobs


async def submit_all(mesh: RunningMesh, jobs: list[tuple[str, dict[str, Any], str]]) -> dict[str, list[str]]:
    """Submit each thread's jobs in order, threads side by side; return thread → intent ids in that order."""
    ids: dict[str, list[str]] = collections.defaultdict(list)
    gate = asyncio.Semaphore(16)

    async def one_thread(thread: str) -> None:
        for capability, payload, owner in jobs:
            if owner == thread:
                async with gate:
                    answer = await mesh.submit(capability, payload, wait_s=0, thread_id=thread)
                ids[thread].append(answer["intent_id"])

    await asyncio.gather(*(one_thread(thread) for thread in {job[2] for job in jobs}))
    return ids


async def count(mesh: RunningMesh, status: str) -> int:
    """Return how many intents are in a state."""
    total, cursor = 0, None
    while True:
        parameters = {"status": status, "limit": 200} | ({"cursor": cursor} if cursor else {})
        page = (await mesh.client.get("/intents", params=parameters)).raise_for_status().json()
        total, cursor = total + len(page["items"]), page["next"]
        if cursor is None:
            return total


async def check_everything(mesh: RunningMesh, ids: dict[str, list[str]]) -> collections.Counter[str]:
    """Verify every thread's turns against the order of submission; return node → intents that it finished."""
    workers: collections.Counter[str] = collections.Counter()
    for thread, intent_ids in ids.items():
        turns: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            parameters = {"limit": 200} | ({"cursor": cursor} if cursor else {})
            page = (await mesh.client.get(f"/threads/{thread}/turns", params=parameters)).json()
            turns += page["items"]
            cursor = page["next"]
            if cursor is None:
                break
        assert [turn["turn_number"] for turn in turns] == list(range(1, len(intent_ids) + 1))
        assert [turn["intent_id"] for turn in turns] == intent_ids
        for intent_id in intent_ids:
            workers[(await mesh.intent(intent_id))["node_id"]] += 1
    return workers


@pytest.mark.timeout(400)
@pytest.mark.parametrize("is_node_killed", [False, True], ids=["undisturbed", "node-killed"])
async def test_all_succeed_in_order(tmp_path: Path, database: Database, is_node_killed: bool) -> None:
    """Every intent succeeds, turn numbers have no gap, each thread is first in first out, each node got work."""
    environment = {"INTENTMESH_LEASE_TTL_S": "4", "INTENTMESH_LEASE_MARGIN_S": "1"}
    database_url = database.url if database.kind == "postgres" else None
    async with RunningMesh(tmp_path, database_url=database_url, nodes=NODES, environment=environment) as mesh:
        submitting = asyncio.create_task(submit_all(mesh, workload(seed=7)))
        if is_node_killed:

            async def is_half_way() -> bool:
                return await count(mesh, "succeeded") >= INTENTS // 4

            await eventually(is_half_way, timeout_s=FINISH_TIMEOUT_S, what="a quarter is done")
            mesh.kill("node-2")
        ids = await submitting

        async def is_done() -> bool:
            return await count(mesh, "succeeded") == INTENTS

        await eventually(is_done, timeout_s=FINISH_TIMEOUT_S, what="all intents succeed")
        workers = await check_everything(mesh, ids)
        assert set(workers) == {f"node-{number}" for number in range(1, NODES + 1)}
