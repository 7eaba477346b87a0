"""When a node must stop trusting a lease that it could not renew. Pure: the caller hands in the time.

Must never be judged by wall time: a clock that jumps would keep a dead lease alive.
"""

from dataclasses import dataclass


@dataclass
class Lease:
    """One attempt's lease as its node sees it. Units: seconds of the monotonic clock.

    `renewed_at_s` is taken before the renewing call is sent, so the ledger's own expiry is never earlier than
    `renewed_at_s + ttl_s`; `margin_s` before that the worker must be gone.
    """

    ttl_s: float
    margin_s: float
    renewed_at_s: float

    def renew(self, sent_at_s: float) -> None:
        """Note a renewal that the ledger confirmed and that was sent at `sent_at_s`."""
        self.renewed_at_s = max(self.renewed_at_s, sent_at_s)

    @property
    def ends_at_s(self) -> float:
        """The moment at which the worker must be gone. A margin never eats more than half of the lease."""
        return self.renewed_at_s + self.ttl_s - min(self.margin_s, self.ttl_s / 2)

    def is_over(self, now_s: float) -> bool:
        """Whether the worker must be killed now."""
        return now_s >= self.ends_at_s


def renew_interval_s(ttl_s: float) -> float:
    """Return how often to renew: three chances in each lease."""
    return ttl_s / 3
