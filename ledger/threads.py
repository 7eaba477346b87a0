"""Threads: their state, their turns, their pins, imported history, and erasing all of it.

Must never rewrite a turn, and never answer for another tenant's thread.
"""

from mesh.contract.api import ImportMessages, OwnerBody, PinView, ThreadView, TurnView


class Threads:
    """Conversations as callers see them."""

    async def get_or_create_by_owner(self, tenant_id: str, owner: OwnerBody) -> tuple[ThreadView, bool]:
        """Return the thread of a channel's conversation and whether it was made now."""
        raise NotImplementedError

    async def get(self, tenant_id: str, thread_id: str) -> ThreadView:
        """Return one thread.

        Raises: MeshError `not_found`.
        """
        raise NotImplementedError

    async def list(
        self, tenant_id: str, *, cursor: str | None = None, limit: int = 50
    ) -> tuple[list[ThreadView], str | None]:
        """Return a page of threads, newest first, and the cursor of the next page (None at the end)."""
        raise NotImplementedError

    async def turns(
        self, tenant_id: str, thread_id: str, *, cursor: str | None = None, limit: int = 50
    ) -> tuple[list[TurnView], str | None]:
        """Return a page of turns, oldest first, and the cursor of the next page (None at the end).

        Raises: MeshError `not_found`, `invalid_request` for a cursor that is none.
        """
        raise NotImplementedError

    async def import_messages(self, tenant_id: str, thread_id: str, history: ImportMessages) -> dict[str, int]:
        """Append history: {"imported", "skipped", "turn_count"}. An unknown thread is made."""
        raise NotImplementedError

    async def pins(self, tenant_id: str, thread_id: str) -> list[PinView]:
        """Return the pins of a thread by key.

        Raises: MeshError `not_found`.
        """
        raise NotImplementedError

    async def get_pin(self, tenant_id: str, thread_id: str, key: str) -> PinView:
        """Return one pin.

        Raises: MeshError `not_found`.
        """
        raise NotImplementedError

    async def put_pin(self, tenant_id: str, thread_id: str, key: str, text: str) -> PinView:
        """Set a pin.

        Raises: MeshError `not_found`, `invalid_request`, `too_large` (too many pins).
        """
        raise NotImplementedError

    async def delete_pin(self, tenant_id: str, thread_id: str, key: str) -> None:
        """Remove a pin.

        Raises: MeshError `not_found`.
        """
        raise NotImplementedError

    async def delete(self, tenant_id: str, thread_id: str) -> None:
        """Erase a thread and all that came from it, in one transaction.

        Raises: MeshError `not_found`, `conflict` while one of its intents is unfinished.
        """
        raise NotImplementedError
