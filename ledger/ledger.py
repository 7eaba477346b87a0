"""The ledger as one object: opened once by a process, handed to whoever needs it.

Must never start a background loop by itself: the role that owns the database starts the sweeper and the indexer
(`start_background`), a gateway beside it does not.
"""

import asyncio

from ledger.aftermath import Herald
from ledger.claims import Claims
from ledger.context import ContextService
from ledger.endings import Endings
from ledger.events import Events
from ledger.indexer import Indexer
from ledger.intents import Intents
from ledger.keys import Keys
from ledger.nodes import Nodes
from ledger.schema import check_schema, upgrade_schema
from ledger.settings import LedgerSettings
from ledger.store import Store, open_store
from ledger.sweeper import Sweeper
from ledger.threads import Threads
from ledger.tokens import count_tokens
from mesh.contract.ports import Embedder, MeshPort


class Ledger:
    """All of the ledger. `port` may be set after opening."""

    def __init__(self, settings: LedgerSettings, store: Store, *, port: MeshPort, embedder: Embedder | None) -> None:
        self.settings = settings
        self.store = store
        self.embedder = embedder
        self._herald = Herald(port)
        self._endings = Endings(store, self._herald, settings)
        self.context = ContextService(store, embedder)
        self.intents = Intents(store, self._herald, self.context, settings)
        self.claims = Claims(store, self._herald, self.context, self._endings, settings)
        self.threads = Threads(store, self._herald, self.context)
        self.events = Events(store)
        self.nodes = Nodes(store, settings)
        self.keys = Keys(store)
        self.sweeper = Sweeper(store, self._herald, self._endings, settings)
        self.indexer: Indexer | None = None

    @property
    def port(self) -> MeshPort:
        """Where the ledger tells the mesh what it has committed."""
        return self._herald.port

    @port.setter
    def port(self, port: MeshPort) -> None:
        self._herald.port = port

    def start_background(self) -> None:
        """Start the sweeper, and the indexer when there is an embedder. For the one role that owns the ledger."""
        self.sweeper.start()
        if self.embedder is not None and self.indexer is None:
            self.indexer = Indexer(self.store, self.embedder)
            self.indexer.start()
            self._endings.on_history = self.threads.on_history = self.indexer.wake

    async def ping(self) -> None:
        """Return when the database answers.

        Raises: MeshError `unavailable`.
        """
        await self.store.ping()

    async def close(self) -> None:
        """Finish what was begun and let go of the database."""
        await self.sweeper.close()
        if self.indexer is not None:
            await self.indexer.close()
        await self.context.close()
        await self._herald.close()
        await self.store.close()


async def open_ledger(settings: LedgerSettings, *, port: MeshPort, embedder: Embedder | None) -> Ledger:
    """Open the database (brought up to date unless told otherwise) and return the ledger over it.

    Raises: MeshError `conflict` (a second process on one SQLite file; a schema of another release),
        `unavailable` (no database).
    """
    # The vocabulary takes a third of a second to load: now, and not under the first commit.
    await asyncio.to_thread(count_tokens, "")
    store = await open_store(settings)
    try:
        if settings.auto_upgrade:
            await upgrade_schema(store)
        else:
            await check_schema(store)
    except BaseException:
        await store.close()
        raise
    return Ledger(settings, store, port=port, embedder=embedder)
