"""Names of the keys in Redis that Python itself touches; lua/book.lua lists all of them and makes the rest.

Every key begins with one hash tag, `{prefix}`, so the whole mesh lies in one slot of a cluster. The reason: a
node's slots are shared by all its capabilities, so one award changes the node, the book of each of its
capabilities, and a tenant's share, and that has to be one atomic step. The price is that one shard carries the
book; it does a few tens of microseconds of work for an intent. Two meshes on one server take two prefixes.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Keys:
    """The keys of one mesh."""

    prefix: str

    def __post_init__(self) -> None:
        if not self.prefix or set(self.prefix) & set("{} \t\r\n"):
            raise ValueError(f"the prefix {self.prefix!r} may not be empty, nor hold braces or white space")

    @property
    def root(self) -> str:
        """What every key begins with, and the one key that every script is called with."""
        return "{" + self.prefix + "}"

    @property
    def notices(self) -> str:
        """Stream of notices to all gateways, capped."""
        return f"{self.root}:notices"

    @property
    def probe(self) -> str:
        """Written to learn whether the server takes writes."""
        return f"{self.root}:probe"

    def wakes(self, node_id: str) -> str:
        """Stream of awards and cancellations for one node."""
        return f"{self.root}:wakes:{node_id}"
