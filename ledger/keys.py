"""API keys: which tenant a secret belongs to.

Must never store, log or return a secret after it was made: the table holds its sha256.
"""

from dataclasses import dataclass
from datetime import datetime

from ledger.store import Store


@dataclass(frozen=True)
class KeyInfo:
    """A key without its secret."""

    key_id: str
    tenant_id: str
    label: str
    created_at: datetime
    revoked_at: datetime | None


class Keys:
    """Makes, lists, revokes and recognises API keys."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def add(self, tenant_id: str, label: str) -> tuple[KeyInfo, str]:
        """Make a key for a tenant (made too when new) and return it with its secret, which is shown only here."""
        raise NotImplementedError

    async def list(self) -> list[KeyInfo]:
        """Return all keys, newest first, the revoked ones too."""
        raise NotImplementedError

    async def revoke(self, key_id: str) -> KeyInfo:
        """Make a key useless from now on. Revoking twice is no error.

        Raises: MeshError `not_found`.
        """
        raise NotImplementedError

    async def has_any(self) -> bool:
        """Whether a key was ever made: from then on every call needs one, even when all are revoked."""
        raise NotImplementedError

    async def tenant_of(self, secret: str) -> str | None:
        """Return the tenant of a secret, None for an unknown or revoked one."""
        raise NotImplementedError
