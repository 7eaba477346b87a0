"""The outermost layer: what holds for every request, known route or not.

Checks the target's encoding, gives the request an id, counts and times it, turns a bug into a problem document, and
closes a connection whose body was not read to its end, after a short drain so that the client sees the answer.
Must never read a body, the bounded drain aside, and never log one.
"""

import asyncio
import time
from contextlib import suppress
from urllib.parse import unquote_to_bytes

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import metrics
from gateway.http_errors import problem
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.ids import new_id

# How long, and how much, an unwanted body is drained after its answer was sent.
LINGER_S = 2.0
LINGER_BYTES_MAX = 256 * 1024 * 1024
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})

log = structlog.get_logger()


def check_target(scope: Scope) -> None:
    """Refuse a path or query that is not UTF-8 or holds a NUL: the server would change it silently.

    Raises: MeshError `invalid_request`.
    """
    for place, raw in (("path", scope.get("raw_path") or b""), ("query", scope["query_string"])):
        try:
            text = unquote_to_bytes(raw).decode("utf-8")
        except UnicodeDecodeError:
            text = "\x00"
        if "\x00" in text:
            raise MeshError(
                ErrorCode.INVALID_REQUEST,
                f"the {place} is not UTF-8, or holds a NUL",
                field=place,
                hint="percent-encode the UTF-8 bytes of each character",
            )


class _Exchange:
    """One request and its answer, as seen from outside."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self.request_id = new_id()
        self.is_body_pending = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"
        self.status: int | None = None
        self.first_byte_at = 0.0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.is_body_pending = False
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.first_byte_at = time.monotonic()
            added = [(b"x-request-id", self.request_id.encode()), (b"x-content-type-options", b"nosniff")]
            if not any(name == b"cache-control" for name, _ in message["headers"]):
                added.append((b"cache-control", b"no-store"))
            if self.is_body_pending:
                added.append((b"connection", b"close"))
            message = {**message, "headers": [*message["headers"], *added]}
        elif self.is_body_pending and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def _linger(self) -> None:
        """Drain what the client still sends, without keeping it: closing at once would reset the answer away."""
        left = LINGER_BYTES_MAX
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while self.is_body_pending and left > 0:
                    left -= len((await self.receive()).get("body", b""))


class Front:
    """The ASGI layer around the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        started_at = time.monotonic()
        with (
            structlog.contextvars.bound_contextvars(request_id=exchange.request_id),
            metrics.REQUESTS_OPEN.track_inprogress(),
        ):
            try:
                await self._serve(scope, exchange)
            finally:
                method = scope["method"] if scope["method"] in _METHODS else "other"
                route = getattr(scope.get("route"), "path", "unmatched")
                metrics.REQUESTS.labels(method, route, str(exchange.status or "none")).inc()
                if exchange.status is not None:
                    metrics.REQUEST_SECONDS.labels(method, route).observe(exchange.first_byte_at - started_at)

    async def _serve(self, scope: Scope, exchange: _Exchange) -> None:
        try:
            check_target(scope)
            await self._app(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            return
        except MeshError as error:
            if exchange.status is not None:
                raise
            await problem(error)(scope, exchange.receive, exchange.send)
        except Exception:
            metrics.ERRORS.inc()
            log.exception("request_failed", method=scope["method"], route=getattr(scope.get("route"), "path", None))
            if exchange.status is not None:
                raise
            bug = MeshError(
                ErrorCode.INTERNAL,
                "the gateway met a bug",
                hint=f"look for request_id {exchange.request_id} in its log",
                retryable=True,
            )
            await problem(bug)(scope, exchange.receive, exchange.send)
