"""How a request is read: who calls, then its query, then its body, each with a bound, before any route runs.

Must never read a body past its limit, and never read one from a caller who is not known.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from fastapi import params
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from gateway.auth import authenticate
from gateway.http_errors import unknown_name
from gateway.state import gateway_of
from mesh.contract import canonical_json
from mesh.contract.canonical_json import Json
from mesh.contract.errors import ErrorCode, MeshError

# Larger bodies are parsed off the event loop.
_INLINE_BYTES_MAX = 256 * 1024

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class ParsedRequest(Request):
    """A request whose body has been read and parsed strictly; FastAPI takes it from here."""

    def __init__(self, request: Request, raw: bytes, value: Json) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw
        self._value = value

    async def body(self) -> bytes:
        """Return the bytes that were read."""
        return self._raw

    async def json(self) -> Json:
        """Return the value that was parsed."""
        return self._value


def check_query(request: Request, known: frozenset[str]) -> None:
    """Refuse a parameter that does nothing here, and one that is given twice: a typing error must not pass.

    Raises: MeshError `invalid_request`.
    """
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in known:
            raise MeshError(
                ErrorCode.INVALID_REQUEST,
                unknown_name("query parameter", name, sorted(known)),
                field=f"query.{name[:80]}",
                hint="the parameters of all calls stand in /openapi.json",
            )
        if name in seen:
            raise MeshError(
                ErrorCode.INVALID_REQUEST, f"the query parameter {name!r} stands twice", field=f"query.{name}"
            )
        seen.add(name)


def _check_content_type(request: Request) -> None:
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if media_type.strip().lower() != "application/json" or charset not in {"", "utf-8", "utf8"}:
        raise MeshError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
            "the body must be JSON in UTF-8",
            hint="send the header Content-Type: application/json",
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise MeshError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
            "a compressed body is not read here",
            hint="send it without Content-Encoding",
        )


def _too_large(limit: int) -> MeshError:
    return MeshError(
        ErrorCode.TOO_LARGE, f"the body is larger than the {limit} bytes allowed here", hint="send less at a time"
    )


async def read_body(request: Request, *, limit: int, timeout_s: float) -> bytes:
    """Return the whole body.

    Raises: MeshError `too_large` as soon as it is known, `too_slow`; ClientDisconnect.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise _too_large(limit)
                body += chunk
    except TimeoutError:
        raise MeshError(
            ErrorCode.TOO_SLOW,
            f"the body was not complete after {timeout_s:g} s",
            hint="send it again",
            retryable=True,
        ) from None
    return bytes(body)


async def parse_body(raw: bytes, *, limit: int) -> Json:
    """Return the JSON value in `raw`.

    Raises: MeshError `invalid_json`, `invalid_request` when there is no body at all.
    """
    if not raw.strip():
        raise MeshError(
            ErrorCode.INVALID_REQUEST,
            "this call needs a JSON object as its body",
            hint="its shape stands in /openapi.json",
        )
    if len(raw) > _INLINE_BYTES_MAX:
        return await asyncio.to_thread(canonical_json.loads, raw, bytes_max=limit)
    return canonical_json.loads(raw, bytes_max=limit)


class PublicRoute(APIRoute):
    """A route that anybody may call: the health of this process."""

    body_limit_setting: ClassVar[str] = "body_bytes_max"

    async def admit(self, request: Request, proceed: Handler) -> Response:
        """Let the request through to `proceed`."""
        return await proceed(request)

    def get_route_handler(self) -> Handler:
        """Return FastAPI's handler behind our own reading of the request."""
        original = super().get_route_handler()
        known = frozenset(
            field.alias for field in get_flat_params(self.dependant) if isinstance(field.field_info, params.Query)
        )

        async def proceed(request: Request) -> Response:
            check_query(request, known)
            if self.body_field is None:
                return await original(request)
            settings = gateway_of(request).settings
            limit: int = getattr(settings, self.body_limit_setting)
            _check_content_type(request)
            raw = await read_body(request, limit=limit, timeout_s=settings.body_timeout_s)
            return await original(ParsedRequest(request, raw, await parse_body(raw, limit=limit)))

        async def handle(request: Request) -> Response:
            return await self.admit(request, proceed)

        return handle


class TenantRoute(PublicRoute):
    """A route for a known caller, who may have only so many requests open."""

    async def admit(self, request: Request, proceed: Handler) -> Response:
        """Find out who calls, before anything else of the request is read."""
        gateway = gateway_of(request)
        request.state.caller = await authenticate(request, gateway)
        with gateway.requests.take(request.state.caller.tenant_id):
            return await proceed(request)


class ImportRoute(TenantRoute):
    """A tenant's route with room for history."""

    body_limit_setting: ClassVar[str] = "import_bytes_max"
