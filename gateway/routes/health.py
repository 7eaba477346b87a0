"""Whether this process lives, whether it can serve, and what it counted.

Must never need a key (metrics aside), and never look healthy because a check hangs.
"""

import asyncio
from typing import Any, Literal

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from pydantic import BaseModel
from starlette.responses import Response

from gateway.auth import CallerOf
from gateway.body import PublicRoute, TenantRoute
from gateway.routes.parameters import GatewayOf
from gateway.state import Gateway
from mesh.contract.errors import ErrorCode, MeshError

CHECK_TIMEOUT_S = 2.0

router = APIRouter(tags=["health"], route_class=PublicRoute)
metrics_router = APIRouter(tags=["health"], route_class=TenantRoute)


class Alive(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """Every part that the gateway needs answers. `backplane` may be off or, when that is allowed, down."""

    status: Literal["ready"] = "ready"
    checks: dict[str, str]


_WHERE_TO_LOOK = {
    "ledger": "is the database of INTENTMESH_DATABASE_URL up? the gateway's log says more",
    "backplane": "is the Redis of INTENTMESH_REDIS_URL up?",
}


async def _check_ledger(gateway: Gateway) -> str:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await gateway.ledger.ping()
    except (MeshError, TimeoutError):
        return "down"
    return "ok"


async def _check_backplane(gateway: Gateway) -> str:
    if gateway.backplane is None:
        return "off"
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return "ok" if await gateway.backplane.ping() else "down"
    except TimeoutError:
        return "down"


@router.get("/healthz", summary="Does the process live?")
async def healthz() -> Alive:
    """Answer as long as the event loop turns."""
    return Alive()


@router.get("/readyz", summary="Can it serve? 503 with the failed check when not")
async def readyz(gateway: GatewayOf) -> Ready:
    """Ask the ledger and the backplane, each for two seconds at most."""
    ledger, backplane = await asyncio.gather(_check_ledger(gateway), _check_backplane(gateway))
    checks: dict[str, Any] = {"ledger": ledger, "backplane": backplane}
    is_red = ledger != "ok" or (backplane == "down" and gateway.settings.ready_needs_redis)
    if is_red or gateway.is_closing:
        down = [name for name, state in checks.items() if state == "down"]
        raise MeshError(
            ErrorCode.UNAVAILABLE,
            "shutting down" if gateway.is_closing else f"no answer from: {', '.join(down)}",
            hint="; ".join(_WHERE_TO_LOOK[name] for name in down) or "ask another gateway",
            retryable=True,
            retry_after_s=1,
            extra={"checks": checks},
        )
    return Ready(checks=checks)


@metrics_router.get(
    "/metrics",
    summary="What the process counted, for Prometheus",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text"}},
)
async def metrics(_: CallerOf) -> Response:
    """Return every counter of this process, the backplane's too."""
    return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)
