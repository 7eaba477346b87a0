"""API keys, for those who run the mesh: the bearer is the mesh token.

Must never show a secret but in the answer that makes it.
"""

from datetime import datetime

from fastapi import APIRouter
from pydantic import BaseModel, Field

from gateway.auth import KeyKeeperOf
from gateway.body import TenantRoute
from gateway.routes.parameters import GatewayOf, Id, Page
from ledger.keys import KeyInfo
from mesh.contract.api import Body

router = APIRouter(prefix="/admin", tags=["keys"], route_class=TenantRoute)


class KeyBody(Body):
    """`POST /admin/keys`. A tenant that does not exist is made."""

    tenant_id: str = Field("local", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    label: str = Field("", max_length=200, description="What the key is for")


class KeyView(BaseModel):
    """A key without its secret."""

    key_id: str
    tenant_id: str
    label: str
    created_at: datetime
    revoked_at: datetime | None


class NewKey(KeyView):
    """A key with its secret, which is shown only here."""

    secret: str


def _members(key: KeyInfo) -> dict[str, object]:
    return {name: getattr(key, name) for name in KeyView.model_fields}


@router.post("/keys", status_code=201, summary="Make a key")
async def add_key(body: KeyBody, _: KeyKeeperOf, gateway: GatewayOf) -> NewKey:
    """Make a key for a tenant. From the first key on, every call but health needs one."""
    key, secret = await gateway.ledger.keys.add(body.tenant_id, body.label)
    return NewKey.model_validate({**_members(key), "secret": secret})


@router.get("/keys", summary="List keys")
async def list_keys(_: KeyKeeperOf, gateway: GatewayOf) -> Page[KeyView]:
    """Return every key, the revoked ones too, without secrets."""
    return Page(items=[KeyView.model_validate(_members(key)) for key in await gateway.ledger.keys.list()])


@router.delete("/keys/{key_id}", summary="Revoke a key")
async def revoke_key(key_id: Id, _: KeyKeeperOf, gateway: GatewayOf) -> KeyView:
    """Make a key useless from now on."""
    return KeyView.model_validate(_members(await gateway.ledger.keys.revoke(key_id)))
