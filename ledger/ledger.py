"""The ledger as one object: opened once by a process, handed to whoever needs it.

Must never start a background loop by itself: `Sweeper` and the indexer are started by the role that owns them.
"""

from ledger.claims import Claims
from ledger.context import ContextService
from ledger.events import Events
from ledger.intents import Intents
from ledger.keys import Keys
from ledger.nodes import Nodes
from ledger.settings import LedgerSettings
from ledger.store import Store
from ledger.threads import Threads
from mesh.contract.ports import Embedder, MeshPort


class Ledger:
    """All of the ledger. `port` may be set after opening."""

    settings: LedgerSettings
    store: Store
    embedder: Embedder | None
    port: MeshPort
    intents: Intents
    claims: Claims
    threads: Threads
    events: Events
    nodes: Nodes
    keys: Keys
    context: ContextService

    async def ping(self) -> None:
        """Return when the database answers.

        Raises: MeshError `unavailable`.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Finish what was begun and let go of the database."""
        raise NotImplementedError


async def open_ledger(settings: LedgerSettings, *, port: MeshPort, embedder: Embedder | None) -> Ledger:
    """Open the database (brought up to date unless told otherwise) and return the ledger over it.

    Raises: MeshError `conflict` (a second process on one SQLite file; a schema from a newer release),
        `unavailable` (no database).
    """
    raise NotImplementedError
