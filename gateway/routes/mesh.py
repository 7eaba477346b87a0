"""What can run, and where: capabilities and nodes. They belong to the mesh, not to a tenant.

Must never show what a tenant runs.
"""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from gateway.auth import CallerOf, OperatorOf
from gateway.body import TenantRoute
from gateway.routes.parameters import GatewayOf, Id, Page
from mesh.contract.api import NodeView
from mesh.contract.template import ContextShare, Limits, Template

router = APIRouter(tags=["mesh"], route_class=TenantRoute)


class CapabilityView(BaseModel):
    """A capability as a caller needs to know it. `is_available`: a node that is up can run it."""

    name: str
    version: str
    description: str
    is_available: bool
    supports_multi_turn: bool
    runtime: str
    isolation: str
    input_schema: dict[str, Any]
    context: ContextShare
    limits: Limits
    triggers: list[str]
    tools: list[str]
    price: float


def _view(template: Template, is_available: bool) -> CapabilityView:
    shown = template.model_dump(include=set(CapabilityView.model_fields))
    return CapabilityView(is_available=is_available, **shown)


@router.get("/capabilities", summary="List what can run")
async def list_capabilities(_: CallerOf, gateway: GatewayOf) -> Page[CapabilityView]:
    """Return every capability that a node ever brought."""
    return Page(items=[_view(*known) for known in await gateway.ledger.nodes.capabilities()])


@router.get("/nodes", summary="List nodes")
async def list_nodes(_: CallerOf, gateway: GatewayOf) -> Page[NodeView]:
    """Return every node, the lost ones too."""
    return Page(items=await gateway.ledger.nodes.list())


@router.post("/nodes/{node_id}/drain", summary="Ask a node to take no more work")
async def drain(node_id: Id, _: OperatorOf, gateway: GatewayOf) -> NodeView:
    """Let a node finish what it runs and take nothing more; for operators, once there are keys."""
    return await gateway.ledger.nodes.drain(node_id)
