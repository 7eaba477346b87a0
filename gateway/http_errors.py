"""The one table from error code to HTTP status, and the one shape in which every error leaves: RFC 9457.

Must never echo a value that the caller sent (it may be hostile, huge or not JSON), and never show a traceback.
"""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mesh.contract.canonical_json import clean_text
from mesh.contract.errors import ErrorCode, MeshError

STATUS: dict[ErrorCode, int] = {
    ErrorCode.INVALID_JSON: 400,
    ErrorCode.INVALID_REQUEST: 422,
    ErrorCode.PAYLOAD_INVALID: 422,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.HEADERS_TOO_LARGE: 431,
    ErrorCode.TOO_SLOW: 408,
    ErrorCode.TOO_MANY_REQUESTS: 429,
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: 415,
    ErrorCode.UNKNOWN_CAPABILITY: 422,
    ErrorCode.THREAD_BUSY: 409,
    ErrorCode.IDEMPOTENCY_CONFLICT: 409,
    ErrorCode.ALREADY_TERMINAL: 409,
    ErrorCode.NOT_REPLAYABLE: 409,
    ErrorCode.NOT_CLAIMABLE: 409,
    ErrorCode.STALE_EPOCH: 409,
    ErrorCode.DEADLINE_PASSED: 422,
    ErrorCode.CONFLICT: 409,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.STORAGE_FULL: 507,
    ErrorCode.INTERNAL: 500,
}
PROBLEM_TYPE = "application/problem+json"
_MISTAKES_SHOWN_MAX = 20
_RESERVED = frozenset({"type", "title", "status", "code", "detail", "hint", "field", "retryable"})
# Codes for the errors that the framework raises by status.
_CODES = {
    400: ErrorCode.INVALID_REQUEST,
    401: ErrorCode.UNAUTHORIZED,
    403: ErrorCode.FORBIDDEN,
    404: ErrorCode.NOT_FOUND,
    405: ErrorCode.METHOD_NOT_ALLOWED,
    413: ErrorCode.TOO_LARGE,
    415: ErrorCode.UNSUPPORTED_MEDIA_TYPE,
    503: ErrorCode.UNAVAILABLE,
}


class Mistake(BaseModel):
    """One wrong value among several."""

    field: str
    detail: str


class Problem(BaseModel):
    """RFC 9457 problem details. `code` is stable, `detail` is for people; further members depend on the code."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="URN of the kind of problem")
    title: str = Field(description="The HTTP status in words")
    status: int
    code: ErrorCode
    detail: str = Field(description="What happened")
    hint: str | None = Field(None, description="The next step")
    field: str | None = Field(None, description="Path of the offending value, for example payload.items[3].name")
    retryable: bool = Field(False, description="Whether the same call may succeed later")
    errors: list[Mistake] | None = Field(None, description="Every wrong value, when there are several")


def status_of(error: MeshError) -> int:
    """Return the HTTP status. A text that cannot be read is 400; a value in it that cannot be kept is 422."""
    if error.code is ErrorCode.INVALID_JSON and error.field is not None:
        return 422
    return STATUS[error.code]


def problem(error: MeshError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response for `error`."""
    status = status_of(error)
    document: dict[str, Any] = {
        "type": f"urn:intentmesh:problem:{error.code.value}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": error.code.value,
        "detail": clean_text(error.detail),
        "retryable": error.retryable,
    }
    if error.hint is not None:
        document["hint"] = clean_text(error.hint)
    if error.field is not None:
        document["field"] = clean_text(error.field)
    document.update({key: value for key, value in error.extra.items() if key not in _RESERVED})
    all_headers = dict(headers or {})
    if error.retry_after_s is not None or status in {429, 503}:
        all_headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1)))
    if status == 401:
        all_headers["WWW-Authenticate"] = 'Bearer realm="intentmesh"'
    return Response(json.dumps(document, default=str), status, all_headers, media_type=PROBLEM_TYPE)


def field_path(location: Sequence[str | int]) -> str:
    """Return pydantic's location as a path: the body's members bare, everything else with its place in front."""
    parts = list(location[1:]) if location and location[0] == "body" else list(location)
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else str(part)
    return path


def unknown_name(noun: str, name: str, known: Sequence[str]) -> str:
    """Return the text for a name that does not exist here, with the nearest one that does."""
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(known)) or 'none'}"
    return f"unknown {noun} {name[:80]!r}; {guess}"


_PLAIN_WORDS = {
    "dict_type": "a JSON object is required",
    "model_attributes_type": "a JSON object is required",
    "list_type": "a JSON array is required",
    "string_type": "text is required",
    "timezone_aware": "the time needs a time zone, for example 2026-01-31T12:00:00Z",
    "datetime_from_date_parsing": "write the time as RFC 3339 text, for example 2026-01-31T12:00:00Z",
    "datetime_parsing": "write the time as RFC 3339 text, for example 2026-01-31T12:00:00Z",
}


def _explain(mistake: Mapping[str, Any], known: Sequence[str]) -> str:
    location = mistake["loc"]
    if location == ("body", "type") and mistake["type"] == "string_pattern_mismatch":
        return "a capability's name holds a-z, 0-9, _ and -, and begins with a letter"
    if (plain := _PLAIN_WORDS.get(mistake["type"])) is not None:
        return plain
    if mistake["type"] == "extra_forbidden":
        return unknown_name("field", str(location[-1]), known if len(location) == 2 else ())
    if mistake["type"] == "missing":
        return "a JSON object is required as the body" if location == ("body",) else "this value is required"
    if mistake["type"] == "value_error":
        return str(mistake["msg"]).removeprefix("Value error, ")
    return str(mistake["msg"])


def _known_fields(request: Request) -> list[str]:
    body_field = getattr(request.scope.get("route"), "body_field", None)
    model = body_field.field_info.annotation if body_field else None
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


async def on_mesh_error(_: Request, error: Exception) -> Response:
    """Answer an operating error."""
    assert isinstance(error, MeshError)
    return problem(error)


async def on_validation_error(request: Request, error: Exception) -> Response:
    """Answer parameters or a body that do not fit their types: the first mistake in `field`, all in `errors`."""
    assert isinstance(error, RequestValidationError)
    known = _known_fields(request)
    mistakes = [
        {"field": clean_text(field_path(mistake["loc"])), "detail": clean_text(_explain(mistake, known))}
        for mistake in list(error.errors())[:_MISTAKES_SHOWN_MAX]
    ]
    first = mistakes[0]
    named = f"{first['field']}: {first['detail']}" if first["field"] else first["detail"]
    return problem(
        MeshError(
            ErrorCode.INVALID_REQUEST,
            named,
            field=first["field"] or None,
            hint="the shapes of all calls stand in /openapi.json",
            extra={"errors": mistakes},
        )
    )


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answer what the framework refuses by itself: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    match error.status_code:
        case 404:
            refusal = MeshError(
                ErrorCode.NOT_FOUND, "there is no such path", hint="all paths stand in /openapi.json; none ends in /"
            )
        case 405:
            allowed = ", ".join(sorted(request.app.state.methods_of(request.scope)))
            headers["Allow"] = allowed
            refusal = MeshError(
                ErrorCode.METHOD_NOT_ALLOWED, f"{request.method} is not possible here", hint=f"possible: {allowed}"
            )
        case status:
            code = _CODES.get(status, ErrorCode.INVALID_REQUEST if status < 500 else ErrorCode.INTERNAL)
            refusal = MeshError(code, str(error.detail))
    return problem(refusal, headers)
