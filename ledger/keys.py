"""API keys: which tenant a secret belongs to.

Must never store, log or return a secret after it was made: the table holds its sha256. Comparing hashes by index
leaks nothing about a secret of 32 random bytes.
"""

import builtins
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.models import api_keys, now_ms, tenants
from ledger.store import Row, Store
from ledger.times import to_time
from mesh.contract import canonical_json
from mesh.contract.errors import ErrorCode, MeshError, not_found
from mesh.contract.ids import check_thread_id, new_id

PREFIX = "im_"
LABEL_CHARS_MAX = 200
TENANT_CHARS_MAX = 64
SECRET_CHARS_MAX = 200


@dataclass(frozen=True)
class KeyInfo:
    """A key without its secret."""

    key_id: str
    tenant_id: str
    label: str
    created_at: datetime
    revoked_at: datetime | None


def _info(row: Row) -> KeyInfo:
    return KeyInfo(
        key_id=row["key_id"],
        tenant_id=row["tenant_id"],
        label=row["label"],
        created_at=to_time(row["created_at_ms"]),
        revoked_at=to_time(row["revoked_at_ms"]),
    )


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class Keys:
    """Makes, lists, revokes and recognises API keys."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def add(self, tenant_id: str, label: str) -> tuple[KeyInfo, str]:
        """Make a key for a tenant (made too when new) and return it with its secret, which is shown only here.

        Raises: MeshError `invalid_request`, `invalid_json`.
        """
        canonical_json.check(label)
        try:
            check_thread_id(tenant_id)
        except ValueError as error:
            raise MeshError(ErrorCode.INVALID_REQUEST, f"a tenant {error}", field="tenant_id") from error
        if not 1 <= len(tenant_id) <= TENANT_CHARS_MAX:
            raise MeshError(
                ErrorCode.INVALID_REQUEST, f"a tenant has 1 to {TENANT_CHARS_MAX} characters", field="tenant_id"
            )
        if len(label) > LABEL_CHARS_MAX:
            raise MeshError(
                ErrorCode.INVALID_REQUEST, f"a label has at most {LABEL_CHARS_MAX} characters", field="label"
            )
        secret = PREFIX + secrets.token_urlsafe(32)

        async def work(connection: AsyncConnection) -> Row:
            dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
            tenant = dialect.insert(tenants).values(tenant_id=tenant_id, created_at_ms=now_ms())
            await connection.execute(tenant.on_conflict_do_nothing())
            key = insert(api_keys).values(
                key_id=new_id(),
                tenant_id=tenant_id,
                label=label,
                secret_sha256=_hash(secret),
                created_at_ms=now_ms(),
            )
            return (await connection.execute(key.returning(*api_keys.c))).mappings().one()

        return _info(await self._store.write(work)), secret

    async def list(self) -> builtins.list[KeyInfo]:
        """Return all keys, newest first, the revoked ones too."""

        async def work(connection: AsyncConnection) -> builtins.list[Row]:
            statement = select(api_keys).order_by(api_keys.c.created_at_ms.desc(), api_keys.c.key_id.desc())
            return list((await connection.execute(statement)).mappings())

        return [_info(row) for row in await self._store.read(work)]

    async def revoke(self, key_id: str) -> KeyInfo:
        """Make a key useless from now on. Revoking twice is no error.

        Raises: MeshError `not_found`.
        """
        statement = (
            update(api_keys)
            .where(api_keys.c.key_id == key_id)
            .values(revoked_at_ms=func.coalesce(api_keys.c.revoked_at_ms, now_ms()))
            .returning(*api_keys.c)
        )

        async def work(connection: AsyncConnection) -> Row | None:
            return (await connection.execute(statement)).mappings().one_or_none()

        row = await self._store.write(work, is_repeatable=True)
        if row is None:
            raise not_found("key", key_id, listed_at="/admin/keys")
        return _info(row)

    async def has_any(self) -> bool:
        """Whether a key was ever made: from then on every call needs one, even when all are revoked."""

        async def work(connection: AsyncConnection) -> bool:
            return (await connection.execute(select(api_keys.c.key_id).limit(1))).one_or_none() is not None

        return await self._store.read(work)

    async def tenant_of(self, secret: str) -> str | None:
        """Return the tenant of a secret, None for an unknown or revoked one."""
        if not secret.startswith(PREFIX) or len(secret) > SECRET_CHARS_MAX:
            return None
        digest = _hash(secret)
        statement = select(api_keys.c.tenant_id, api_keys.c.secret_sha256).where(
            api_keys.c.secret_sha256 == digest, api_keys.c.revoked_at_ms.is_(None)
        )

        async def work(connection: AsyncConnection) -> tuple[str, str] | None:
            row = (await connection.execute(statement)).one_or_none()
            return None if row is None else (row.tenant_id, row.secret_sha256)

        found = await self._store.read(work)
        return found[0] if found is not None and hmac.compare_digest(found[1], digest) else None
