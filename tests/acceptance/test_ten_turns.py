"""A conversation of ten turns over real HTTP: the fact of the first turn is found in the tenth, by its meaning."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.databases import Database
from support.running_mesh import RunningMesh, eventually

FACT = "By the way, my daughter Ada is allergic to peanuts."
OTHER_THINGS = [
    "The train to Hamburg leaves at seven tomorrow.",
    "I repainted the kitchen in a light green.",
    "Our football team lost two to one.",
    "The new printer needs a different cartridge.",
    "My brother bought an electric bicycle.",
    "It has been raining here for four days.",
    "The library closes early on Fridays.",
    "I finished the book about lighthouses.",
]
# Shares no telling word with the fact: only its meaning leads there.
QUESTION = "Which foods must my child avoid?"


@pytest.fixture
async def mesh(tmp_path: Path, database: Database) -> AsyncIterator[RunningMesh]:
    """A mesh with the real embedding model; over Postgres the gateway asks the ledger's."""
    database_url = database.url if database.kind == "postgres" else None
    environment = {"INTENTMESH_EMBEDDING_MODEL": "all-MiniLM-L6-v2"}
    async with RunningMesh(tmp_path, database_url=database_url, environment=environment) as mesh:
        yield mesh


async def test_the_tenth_turn_names_the_fact_of_the_first(mesh: RunningMesh) -> None:
    """`recall` answers with turn 1, by semantics and not by recency; what was never said it does not find."""
    thread = "ten-turns"
    first = await mesh.submit("echo", {"text": FACT}, thread_id=thread)
    assert (first["status"], first["turn_number"]) == ("succeeded", 1)
    for number, text in enumerate(OTHER_THINGS, start=2):
        assert (await mesh.submit("echo", {"text": text}, thread_id=thread))["turn_number"] == number

    async def is_indexed() -> bool:
        answer = await mesh.client.get(f"/threads/{thread}/context", params={"query": QUESTION, "max_tokens": 2000})
        receipt = answer.raise_for_status().json()["receipt"]
        return receipt["semantic"] == "used" and all(candidate["is_indexed"] for candidate in receipt["candidates"])

    await eventually(is_indexed, timeout_s=60, what="the embedder has indexed the thread")
    tenth = await mesh.submit("recall", {"text": QUESTION}, thread_id=thread)
    assert tenth["turn_number"] == 10
    receipt = (await mesh.intent(tenth["intent_id"]))["receipt"]
    assert tenth["result"]["found"] is True, receipt["messages"]
    assert tenth["result"]["turn_number"] == 1
    assert "peanuts" in tenth["result"]["text"]

    receipt = (await mesh.intent(tenth["intent_id"]))["receipt"]
    sources = {entry["source"] for entry in receipt["messages"] if entry["turn_number"] == 1}
    assert sources == {"older"}
    best = max(
        (
            candidate
            for candidate in receipt["candidates"]
            if candidate["role"] == "user" and candidate["turn_number"] < 8
        ),
        key=lambda candidate: candidate["scores"]["semantic"],
    )
    assert best["turn_number"] == 1
    assert best["included"] is True
    turns = (await mesh.client.get(f"/threads/{thread}/turns")).json()["items"]
    assert [turn["turn_number"] for turn in turns] == list(range(1, 11))

    # The nearest of what is far is no answer.
    nothing = await mesh.submit("recall", {"text": "Who wrote the constitution of Norway?"}, thread_id=thread)
    assert nothing["result"]["found"] is False
    assert "nothing" in nothing["result"]["text"]
