"""HTTP on the socket: uvicorn with the bounds that it leaves open, and a shutdown that ends streams first.

Adds to uvicorn's httptools protocol: a time limit for headers, a size limit for the request line, headers, trailers
and chunk extensions, a cap on connections, a cut for clients that do not read, and problem documents for what never
reaches the application. Must never touch a body.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.http_errors import problem
from gateway.settings import GatewaySettings
from mesh.contract.errors import ErrorCode, MeshError, unavailable


def _wire_bytes(response: Response) -> bytes:
    headers = b"".join(b"%s: %s\r\n" % pair for pair in response.raw_headers)
    return STATUS_LINE[response.status_code] + headers + b"connection: close\r\n\r\n" + bytes(response.body)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `settings` is set on a subclass, since uvicorn makes the instances."""

    settings: GatewaySettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        # Bytes since the parser last made sense of any: an endless header line or chunk extension.
        self._unread_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, unless there are too many."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._arm_header_timer()
        if len(self.connections) > self.settings.connections_max:
            self._refuse(unavailable("this gateway has as many connections as it can serve"))

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._cancel_header_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, with a bound on what it keeps."""
        self._unread_bytes += len(data)
        super().data_received(data)
        if max(self._unread_bytes, self._header_bytes) > self.settings.header_bytes_max:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        """Start counting one request's headers."""
        super().on_message_begin()
        self._header_bytes = 0
        self._arm_header_timer()

    def on_url(self, url: bytes) -> None:
        """Count the request line."""
        self._header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer."""
        self._unread_bytes = 0
        self._header_bytes += len(name) + len(value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are here: the application has the next word."""
        self._unread_bytes = 0
        self._cancel_header_timer()
        if self._header_bytes > self.settings.header_bytes_max:
            self._refuse_headers()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._unread_bytes = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client reads too slowly: give it some time."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.settings.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        hint = "send HTTP/1.1 as RFC 9112 defines it"
        self._refuse(MeshError(ErrorCode.INVALID_REQUEST, "this is not a valid HTTP request", hint=hint))

    def _arm_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.settings.header_timeout_s, self._on_header_timeout)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        detail = f"the headers were not complete after {self.settings.header_timeout_s:g} s"
        self._refuse(MeshError(ErrorCode.TOO_SLOW, detail, hint="send them again", retryable=True))

    def _refuse_headers(self) -> None:
        detail = f"the headers are larger than the {self.settings.header_bytes_max} bytes allowed"
        self._refuse(MeshError(ErrorCode.HEADERS_TOO_LARGE, detail, hint="send fewer or shorter ones"))

    def _refuse(self, error: MeshError) -> None:
        """Answer and close; while another answer is under way on this connection, only close."""
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            if self.cycle is not None:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self.transport.write(_wire_bytes(problem(error)))
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn, told by its owner when to stop (`should_exit`), and telling streams before it waits for them."""

    def __init__(
        self, config: uvicorn.Config, listening: socket.socket, *, on_shutdown: Callable[[], None] | None = None
    ) -> None:
        super().__init__(config)
        self._listening = listening
        self._on_shutdown = on_shutdown

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on the socket that was given at first, until told to stop."""
        await super().serve(sockets or [self._listening])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process's owner: it may run more than one server."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, end streams, wait for the rest."""
        if self._on_shutdown is not None:
            self._on_shutdown()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that will listen on `host` and `port`; 0 takes a free port.

    Raises: MeshError `conflict` (taken), `invalid_request` (no address of this machine), `forbidden`.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise MeshError(ErrorCode.INVALID_REQUEST, f"{host} is no address: {error.strerror}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            code, hint = ErrorCode.CONFLICT, "stop what listens there, or choose another port"
        elif error.errno == errno.EACCES:
            code, hint = ErrorCode.FORBIDDEN, "ports below 1024 are for root: choose another one"
        else:
            code, hint = ErrorCode.INVALID_REQUEST, "choose an address of this machine, for example 127.0.0.1"
        raise MeshError(code, f"cannot listen on {host}:{port}: {error.strerror}", hint=hint) from error
    return listening


def server_config(app: ASGIApp, settings: GatewaySettings) -> uvicorn.Config:
    """Return uvicorn's configuration for one face."""
    protocol = type("GatewayProtocol", (BoundedProtocol,), {"settings": settings})
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="uvloop",
        lifespan="off",
        log_config=None,
        # What clients send wrong is answered and counted, not logged line by line.
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=settings.shutdown_grace_s,
    )
