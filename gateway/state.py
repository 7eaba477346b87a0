"""What one gateway process holds while it runs, handed to every route.

Must never hold the state of an intent: that is the ledger's.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import Request

from gateway.catalogue import Catalogue
from gateway.settings import GatewaySettings
from ledger.ledger import Ledger
from mesh.backplane.backplane import Backplane
from mesh.backplane.notice_board import NoticeBoard
from mesh.contract.errors import ErrorCode, MeshError


class Slots:
    """Counts what each tenant has open of one kind, and refuses what goes beyond the bound."""

    def __init__(self, noun: str, limit: int) -> None:
        self._noun = noun
        self._limit = limit
        self._open: Counter[str] = Counter()

    @contextmanager
    def take(self, tenant_id: str) -> Iterator[None]:
        """Hold one slot for as long as the block runs.

        Raises: MeshError `too_many_requests`.
        """
        if self._open[tenant_id] >= self._limit:
            raise MeshError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{self._limit} {self._noun} of this tenant are open already",
                hint="close some, or send fewer at a time",
                retryable=True,
                retry_after_s=1,
            )
        self._open[tenant_id] += 1
        try:
            yield
        finally:
            self._open[tenant_id] -= 1
            if not self._open[tenant_id]:
                del self._open[tenant_id]


@dataclass
class Gateway:
    """The parts of one gateway. `is_closing` ends waits and streams, so that a shutdown is short."""

    settings: GatewaySettings
    ledger: Ledger
    backplane: Backplane | None
    board: NoticeBoard
    catalogue: Catalogue = field(init=False)
    requests: Slots = field(init=False)
    streams: Slots = field(init=False)
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.catalogue = Catalogue(self.ledger.nodes)
        self.requests = Slots("requests", self.settings.tenant_requests_max)
        self.streams = Slots("event streams", self.settings.tenant_streams_max)

    @property
    def is_closing(self) -> bool:
        """Whether the process is on its way out."""
        return self.closing.is_set()

    @property
    def poll_interval_s(self) -> float:
        """How long to trust that a wake will come: longer while the backplane works."""
        scale = 4 if self.backplane is not None and self.backplane.is_up else 1
        return self.settings.poll_interval_s * scale


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves this request."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway
