"""A thread's context as a worker would get it, and why.

Must never change the thread: looking is free of effects.
"""

from fastapi import APIRouter

from gateway.auth import CallerOf
from gateway.body import TenantRoute
from gateway.routes.parameters import ContextView, ExplainBody, GatewayOf, Id, TokensMax, Words
from gateway.state import Gateway
from ledger.context import open_share
from mesh.contract.template import ContextShare

router = APIRouter(tags=["context"], route_class=TenantRoute)


async def _explain(gateway: Gateway, tenant_id: str, thread_id: str, wanted: ExplainBody) -> ContextView:
    given = wanted.model_dump(include={"recent_turns", "older_turns"}, exclude_none=True)
    share = open_share(wanted.max_tokens or ContextShare().max_tokens).model_copy(update=given)
    context = await gateway.ledger.context.explain(
        tenant_id, thread_id, query=wanted.query, share=share, settings=wanted.settings
    )
    return ContextView(messages=[message.wire() for message in context.messages], receipt=context.receipt)


@router.get("/threads/{thread_id}/context", summary="Read a thread's context")
async def get_context(
    thread_id: Id, caller: CallerOf, gateway: GatewayOf, query: Words = None, max_tokens: TokensMax = None
) -> ContextView:
    """Return the messages within the budget, and the receipt."""
    return await _explain(gateway, caller.tenant_id, thread_id, ExplainBody(query=query, max_tokens=max_tokens))


@router.post("/threads/{thread_id}/context:explain", summary="Try other settings, dry")
async def explain_context(thread_id: Id, body: ExplainBody, caller: CallerOf, gateway: GatewayOf) -> ContextView:
    """Return what the context would be with these settings."""
    return await _explain(gateway, caller.tenant_id, thread_id, body)
