"""Waiting for an intent's outcome on a caller's behalf.

Must never touch the intent: its life does not depend on who waits, and a wait that fails is an unfinished one.
"""

import asyncio
import time

from starlette.requests import Request

from gateway.state import Gateway
from mesh.contract.api import IntentView
from mesh.contract.errors import MeshError
from mesh.contract.states import TERMINAL

# A streaming turn wakes its watchers for every delta; look no more often than this.
_LOOK_INTERVAL_S = 0.02


async def wait_for_outcome(
    gateway: Gateway, request: Request, tenant_id: str, intent: IntentView, timeout_s: float
) -> IntentView:
    """Return the intent once it is terminal, or as it stands after `timeout_s`, or when nobody listens any more."""
    deadline = time.monotonic() + timeout_s
    may_look_at = 0.0
    async with gateway.board.watch(tenant_id, intent.thread_id) as watch:
        while intent.status not in TERMINAL:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or gateway.is_closing or await request.is_disconnected():
                break
            await watch.wait(min(left_s, gateway.poll_interval_s))
            await asyncio.sleep(max(0.0, min(may_look_at, deadline) - time.monotonic()))
            may_look_at = time.monotonic() + _LOOK_INTERVAL_S
            try:
                intent = await gateway.ledger.intents.get(tenant_id, intent.intent_id)
            except MeshError as error:
                if not error.retryable:
                    break
    return intent
