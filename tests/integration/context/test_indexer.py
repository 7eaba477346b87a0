"""The indexer: finds what lacks vectors however it came there, newest first, and survives what breaks."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from support.process_list import until
from support.word_embedder import DIMENSION, WordEmbedder

from ledger import indexer as indexer_module
from ledger.history import RECIPE
from ledger.indexer import Indexer
from ledger.ledger import Ledger
from ledger.models import message_vectors, threads

Say = Callable[..., Awaitable[None]]


async def count(ledger: Ledger) -> int:
    """Return how many messages have vectors (or were given up)."""

    async def work(connection: AsyncConnection) -> int:
        return int((await connection.execute(select(func.count(message_vectors.c.message_id.distinct())))).scalar_one())

    return await ledger.store.read(work)


async def until_counted(ledger: Ledger, messages: int) -> None:
    """Wait until so many messages have vectors."""
    async with asyncio.timeout(10):
        while await count(ledger) < messages:
            await asyncio.sleep(0.01)


async def run_out(indexer: Indexer) -> None:
    """Do rounds until there is nothing left."""
    while await indexer.step():
        pass


async def test_every_message_of_every_thread_gets_its_vectors(
    ledger: Ledger, say: Say, embedder: WordEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over many pages, with times that are equal and long ago; a second run embeds nothing again."""
    monkeypatch.setattr(indexer_module, "_THREADS_A_PAGE", 3)
    for number in range(20):
        await say(f"t{number}", f"thread {number}", "another message")

    async def age(connection: AsyncConnection) -> None:
        await connection.execute(update(threads).values(updated_at_ms=threads.c.updated_at_ms / 1_000_000 * 1000))

    await ledger.store.write(age)
    await run_out(Indexer(ledger.store, embedder))
    assert await count(ledger) == 40
    embedder.seen.clear()
    await run_out(Indexer(ledger.store, embedder))
    assert embedder.seen == []


async def test_vectors_are_stored_as_the_contract_says(ledger: Ledger, say: Say, embedder: WordEmbedder) -> None:
    """float32, unit length, with model, dimension and recipe beside them; a long message has several."""
    await say("t", "A sentence about boats. " * 200)
    await run_out(Indexer(ledger.store, embedder))

    async def work(connection: AsyncConnection) -> list[tuple[int, str, int, str, bytes]]:
        table = message_vectors.c
        columns = (table.chunk, table.model_id, table.dimension, table.recipe, table.vector)
        rows = await connection.execute(select(*columns).order_by(table.chunk))
        return [(row[0], row[1], row[2], row[3], row[4]) for row in rows]

    rows = await ledger.store.read(work)
    assert [row[0] for row in rows] == list(range(len(rows)))
    assert len(rows) > 3
    for _, model_id, dimension, recipe, vector in rows:
        assert (model_id, dimension, recipe) == ("words@1", DIMENSION, RECIPE)
        assert np.linalg.norm(np.frombuffer(vector, "<f4")) == pytest.approx(1, abs=1e-5)


async def test_a_new_message_is_embedded_soon_after_a_wake(ledger: Ledger, say: Say, embedder: WordEmbedder) -> None:
    """Long before the slow poll."""
    indexer = Indexer(ledger.store, embedder, poll_interval_s=60)
    indexer.start()
    try:
        await say("t", "first")
        indexer.wake()
        await until_counted(ledger, 1)
    finally:
        await indexer.close()


async def test_what_came_while_the_embedder_was_away_is_found(ledger: Ledger, say: Say, embedder: WordEmbedder) -> None:
    """Nothing is remembered but the rows: messages of the outage are embedded after it, without a wake."""
    embedder.is_ready = False
    indexer = Indexer(ledger.store, embedder, poll_interval_s=0.05)
    indexer.start()
    try:
        await say("t", "first")
        await say("u", "second")
        embedder.is_ready = True
        await until_counted(ledger, 2)
    finally:
        await indexer.close()


async def test_a_text_that_always_breaks_the_model_does_not_starve_the_rest(
    ledger: Ledger, say: Say, embedder: WordEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a few tries it is given up, and every other message has vectors."""
    monkeypatch.setattr(indexer_module, "BACKOFF_MAX_S", 0.01)
    embedder.poison = "kaboom"
    await say("t", "one", "kaboom", "three", "four")
    indexer = Indexer(ledger.store, embedder, poll_interval_s=0.05)
    indexer.start()
    try:
        await until_counted(ledger, 4)
    finally:
        await indexer.close()
    assert not any("kaboom" in text for text in embedder.seen)
    assert sum("four" in text for text in embedder.seen) == 1


async def test_a_message_erased_while_it_is_embedded_leaves_no_vector(
    ledger: Ledger, say: Say, embedder: WordEmbedder
) -> None:
    """The vectors come too late and are dropped."""
    await say("t", "to be forgotten")
    embedder.delay_s = 0.5
    running = asyncio.create_task(Indexer(ledger.store, embedder).step())
    await until(lambda: embedder.calls, what="the call of the embedder")
    await ledger.threads.delete("local", "t")
    await running
    assert embedder.seen
    assert await count(ledger) == 0
