"""What a node's bid costs, which bid wins, and which waiting intent is next: pure, and the model of the Lua book.

Must never read a clock, a random number or Redis: everything comes in as a snapshot. The scripts in
mesh/backplane/lua decide the same, and tests hold them against this module.

The price: the sum of named parts in the template's unit (a capability costs 1.0 unless it says otherwise), so
that a budget can be read against it. A busy, cold, crowded or failing node costs more; a node that ran the thread's
last turn costs less, for that thread.

The turn: start-time fair queueing. Each tenant has a virtual finish time; an award costs it 1 / weight; whoever
would start first goes first, and idleness earns nothing (a start is never before the clock, which is the start
of what was served last). Among the even, the higher priority, then the older intent.
Source: Goyal, Vin, Cheng: Start-time Fair Queuing (SIGCOMM 1996).
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mesh.contract.messages import Announcement, Bid, Loser, PriceParts
from mesh.contract.template import Template

LOAD_MAX = 1.0
COLD_START = 0.5
MEMORY_PRESSURE_MAX = 2.0
MEMORY_PRESSURE_FROM_SHARE = 0.75
FAILURE_STEP = 0.25
FAILURES_MAX = 2.0
AFFINITY_DISCOUNT = 0.4
LOSERS_MAX = 5


@dataclass(frozen=True)
class NodeSnapshot:
    """A node at the moment of bidding.

    Args:
        slots: how many workers it runs at most; `free_slots` of them are free.
        memory_share: used part of the memory that it may use, 0 to 1.
        warm: capabilities whose zygote stands by.
        recent_failures: failed attempts of the last minutes, by capability, those that were the node's fault.
    """

    slots: int
    free_slots: int
    memory_share: float = 0.0
    warm: frozenset[str] = frozenset()
    recent_failures: Mapping[str, int] = field(default_factory=dict)


def price(snapshot: NodeSnapshot, capability: Template) -> PriceParts:
    """Return what this node asks for one intent of the capability."""
    busy_share = 1 - min(max(snapshot.free_slots / max(snapshot.slots, 1), 0.0), 1.0)
    # What is not a number says nothing about pressure.
    memory_share = snapshot.memory_share if math.isfinite(snapshot.memory_share) else 0.0
    over_share = (memory_share - MEMORY_PRESSURE_FROM_SHARE) / (1 - MEMORY_PRESSURE_FROM_SHARE)
    failures = max(0, snapshot.recent_failures.get(capability.name, 0))
    return PriceParts(
        base=capability.price,
        load=LOAD_MAX * busy_share,
        cold_start=0.0 if capability.name in snapshot.warm else COLD_START,
        memory_pressure=MEMORY_PRESSURE_MAX * min(max(over_share, 0.0), 1.0),
        recent_failures=min(FAILURES_MAX, FAILURE_STEP * failures),
    )


def make_bids(node_id: str, snapshot: NodeSnapshot, capabilities: Iterable[Template]) -> list[Bid]:
    """Return the node's standing bids, one for each capability."""
    return [
        Bid(
            node_id=node_id,
            capability=capability.name,
            parts=price(snapshot, capability),
            affinity_discount=AFFINITY_DISCOUNT if capability.supports_multi_turn else 0.0,
        )
        for capability in capabilities
    ]


@dataclass(frozen=True)
class Offer:
    """A standing bid, and whether its node has a slot for it now."""

    bid: Bid
    has_slot: bool = True

    def parts(self, last_node_id: str | None) -> PriceParts:
        """The price for a thread whose last turn `last_node_id` ran."""
        return self.bid.parts_with_affinity if self.bid.node_id == last_node_id else self.bid.parts


@dataclass(frozen=True)
class Choice:
    """The winner with its price, and the first of the others in the order of price, each with the reason."""

    winner: Offer | None
    parts: PriceParts | None
    losers: list[Loser]


def choose(
    announcement: Announcement,
    offers: Iterable[Offer],
    *,
    last_node_id: str | None = None,
    excluded: Collection[str] = (),
) -> Choice:
    """Return the cheapest admissible offer; equal prices go by the node's name, bytewise.

    Admissible: not excluded, with a slot, within the intent's budget.
    """
    priced = [(offer.parts(last_node_id), offer) for offer in offers if offer.bid.capability == announcement.capability]
    priced.sort(key=lambda item: (item[0].total, item[1].bid.node_id.encode()))
    budget = math.inf if announcement.budget is None else announcement.budget
    winner, winning_parts = None, None
    losers: list[Loser] = []
    for parts, offer in priced:
        if offer.bid.node_id in excluded:
            reason = "excluded"
        elif not offer.has_slot:
            reason = "no_slot"
        elif parts.total > budget:
            reason = "over_budget"
        elif winner is not None:
            reason = "outbid"
        else:
            winner, winning_parts = offer, parts
            continue
        losers.append(Loser(node_id=offer.bid.node_id, price=parts.total, reason=reason))
    return Choice(winner, winning_parts, losers[:LOSERS_MAX])


@dataclass
class Shares:
    """How much each tenant had of what was scarce, in virtual time."""

    clock: float = 0.0
    finish: dict[str, float] = field(default_factory=dict)

    def start(self, tenant_id: str) -> float:
        """When the tenant's next intent would start."""
        return max(self.clock, self.finish.get(tenant_id, 0.0))

    def charge(self, intent: Announcement) -> None:
        """Count an intent that was served out of the queue."""
        self.clock = self.start(intent.tenant_id)
        self.finish[intent.tenant_id] = self.clock + 1 / intent.tenant_weight


def in_turn(waiting: Sequence[Announcement], shares: Shares) -> list[Announcement]:
    """Return the waiting intents, the one whose turn it is first (each tenant judged by its next intent)."""
    return sorted(
        waiting,
        key=lambda intent: (
            shares.start(intent.tenant_id),
            -intent.priority,
            intent.accepted_at_ms,
            intent.intent_id.encode(),
        ),
    )
