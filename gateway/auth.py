"""Who calls: which tenant a key belongs to, and who may run the mesh itself.

Must never let a caller in because something failed: no answer from the ledger is no entry.
"""

import hmac
import ipaddress
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Security
from fastapi.security import HTTPBearer
from starlette.requests import Request

from gateway.settings import GatewaySettings
from gateway.state import Gateway
from mesh.contract.errors import ErrorCode, MeshError

LOCAL_TENANT = "local"

bearer = HTTPBearer(
    auto_error=False, description="An API key (`intentmesh keys add`); for operators' calls the mesh token"
)


@dataclass(frozen=True)
class Caller:
    """Who calls. An operator runs the mesh; `has_mesh_token` says that he proved it."""

    tenant_id: str
    is_operator: bool = False
    has_mesh_token: bool = False


def _bearer_of(request: Request) -> str | None:
    header = request.headers.get("authorization")
    if header is None:
        return None
    scheme, _, secret = header.partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise MeshError(
            ErrorCode.UNAUTHORIZED, "the Authorization header is not 'Bearer KEY'", hint="send Authorization: Bearer …"
        )
    return secret.strip()


def is_mesh_token(gateway: Gateway, secret: str) -> bool:
    """Whether `secret` is the mesh token."""
    token = gateway.settings.mesh_token
    return token is not None and hmac.compare_digest(secret.encode(), token.get_secret_value().encode())


def _is_own_name(name: str, settings: GatewaySettings) -> bool:
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name in {"localhost", settings.host.lower()}


def check_origin(request: Request, settings: GatewaySettings) -> None:
    """While nobody needs a key, answer only under this machine's own names and to no foreign web page: any page
    that a person opens could otherwise reach the mesh (DNS rebinding, cross-site requests).

    Raises: MeshError `forbidden`.
    """
    if not settings.is_loopback:
        return
    host = request.headers.get("host", "").lower()
    origin = request.headers.get("origin")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if not _is_own_name(name, settings) or (origin is not None and origin.lower().partition("://")[2] != host):
        raise MeshError(
            ErrorCode.FORBIDDEN,
            "without keys this gateway answers only under this machine's own names, and to no other web site",
            hint="call it as http://127.0.0.1, or make a key: intentmesh keys add",
        )


async def authenticate(request: Request, gateway: Gateway) -> Caller:
    """Return who calls.

    Raises: MeshError `unauthorized`, `forbidden`, `unavailable` (the ledger does not answer).
    """
    secret = _bearer_of(request)
    if secret is not None:
        if is_mesh_token(gateway, secret):
            return Caller(LOCAL_TENANT, is_operator=True, has_mesh_token=True)
        tenant_id = await gateway.ledger.keys.tenant_of(secret)
        if tenant_id is not None:
            return Caller(tenant_id)
    settings = gateway.settings
    may_be_open = settings.access == "open" or (settings.access == "auto" and settings.is_loopback)
    if may_be_open and not await gateway.ledger.keys.has_any():
        check_origin(request, settings)
        return Caller(LOCAL_TENANT, is_operator=True)
    raise MeshError(
        ErrorCode.UNAUTHORIZED,
        "this key is unknown or revoked" if secret is not None else "this call needs a key",
        hint="send Authorization: Bearer KEY; intentmesh keys add makes one",
    )


def _caller(request: Request, _: Annotated[object, Security(bearer)]) -> Caller:
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


def _refuse_operation() -> MeshError:
    return MeshError(
        ErrorCode.FORBIDDEN,
        "this call is for those who run the mesh",
        hint="send the mesh token (INTENTMESH_MESH_TOKEN) as the bearer",
    )


def _operator(caller: Annotated[Caller, Depends(_caller)]) -> Caller:
    if not caller.is_operator:
        raise _refuse_operation()
    return caller


def _key_keeper(caller: Annotated[Caller, Depends(_caller)]) -> Caller:
    # Not even where nobody needs a key: the first key locks everybody out who has none, for good.
    if not caller.has_mesh_token:
        raise _refuse_operation()
    return caller


CallerOf = Annotated[Caller, Depends(_caller)]
OperatorOf = Annotated[Caller, Depends(_operator)]
KeyKeeperOf = Annotated[Caller, Depends(_key_keeper)]
