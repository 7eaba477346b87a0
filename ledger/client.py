"""The ledger over HTTP, for nodes, and its embedder for gateways that run beside it.

Must never retry by itself: whoever calls knows what a lost answer means.
"""

import base64
import json
import time
from collections.abc import Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python

from mesh.contract import canonical_json
from mesh.contract.errors import ErrorCode, MeshError, unavailable
from mesh.contract.messages import (
    Claim,
    Claimable,
    ClaimRequest,
    CommitResult,
    EmitEvents,
    FailAttempt,
    Heartbeat,
    HeartbeatReply,
    NodeWelcome,
    RegisterNode,
    Settled,
)

TIMEOUT_S = 5.0
# Worker output of 64 levels, inside the messages that carry it.
DEPTH_MAX = canonical_json.DEPTH_MAX + 6
# After a failure the remote embedder counts as not ready for so long.
EMBEDDER_PAUSE_S = 5.0

M = TypeVar("M", bound=BaseModel)


def _body(message: BaseModel) -> bytes:
    """Return a message as JSON that the ledger will accept.

    Raises: MeshError `invalid_json` for worker output that is not JSON (NaN, too deep): it never will be.
    """
    # Not `model_dump(mode="json")`, which turns NaN into null without a word.
    value = canonical_json.sanitise(to_jsonable_python(message.model_dump(), inf_nan_mode="constants"))
    canonical_json.check(value, depth_max=DEPTH_MAX)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _error(response: httpx.Response) -> MeshError:
    """Return the ledger's error as it was raised there."""
    try:
        body = response.json()
        return MeshError(
            ErrorCode(body["code"]),
            str(body["detail"]),
            hint=body.get("hint"),
            field=body.get("field"),
            retryable=bool(body.get("retryable")),
            retry_after_s=body.get("retry_after_s"),
            extra=body.get("extra") or {},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return unavailable(f"something else than the ledger answered ({response.status_code})")


class LedgerClient:
    """The nodes' side of the ledger. Every method raises MeshError: the ledger's own, or `unavailable`."""

    def __init__(self, base_url: str, token: str | None, *, timeout_s: float = TIMEOUT_S) -> None:
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        # A proxy of the environment has no business between two parts of one mesh.
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout_s, trust_env=False)

    async def _call(
        self, method: str, path: str, *, body: bytes | None = None, query: Any = None, timeout_s: float | None = None
    ) -> httpx.Response:
        try:
            response = await self._http.request(
                method,
                path,
                content=body,
                params=query,
                timeout=httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s,
            )
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise unavailable(f"the ledger does not answer ({type(error).__name__})") from error
        if response.is_success:
            return response
        raise _error(response)

    async def _ask(self, method: str, path: str, answer: type[M], *, body: bytes | None = None, query: Any = None) -> M:
        response = await self._call(method, path, body=body, query=query)
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise unavailable("something else than the ledger answered") from error

    async def register(self, request: RegisterNode) -> NodeWelcome:
        """PUT /nodes/{id}."""
        return await self._ask("PUT", f"/nodes/{quote(request.node_id, safe='')}", NodeWelcome, body=_body(request))

    async def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """POST /nodes/{id}/heartbeat."""
        path = f"/nodes/{quote(heartbeat.node_id, safe='')}/heartbeat"
        return await self._ask("POST", path, HeartbeatReply, body=_body(heartbeat))

    async def claimable(self, node_id: str, capabilities: Sequence[str], limit: int) -> Claimable:
        """GET /claimable."""
        query = [("node_id", node_id), ("limit", str(limit)), *(("capability", name) for name in capabilities)]
        return await self._ask("GET", "/claimable", Claimable, query=query)

    async def claim(self, intent_id: str, request: ClaimRequest) -> Claim:
        """POST /intents/{id}/claim."""
        return await self._ask("POST", self._path(intent_id, "claim"), Claim, body=_body(request))

    async def emit(self, intent_id: str, batch: EmitEvents) -> None:
        """POST /intents/{id}/events."""
        await self._call("POST", self._path(intent_id, "events"), body=_body(batch))

    async def commit(self, intent_id: str, outcome: CommitResult) -> Settled:
        """POST /intents/{id}/commit. A MeshError that is neither retryable nor `stale_epoch` or `not_found` means
        that the outcome can never be stored: fail the attempt as `result_invalid`."""
        return await self._ask("POST", self._path(intent_id, "commit"), Settled, body=_body(outcome))

    async def fail(self, intent_id: str, outcome: FailAttempt) -> Settled:
        """POST /intents/{id}/fail."""
        return await self._ask("POST", self._path(intent_id, "fail"), Settled, body=_body(outcome))

    async def embed(self, texts: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> tuple[Any, str]:
        """POST /embed: unit vectors, float32[n, dimension], and the model's id."""
        body = json.dumps({"texts": [canonical_json.clean_text(text) for text in texts]}).encode()
        answer = (await self._call("POST", "/embed", body=body, timeout_s=timeout_s)).json()
        vectors = np.frombuffer(base64.b64decode(answer["vectors"]), dtype="<f4")
        return vectors.reshape(len(texts), int(answer["dimension"])), str(answer["model_id"])

    async def health(self) -> dict[str, Any]:
        """GET /healthz."""
        answer: dict[str, Any] = (await self._call("GET", "/healthz")).json()
        return answer

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    @staticmethod
    def _path(intent_id: str, verb: str) -> str:
        return f"/intents/{quote(intent_id, safe='')}/{verb}"


class RemoteEmbedder:
    """The ledger's embedder as a port (contract.ports.Embedder). The model's id is known after the first answer."""

    def __init__(self, client: LedgerClient) -> None:
        self._client = client
        self._model_id = ""
        self._pause_until_s = 0.0

    @property
    def model_id(self) -> str:
        """Name and version of the model; empty until the ledger has told it."""
        return self._model_id

    @property
    def is_ready(self) -> bool:
        """Whether `embed` can be expected to answer now."""
        return time.monotonic() >= self._pause_until_s

    async def start(self) -> None:
        """Ask the ledger which model it has; a ledger that does not answer is asked again by `embed`."""
        try:
            embedder = (await self._client.health()).get("embedder")
        except MeshError:
            self._pause_until_s = time.monotonic() + EMBEDDER_PAUSE_S
            return
        if isinstance(embedder, dict):
            self._model_id = str(embedder.get("model_id", ""))

    async def embed(self, texts: Sequence[str], *, timeout_s: float) -> Any:
        """Return unit vectors, float32[n, dimension].

        Raises: MeshError `unavailable`.
        """
        try:
            vectors, self._model_id = await self._client.embed(texts, timeout_s=timeout_s)
        except MeshError as error:
            self._pause_until_s = time.monotonic() + EMBEDDER_PAUSE_S
            raise unavailable(f"the ledger's embedder does not answer: {error.detail}") from error
        return vectors
