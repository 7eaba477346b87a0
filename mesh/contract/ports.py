"""The shapes of what is handed into a room instead of being imported by it."""

from collections.abc import Sequence
from typing import Any, Protocol

from mesh.contract.messages import Announcement, Notice


class MeshPort(Protocol):
    """How the ledger tells the mesh what it has committed. Hints only: an implementation never raises."""

    async def announce(self, announcements: Sequence[Announcement]) -> None:
        """Offer ready intents to the nodes' standing bids."""

    async def forget(self, announcements: Sequence[Announcement]) -> None:
        """Take intents that need no node any more out of the book."""

    async def notify(self, notices: Sequence[Notice]) -> None:
        """Wake whoever watches these threads, and the node that must cancel."""


class SilentPort:
    """A mesh without a backplane: nodes poll, watchers poll."""

    async def announce(self, announcements: Sequence[Announcement]) -> None:
        """Do nothing."""

    async def forget(self, announcements: Sequence[Announcement]) -> None:
        """Do nothing."""

    async def notify(self, notices: Sequence[Notice]) -> None:
        """Do nothing."""


class Embedder(Protocol):
    """Text to vectors. `model_id` and `dimension` stand beside every vector that is stored."""

    @property
    def model_id(self) -> str:
        """Name and version of the model."""

    @property
    def is_ready(self) -> bool:
        """Whether `embed` can be expected to answer now."""

    async def embed(self, texts: Sequence[str], *, timeout_s: float) -> Any:
        """Return unit vectors, float32[n, dimension].

        Raises: MeshError `unavailable` when the model is loading, busy beyond its bound, or gone.
        """
