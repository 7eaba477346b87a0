"""The event log of each thread: reading it, and the one way in which it is written.

Must never hand out a number outside the thread row's lock: number order is commit order, without a gap.
"""

from ledger.store import Store
from mesh.contract.api import EventView


class Events:
    """Reads the event logs."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def after(
        self, tenant_id: str, thread_id: str, number: int, *, intent_id: str | None = None, limit: int = 500
    ) -> list[EventView]:
        """Return the events of a thread whose number is above `number`, oldest first; only one intent's when given.

        Raises: MeshError `not_found` for a thread (or intent) that the tenant does not have.
        """
        raise NotImplementedError
