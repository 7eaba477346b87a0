"""Short ways to make the messages of bidding, for tests."""

import itertools
from typing import Any

from mesh.contract.messages import Announcement, Bid, PriceParts

_count = itertools.count(1)


def announcement(intent_id: str | None = None, **fields: Any) -> Announcement:
    """An intent for capability `echo` of tenant `local` in a thread of its own; older than the next one made."""
    number = next(_count)
    values: dict[str, Any] = {
        "tenant_id": "local",
        "intent_id": intent_id or f"intent-{number:06}",
        "thread_id": f"thread-{number:06}",
        "capability": "echo",
        "accepted_at_ms": 1_790_000_000_000 + number,
    }
    return Announcement(**(values | fields))


def bid(node_id: str, price: float = 1.0, capability: str = "echo", *, affinity_discount: float = 0.0) -> Bid:
    """A bid whose price is all base."""
    return Bid(
        node_id=node_id,
        capability=capability,
        parts=PriceParts(base=price),
        affinity_discount=affinity_discount,
    )
