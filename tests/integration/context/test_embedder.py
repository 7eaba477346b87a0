"""The real model in its process: right vectors, no blocking, back after a crash, gone with its owner."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from support.process_list import is_alive, until

from ledger.embedder import client as client_module
from ledger.embedder.client import EmbedderProcess
from mesh.contract.errors import ErrorCode, MeshError

pytestmark = pytest.mark.asyncio(loop_scope="module")
LOAD_S = 120


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def embedder() -> AsyncIterator[EmbedderProcess]:
    """The packaged model, loaded."""
    process = EmbedderProcess()
    await process.start()
    assert await process.wait_ready(LOAD_S)
    yield process
    await process.close()


async def test_like_texts_have_like_vectors(embedder: EmbedderProcess) -> None:
    """Unit vectors of the model's dimension, closer for the same meaning in other words."""
    texts = ["My dog loves long walks", "A puppy enjoys hiking", "The invoice is overdue"]
    vectors = await embedder.embed(texts, timeout_s=30)
    assert vectors.shape == (3, 384) == (3, embedder.dimension)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2


async def test_the_end_of_a_long_text_counts(embedder: EmbedderProcess) -> None:
    """Two texts of two thousand words that differ in the last sentence only have different vectors."""
    long = " ".join(f"word{number}" for number in range(2000))
    one, other = await embedder.embed([f"{long} It was paid.", f"{long} Cats purr loudly."], timeout_s=60)
    assert np.abs(one - other).max() > 1e-3


async def test_batching_changes_no_vector(embedder: EmbedderProcess) -> None:
    """Many callers at once get each their own, as if they had been alone."""
    texts = [f"sentence number {number} about subject {number % 7}" for number in range(40)]
    alone = await embedder.embed(texts, timeout_s=60)
    together = await asyncio.gather(*(embedder.embed([text], timeout_s=60) for text in texts))
    assert np.allclose(alone, np.concatenate(together), atol=1e-4)


async def test_a_query_passes_a_long_queue_of_messages(embedder: EmbedderProcess) -> None:
    """A single text is answered before two hundred that came earlier."""
    bulk = asyncio.create_task(embedder.embed(["a message to index, of some length " * 8] * 200, timeout_s=120))
    await asyncio.sleep(0)
    await embedder.embed(["who asked?"], timeout_s=30)
    assert not bulk.done()
    assert (await bulk).shape == (200, 384)


async def test_a_full_queue_and_a_giant_text_are_refused(
    embedder: EmbedderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded in number and in length, with a code that says which."""
    monkeypatch.setattr(client_module, "QUEUED_TEXTS_MAX", 10)
    with pytest.raises(MeshError) as full:
        await embedder.embed(["x"] * 11, timeout_s=5)
    assert full.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(MeshError) as giant:
        await embedder.embed(["x" * 20_001], timeout_s=5)
    assert giant.value.code is ErrorCode.TOO_LARGE


async def test_a_killed_model_fails_what_waits_and_comes_back(embedder: EmbedderProcess) -> None:
    """`unavailable` at once instead of a hang; some seconds later it answers again."""
    waiting = asyncio.create_task(embedder.embed(["a message to index " * 20] * 100, timeout_s=60))
    await asyncio.sleep(0)
    assert embedder.pid is not None
    os.kill(embedder.pid, signal.SIGKILL)
    with pytest.raises(MeshError) as caught:
        await asyncio.wait_for(waiting, 10)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert not embedder.is_ready
    assert await embedder.wait_ready(LOAD_S)
    assert (await embedder.embed(["again"], timeout_s=30)).shape == (1, 384)


CHILD = """
import pathlib, sys, time
from ledger.embedder import process
def load(name):
    pathlib.Path(name).touch()
    time.sleep(600)
process._load = load
process.serve(sys.argv[1], int(sys.argv[2]))
"""
OWNER = """
import asyncio, sys
from ledger.embedder.client import EmbedderProcess
async def main():
    embedder = EmbedderProcess(sys.argv[1], command=[sys.executable, "-c", sys.argv[2]])
    await embedder.start()
    while embedder.pid is None:
        await asyncio.sleep(0.01)
    print(embedder.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_the_process_dies_with_its_owner(tmp_path: Path) -> None:
    """After SIGKILL of the owner nothing is left, even while the model loads."""
    root = Path(client_module.__file__).parents[2]
    loading = tmp_path / "loading"
    command = [sys.executable, "-c", OWNER, str(loading), CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as owner:
        try:
            assert owner.stdout is not None
            pid = int(await asyncio.to_thread(owner.stdout.readline))
            await until(loading.exists, deadline_s=30, what="the load of the model")
        finally:
            owner.kill()
    await until(lambda: not is_alive(pid), what="the end of the embedder")


async def test_a_model_that_cannot_be_loaded_is_unavailable(tmp_path: Path) -> None:
    """No crash of the owner: `embed` says unavailable, and the next try comes by itself."""
    broken = EmbedderProcess(str(tmp_path))
    await broken.start()
    try:
        assert not await broken.wait_ready(0.2)
        with pytest.raises(MeshError) as caught:
            await broken.embed(["x"], timeout_s=1)
        assert caught.value.code is ErrorCode.UNAVAILABLE
    finally:
        await broken.close()
