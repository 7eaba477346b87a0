"""The book as a plain Python object over mesh.bidding: what the Lua scripts must do, without Redis.

Must never be clever: it looks at everything, every time.
"""

from dataclasses import dataclass, field

from mesh.bidding import Offer, Shares, choose, in_turn
from mesh.contract.messages import Announcement, Award, Bid


@dataclass
class BookModel:
    """Nodes with their bids and free slots, waiting intents, shares, exclusions, and who ran a thread last."""

    bids: dict[str, list[Bid]] = field(default_factory=dict)
    free: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, Announcement] = field(default_factory=dict)
    awarded: dict[str, tuple[str, Announcement]] = field(default_factory=dict)
    excluded: dict[str, set[str]] = field(default_factory=dict)
    last: dict[tuple[str, str], str] = field(default_factory=dict)
    unread: dict[str, list[Award]] = field(default_factory=dict)
    shares: Shares = field(default_factory=Shares)

    def _award(self, intent: Announcement) -> Award | None:
        offers = [Offer(bid, self.free[node] > 0) for node, bids in self.bids.items() for bid in bids]
        choice = choose(
            intent,
            offers,
            last_node_id=self.last.get((intent.tenant_id, intent.thread_id)),
            excluded=self.excluded.get(intent.intent_id, set()),
        )
        if choice.winner is None or choice.parts is None:
            return None
        node = choice.winner.bid.node_id
        self.free[node] -= 1
        self.waiting.pop(intent.intent_id, None)
        self.awarded[intent.intent_id] = (node, intent)
        self.last[intent.tenant_id, intent.thread_id] = node
        return Award(
            tenant_id=intent.tenant_id,
            intent_id=intent.intent_id,
            thread_id=intent.thread_id,
            capability=intent.capability,
            node_id=node,
            price=choice.parts.total,
            parts=choice.parts,
            losers=choice.losers,
            awarded_at_ms=0,
        )

    def _place(self, intent: Announcement) -> Award | None:
        award = self._award(intent)
        if award is None:
            self.waiting[intent.intent_id] = intent
        else:
            self.unread.setdefault(award.node_id, []).append(award)
        return award

    def announce(self, intent: Announcement) -> str:
        """What becomes of it: awarded, pending or duplicate."""
        mark = self.awarded.get(intent.intent_id)
        if mark is not None and intent.attempt <= mark[1].attempt:
            return "duplicate"
        return "pending" if self._place(intent) is None else "awarded"

    def read(self, node_id: str) -> list[Award]:
        """The awards that the node had not read."""
        return self.unread.pop(node_id, [])

    def bid(self, node_id: str, free_slots: int, bids: list[Bid]) -> list[Award]:
        """The awards in the reply."""
        self.bids[node_id] = bids
        self.free[node_id] = max(0, free_slots - len(self.unread.get(node_id, [])))
        awards = []
        while self.free[node_id] > 0:
            for intent in in_turn(list(self.waiting.values()), self.shares):
                if self._can_take(node_id, intent):
                    break
            else:
                break
            self.shares.charge(intent)
            award = self._award(intent)
            assert award is not None
            if award.node_id == node_id:
                awards.append(award)
            else:
                self.unread.setdefault(award.node_id, []).append(award)
        return awards

    def _can_take(self, node_id: str, intent: Announcement) -> bool:
        own = [Offer(bid) for bid in self.bids[node_id]]
        last = self.last.get((intent.tenant_id, intent.thread_id))
        excluded = self.excluded.get(intent.intent_id, set())
        return choose(intent, own, last_node_id=last, excluded=excluded).winner is not None

    def _give_back(self, node_id: str, intent_id: str) -> None:
        holder, intent = self.awarded.get(intent_id, ("", None))
        if holder == node_id and intent is not None:
            del self.awarded[intent_id]
            self._place(intent)

    def decline(self, node_id: str, intent: Announcement) -> None:
        """Pass the node over for this intent, and place it anew when the node holds it."""
        self.excluded.setdefault(intent.intent_id, set()).add(node_id)
        if self.last.get((intent.tenant_id, intent.thread_id)) == node_id:
            del self.last[intent.tenant_id, intent.thread_id]
        self._give_back(node_id, intent.intent_id)

    def withdraw(self, node_id: str) -> None:
        """Drop the bids; what the node had not read goes elsewhere."""
        unread = self.read(node_id)
        self.bids.pop(node_id, None)
        self.free.pop(node_id, None)
        for award in unread:
            self._give_back(node_id, award.intent_id)

    def forget(self, intent: Announcement) -> None:
        """Drop all that is known about the intent."""
        for known in (self.waiting, self.awarded, self.excluded):
            known.pop(intent.intent_id, None)
