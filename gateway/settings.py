"""The gateway's settings; it keeps the ledger's too, because on SQLite both roles share one process.

Must never read anything but the environment.
"""

import ipaddress
from typing import Literal

from pydantic import Field

from ledger.settings import LedgerSettings


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class GatewaySettings(LedgerSettings):
    """Settings of `python -m gateway`. Units: bytes, seconds, counts."""

    host: str = Field("127.0.0.1", min_length=1, description="Address that the gateway listens on")
    port: int = Field(8080, ge=0, le=65535, description="Port that the gateway listens on; 0 takes a free one")
    access: Literal["auto", "locked", "open"] = Field(
        "auto",
        description=(
            "Who needs a key. auto: nobody on loopback until a key exists, and beyond loopback the gateway refuses to "
            "start without keys; locked: everybody, from the start (make the first key with the mesh token); open: "
            "nobody until a key exists, on any address"
        ),
    )
    body_bytes_max: int = Field(1024 * 1024, ge=1024, description="Largest body of a request")
    import_bytes_max: int = Field(8 * 1024 * 1024, ge=1024, description="Largest body of POST /threads/{id}/messages")
    header_bytes_max: int = Field(64 * 1024, ge=1024, description="Largest request line and headers together")
    header_timeout_s: float = Field(10.0, gt=0, description="A request's headers must be complete within this time")
    body_timeout_s: float = Field(30.0, gt=0, description="A request's body must be complete within this time")
    write_timeout_s: float = Field(30.0, gt=0, description="A client that reads nothing for this long is cut off")
    keep_alive_s: int = Field(15, ge=1, description="An idle connection is closed after this time")
    connections_max: int = Field(1024, ge=1, description="Open connections; further ones get 503")
    tenant_requests_max: int = Field(256, ge=1, description="Requests of one tenant at a time; further ones get 429")
    tenant_streams_max: int = Field(128, ge=1, description="Event streams of one tenant at a time")
    wait_max_s: float = Field(300.0, gt=0, description="Largest `wait` of POST /intent")
    stream_max_s: float = Field(3600.0, gt=0, description="An event stream ends after this time; clients resume it")
    ping_interval_s: float = Field(15.0, gt=0, description="A silent event stream carries a comment this often")
    poll_interval_s: float = Field(0.5, gt=0, description="How often waits and streams look when nothing wakes them")
    shutdown_grace_s: int = Field(10, ge=0, description="Running requests get this long to end at shutdown")
    ready_needs_redis: bool = Field(
        True, description="Whether /readyz goes red while the Redis that is configured does not answer"
    )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the gateway."""
        return is_loopback(self.host)
