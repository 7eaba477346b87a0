"""A thread's context as a worker would get it, and why.

Must never change the thread: looking is free of effects.
"""

from fastapi import APIRouter

from gateway.auth import CallerOf
from gateway.body import TenantRoute
from gateway.routes.parameters import ContextView, ExplainBody, GatewayOf, Id, TokensMax, Words
from gateway.state import Gateway
from mesh.contract.template import ContextShare

router = APIRouter(tags=["context"], route_class=TenantRoute)


async def _build(gateway: Gateway, tenant_id: str, thread_id: str, settings: ExplainBody) -> ContextView:
    share = ContextShare.model_validate(settings.model_dump(exclude={"query"}, exclude_none=True))
    await gateway.ledger.threads.get(tenant_id, thread_id)
    context = await gateway.ledger.context.build(tenant_id, thread_id, query=settings.query, share=share)
    return ContextView(messages=[message.wire() for message in context.messages], receipt=context.receipt)


@router.get("/threads/{thread_id}/context", summary="Read a thread's context")
async def get_context(
    thread_id: Id, caller: CallerOf, gateway: GatewayOf, query: Words = None, max_tokens: TokensMax = None
) -> ContextView:
    """Return the messages within the budget, and the receipt."""
    return await _build(gateway, caller.tenant_id, thread_id, ExplainBody(query=query, max_tokens=max_tokens))


@router.post("/threads/{thread_id}/context:explain", summary="Try other settings, dry")
async def explain_context(thread_id: Id, body: ExplainBody, caller: CallerOf, gateway: GatewayOf) -> ContextView:
    """Return what the context would be with these settings."""
    return await _build(gateway, caller.tenant_id, thread_id, body)
