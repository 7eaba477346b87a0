"""The ledger's internal HTTP face, for nodes and for gateways that run beside it. The mesh token opens it.

The public API is the gateway's. Must never answer without the token when one is set, and never read a body past its
limit.
"""

import asyncio
import base64
import hmac
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, SecretStr, ValidationError
from starlette.exceptions import HTTPException

from ledger.ledger import Ledger
from mesh.contract import canonical_json
from mesh.contract.errors import ErrorCode, MeshError, unavailable
from mesh.contract.messages import ClaimRequest, CommitResult, EmitEvents, FailAttempt, Heartbeat, RegisterNode

BODY_BYTES_MAX = 32 * 1024 * 1024
# Worker output of 64 levels, inside the messages that carry it.
BODY_DEPTH_MAX = canonical_json.DEPTH_MAX + 6
EMBED_TEXTS_MAX = 256
EMBED_TIMEOUT_S = 4.0

# What a client of this face needs of HTTP: the body's `code` says the rest. Everything else is 422.
_STATUS = {
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.NOT_CLAIMABLE: 409,
    ErrorCode.STALE_EPOCH: 409,
    ErrorCode.CONFLICT: 409,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.INTERNAL: 500,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.STORAGE_FULL: 507,
}

M = TypeVar("M", bound=BaseModel)


def problem(error: MeshError) -> JSONResponse:
    """Return an error as `LedgerClient` reads it back."""
    body = {
        "code": str(error.code),
        "detail": error.detail,
        "hint": error.hint,
        "field": error.field,
        "retryable": error.retryable,
        "retry_after_s": error.retry_after_s,
        "extra": error.extra,
    }
    status = _STATUS.get(error.code, 422)
    return JSONResponse(body, status_code=status, media_type="application/problem+json")


async def _json(request: Request) -> Any:
    """Read a body: never past its limit, and nothing but canonical JSON."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > BODY_BYTES_MAX:
            raise MeshError(ErrorCode.TOO_LARGE, f"more than {BODY_BYTES_MAX} bytes")
        parts.append(part)
    raw = b"".join(parts)
    if size > 256 * 1024:
        return await asyncio.to_thread(canonical_json.loads, raw, bytes_max=BODY_BYTES_MAX, depth_max=BODY_DEPTH_MAX)
    return canonical_json.loads(raw, bytes_max=BODY_BYTES_MAX, depth_max=BODY_DEPTH_MAX)


async def _read(request: Request, model: type[M]) -> M:
    """Read a message of the contract.

    Raises: MeshError `invalid_json`, `invalid_request` or `too_large`.
    """
    body = await _json(request)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise MeshError(ErrorCode.INVALID_REQUEST, f"{field}: {first['msg']}", field=field) from error


def _message(message: BaseModel) -> Response:
    return Response(message.model_dump_json(), media_type="application/json")


def _check_node(in_path: str, in_body: str) -> None:
    if in_path != in_body:
        raise MeshError(ErrorCode.INVALID_REQUEST, "the node in the path is not the one in the body", field="node_id")


def build_ledger_app(ledger: Ledger, token: SecretStr | None) -> FastAPI:
    """Return the application. Without a `token` anybody may call it: for loopback only."""
    app = FastAPI(title="intent mesh ledger", docs_url=None, redoc_url=None, openapi_url=None)
    wanted = None if token is None else f"Bearer {token.get_secret_value()}".encode()

    @app.middleware("http")
    async def check_token(request: Request, call_next: Any) -> Any:
        given = request.headers.get("authorization", "").encode("latin-1", "replace")
        if wanted is not None and request.url.path != "/healthz" and not hmac.compare_digest(given, wanted):
            return problem(
                MeshError(
                    ErrorCode.UNAUTHORIZED,
                    "this needs the mesh token",
                    hint="set INTENTMESH_MESH_TOKEN to the ledger's own on every node and gateway",
                )
            )
        return await call_next(request)

    @app.exception_handler(MeshError)
    async def on_mesh_error(_: Request, error: MeshError) -> Response:
        return problem(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        code = ErrorCode.METHOD_NOT_ALLOWED if error.status_code == 405 else ErrorCode.NOT_FOUND
        return problem(MeshError(code, f"the ledger has no {request.method} {request.url.path}"))

    @app.exception_handler(Exception)
    async def on_bug(_: Request, error: Exception) -> Response:
        return problem(MeshError(ErrorCode.INTERNAL, f"the ledger failed: {type(error).__name__}"))

    _add_node_routes(app, ledger)
    _add_intent_routes(app, ledger)
    _add_other_routes(app, ledger)
    return app


def _add_node_routes(app: FastAPI, ledger: Ledger) -> None:
    @app.put("/nodes/{node_id}")
    async def register(node_id: str, request: Request) -> Response:
        message = await _read(request, RegisterNode)
        _check_node(node_id, message.node_id)
        return _message(await ledger.nodes.register(message))

    @app.post("/nodes/{node_id}/heartbeat")
    async def heartbeat(node_id: str, request: Request) -> Response:
        message = await _read(request, Heartbeat)
        _check_node(node_id, message.node_id)
        return _message(await ledger.claims.heartbeat(message))

    @app.get("/claimable")
    async def claimable(request: Request) -> Response:
        query = request.query_params
        try:
            limit = int(query.get("limit", "10"))
        except ValueError as error:
            raise MeshError(ErrorCode.INVALID_REQUEST, "limit is a whole number", field="limit") from error
        names = query.getlist("capability")
        return _message(await ledger.claims.claimable(query.get("node_id", ""), names, limit))


def _add_intent_routes(app: FastAPI, ledger: Ledger) -> None:
    @app.post("/intents/{intent_id}/claim")
    async def claim(intent_id: str, request: Request) -> Response:
        return _message(await ledger.claims.claim(intent_id, await _read(request, ClaimRequest)))

    @app.post("/intents/{intent_id}/events")
    async def emit(intent_id: str, request: Request) -> Response:
        await ledger.claims.emit(intent_id, await _read(request, EmitEvents))
        return Response(status_code=204)

    @app.post("/intents/{intent_id}/commit")
    async def commit(intent_id: str, request: Request) -> Response:
        return _message(await ledger.claims.commit(intent_id, await _read(request, CommitResult)))

    @app.post("/intents/{intent_id}/fail")
    async def fail(intent_id: str, request: Request) -> Response:
        return _message(await ledger.claims.fail(intent_id, await _read(request, FailAttempt)))


def _add_other_routes(app: FastAPI, ledger: Ledger) -> None:
    @app.post("/embed")
    async def embed(request: Request) -> Response:
        body = await _json(request)
        texts = body.get("texts") if isinstance(body, dict) else None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise MeshError(ErrorCode.INVALID_REQUEST, "texts is a list of strings", field="texts")
        if not 1 <= len(texts) <= EMBED_TEXTS_MAX:
            raise MeshError(ErrorCode.INVALID_REQUEST, f"1 to {EMBED_TEXTS_MAX} texts at a time", field="texts")
        if ledger.embedder is None:
            raise unavailable("the ledger runs without an embedder", retry_after_s=60.0)
        vectors = np.asarray(await ledger.embedder.embed(texts, timeout_s=EMBED_TIMEOUT_S), dtype="<f4")
        return JSONResponse(
            {
                "model_id": ledger.embedder.model_id,
                "dimension": int(vectors.shape[1]),
                "vectors": base64.b64encode(vectors.tobytes()).decode(),
            }
        )

    @app.get("/healthz")
    async def healthz() -> Response:
        await ledger.ping()
        embedder = ledger.embedder
        shown = None if embedder is None else {"model_id": embedder.model_id, "is_ready": embedder.is_ready}
        return JSONResponse({"status": "ok", "embedder": shown})
