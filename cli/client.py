"""The gateway as the command line sees it: calls, cursor-paged lists and event streams over HTTP.

Must never import a role: it knows nothing that another client could not know. Nothing else here imports httpx.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from cli.failures import CallFailed
from mesh.contract.ids import new_id
from mesh.contract.messages import EventKind

CONNECT_TIMEOUT_S = 5.0
# Longer than the pause between two signs of life on an event stream.
STREAM_SILENCE_MAX_S = 60.0
TRIES = 4
TERMINAL_EVENTS = frozenset(
    {
        EventKind.RESULT_COMMITTED,
        EventKind.INTENT_FAILED,
        EventKind.INTENT_CANCELLED,
        EventKind.INTENT_EXPIRED,
        EventKind.INTENT_DEAD,
    }
)


@dataclass(frozen=True)
class StreamEvent:
    """One event of a thread or intent. `number` is what a stream resumes after."""

    number: int
    kind: str
    intent_id: str | None
    data: dict[str, Any]

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more happens to the intent."""
        return self.kind in TERMINAL_EVENTS


class MeshClient:
    """Calls to one gateway. Every failure is a `CallFailed` that says what to do next."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        tries: int = TRIES,
        timeout_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._tries = tries
        self._timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
            transport=transport,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, **parameters: Any) -> Any:
        """GET; parameters that are None are left out."""
        return self._call("GET", path, parameters=parameters)

    def post(self, path: str, body: Any = None) -> Any:
        """POST once: not repeated when the answer is lost."""
        return self._call("POST", path, body=body, tries=1)

    def put(self, path: str, body: Any) -> Any:
        """PUT."""
        return self._call("PUT", path, body=body)

    def delete(self, path: str) -> Any:
        """DELETE."""
        return self._call("DELETE", path)

    def submit(self, body: dict[str, Any], *, wait_s: float = 0.0, key: str | None = None) -> dict[str, Any]:
        """Submit an intent under an idempotency key, so that a lost answer can be asked for again."""
        answer: dict[str, Any] = self._call(
            "POST",
            "/intent",
            body=body,
            parameters={"wait": wait_s or None},
            headers={"Idempotency-Key": key or new_id()},
            wait_s=wait_s,
        )
        return answer

    def pages(self, path: str, *, count_max: int, **parameters: Any) -> list[dict[str, Any]]:
        """Return up to `count_max` items of a cursor-paged list."""
        items: list[dict[str, Any]] = []
        cursor = None
        while len(items) < count_max:
            page = self.get(path, cursor=cursor, **parameters)
            items += page["items"]
            cursor = page.get("next")
            if not cursor:
                break
        return items[:count_max]

    def events(self, path: str, *, after: int = 0) -> Iterator[StreamEvent]:
        """Yield the events of a thread or intent as they come, resuming over broken connections and time limits.

        Ends after a terminal event, when there is nothing left to send, or when the caller stops.
        """
        number = after
        failures = 0
        while failures < TRIES:
            try:
                with self._stream(path, number) as response:
                    if response.status_code == httpx.codes.NO_CONTENT:
                        return
                    for event in _read_events(response.iter_lines()):
                        failures = 0
                        if event.number > number:
                            number = event.number
                            yield event
                            if event.is_terminal:
                                return
            except httpx.TransportError as error:
                lost = self._no_answer(error)
                failures += 1
                if failures == TRIES:
                    raise lost from error
                time.sleep(0.2 * 2**failures)

    @contextmanager
    def _stream(self, path: str, after: int) -> Iterator[httpx.Response]:
        headers = {"Accept": "text/event-stream"}
        if after:
            headers["Last-Event-ID"] = str(after)
        timeout = httpx.Timeout(30.0, connect=CONNECT_TIMEOUT_S, read=STREAM_SILENCE_MAX_S)
        with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            yield response

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        parameters: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        wait_s: float = 0.0,
        tries: int | None = None,
    ) -> Any:
        tries = tries or self._tries
        kept = {name: value for name, value in (parameters or {}).items() if value is not None}
        for attempt in range(1, tries + 1):
            is_last = attempt == tries
            try:
                response = self._http.request(
                    method,
                    path,
                    json=body,
                    params=kept,
                    headers=headers,
                    timeout=httpx.Timeout(self._timeout_s + wait_s, connect=min(self._timeout_s, CONNECT_TIMEOUT_S)),
                )
            except httpx.ConnectError as error:  # nobody listens: waiting would only hide it
                raise self._no_answer(error) from error
            except (httpx.TransportError, httpx.InvalidURL) as error:
                if is_last:
                    raise self._no_answer(error) from error
                time.sleep(0.2 * 2**attempt)
                continue
            if response.status_code == httpx.codes.SERVICE_UNAVAILABLE and not is_last:
                time.sleep(_retry_after_s(response))
                continue
            if response.is_error:
                raise _refusal(response)
            return response.json() if response.content else None
        raise AssertionError("unreachable: the last try returns or raises")

    def _no_answer(self, error: Exception) -> CallFailed:
        return CallFailed(
            "unavailable",
            f"no mesh answers at {self.url} ({error or type(error).__name__})",
            hint="intentmesh up (starts one here), or set INTENTMESH_URL; intentmesh doctor says what is missing",
        )


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return min(5.0, float(response.headers.get("Retry-After", "1")))
    except ValueError:
        return 1.0


def _refusal(response: httpx.Response) -> CallFailed:
    """Read problem details; anything else that answers is not a gateway."""
    try:
        problem = response.json()
        detail, code = problem["detail"], problem["code"]
    except (ValueError, KeyError, TypeError):
        return CallFailed(
            "not_a_gateway",
            f"{response.request.url} answered {response.status_code} without problem details: is it a mesh?",
            hint="set INTENTMESH_URL to a gateway",
            status=response.status_code,
        )
    if problem.get("field") and not detail.startswith(problem["field"]):
        detail = f"{problem['field']}: {detail}"
    hint = problem.get("hint")
    if code == "unauthorized":
        hint = "set INTENTMESH_API_KEY to a key of this mesh (made with: intentmesh keys add TENANT)"
    if code == "forbidden":
        hint = "set INTENTMESH_MESH_TOKEN, or INTENTMESH_DATA_DIR to the folder of the mesh that `up` started"
    return CallFailed(code, detail, hint=hint, status=response.status_code)


def _read_events(lines: Iterator[str]) -> Iterator[StreamEvent]:
    """Parse server-sent events. Source: WHATWG HTML, section 9.2.6 (as far as a gateway uses it)."""
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if "data" in fields:
                body = json.loads(fields["data"])
                if fields.get("event") == "problem":
                    raise CallFailed(body["code"], body["detail"], hint=body.get("hint"))
                yield StreamEvent(
                    number=int(fields.get("id") or body["number"]),
                    kind=fields.get("event") or body["kind"],
                    intent_id=body.get("intent_id"),
                    data=body.get("data") or {},
                )
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            fields[name] = f"{fields[name]}\n{value}" if name == "data" and "data" in fields else value
