"""A ledger whose embedder is made of words, and helpers to fill its threads."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from support.recording_port import RecordingPort
from support.word_embedder import WordEmbedder

from ledger.ledger import Ledger, open_ledger
from ledger.settings import LedgerSettings
from mesh.contract.api import ImportMessage, ImportMessages

Say = Callable[..., Awaitable[None]]


@pytest.fixture
def embedder() -> WordEmbedder:
    """An embedder that tests can break."""
    return WordEmbedder()


@pytest.fixture
async def ledger(ledger_settings: LedgerSettings, port: RecordingPort, embedder: WordEmbedder) -> AsyncIterator[Ledger]:
    """A ledger over a fresh database, without background loops."""
    opened = await open_ledger(ledger_settings, port=port, embedder=embedder)
    yield opened
    await opened.close()


@pytest.fixture
def say(ledger: Ledger) -> Say:
    """Append messages to a thread, as a user with a name or without."""

    async def append(thread_id: str, *contents: str, name: str | None = None, tenant_id: str = "local") -> None:
        messages = [ImportMessage(role="user", content=content, name=name) for content in contents]
        for start in range(0, len(messages), 200):
            await ledger.threads.import_messages(
                tenant_id, thread_id, ImportMessages(messages=messages[start : start + 200])
            )

    return append
