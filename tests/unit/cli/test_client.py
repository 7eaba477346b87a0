"""How the command line's client reads a gateway: refusals, lost answers, pages and event streams."""

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from cli.client import MeshClient
from cli.failures import CallFailed


def client_of(handler: Callable[[httpx.Request], httpx.Response], **options: int) -> MeshClient:
    """A client whose gateway is `handler`."""
    return MeshClient("http://mesh.test", "secret", transport=httpx.MockTransport(handler), **options)


def event(number: int, kind: str, **data: object) -> bytes:
    """One server-sent event as a gateway writes it."""
    body = {"number": number, "kind": kind, "thread_id": "t", "intent_id": "i", "data": data}
    return f"event: {kind}\nid: {number}\ndata: {json.dumps(body)}\n\n".encode()


class Cut(httpx.SyncByteStream):
    """A body that breaks off after its parts."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        yield from self._parts
        raise httpx.ReadError("connection lost")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between tries are noted, not made."""
    pauses: list[float] = []
    monkeypatch.setattr("cli.client.time.sleep", pauses.append)
    return pauses


def test_a_refusal_says_code_field_detail_and_hint() -> None:
    """Problem details become one error for people."""
    problem = {"code": "payload_invalid", "detail": "is too long", "hint": "send less", "field": "payload.text"}
    client = client_of(lambda _: httpx.Response(422, json=problem))
    with pytest.raises(CallFailed) as caught:
        client.get("/intents")
    assert (caught.value.code, caught.value.status) == ("payload_invalid", 422)
    assert caught.value.detail == "payload.text: is too long"
    assert caught.value.hint == "send less"


def test_a_refusal_names_its_field_once() -> None:
    """A gateway's detail may begin with the field already."""
    problem = {"code": "invalid_request", "detail": "tenant_id: is too short", "field": "tenant_id"}
    with pytest.raises(CallFailed, match=r"^tenant_id: is too short$"):
        client_of(lambda _: httpx.Response(422, json=problem)).get("/admin/keys")


def test_an_operators_call_says_where_the_token_is() -> None:
    """The gateway speaks of a header; at the command line it is a setting."""
    problem = {"code": "forbidden", "detail": "for those who run the mesh", "hint": "send it as the bearer"}
    with pytest.raises(CallFailed) as caught:
        client_of(lambda _: httpx.Response(403, json=problem)).get("/admin/keys")
    assert "INTENTMESH_DATA_DIR" in (caught.value.hint or "")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"detail": "x"}', b""])
def test_an_error_without_problem_details_is_not_a_gateway(body: bytes) -> None:
    """Whatever else listens on the port is named as such."""
    client = client_of(lambda _: httpx.Response(404, content=body))
    with pytest.raises(CallFailed, match="is it a mesh"):
        client.get("/intents")


def test_nobody_listening_names_the_way_to_start_a_mesh() -> None:
    """A refused connection is not tried again, and the hint says what to do."""
    calls = []

    def refuse(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        raise httpx.ConnectError("refused")

    with pytest.raises(CallFailed, match=r"no mesh answers at http://mesh\.test") as caught:
        client_of(refuse).get("/intents")
    assert len(calls) == 1
    assert "intentmesh up" in (caught.value.hint or "")


def test_a_submission_is_repeated_under_one_idempotency_key(no_pauses: list[float]) -> None:
    """503 and a lost answer are tried again with the same key, so that nothing runs twice."""
    keys = []

    def handler(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        match len(keys):
            case 1:
                return httpx.Response(503, json={"code": "unavailable", "detail": "x"}, headers={"Retry-After": "2"})
            case 2:
                raise httpx.ReadTimeout("lost")
        return httpx.Response(202, json={"intent_id": "i"})

    assert client_of(handler).submit({"type": "echo", "payload": {}}) == {"intent_id": "i"}
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert no_pauses[0] == 2.0


def test_other_posts_are_not_repeated() -> None:
    """A replay or a drain whose answer is lost may have happened."""
    calls = []

    def lose(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        raise httpx.ReadTimeout("lost")

    with pytest.raises(CallFailed):
        client_of(lose).post("/intents/i/replay")
    assert len(calls) == 1


def test_pages_are_followed_until_there_are_enough() -> None:
    """The cursor of one page asks for the next, and the bound is kept."""
    asked = []

    def handler(request: httpx.Request) -> httpx.Response:
        cursor = int(request.url.params.get("cursor", "0"))
        asked.append(cursor)
        return httpx.Response(200, json={"items": [{"n": cursor}, {"n": cursor + 1}], "next": str(cursor + 2)})

    assert [item["n"] for item in client_of(handler).pages("/intents", count_max=5, status=None)] == [0, 1, 2, 3, 4]
    assert asked == [0, 2, 4]


def test_a_broken_stream_is_resumed_without_gap_or_repeat() -> None:
    """After a cut the stream is asked for again from the last number; a repeated event is dropped."""
    resumed_from = []

    def handler(request: httpx.Request) -> httpx.Response:
        resumed_from.append(request.headers.get("last-event-id"))
        if len(resumed_from) == 1:
            first = b": keep-alive\n\n" + event(1, "delta", text="a") + event(2, "delta", text="b") + b"event: del"
            return httpx.Response(200, stream=Cut(first))
        rest = event(2, "delta", text="b") + event(3, "result.committed") + event(4, "thread.updated")
        return httpx.Response(200, content=rest)

    events = list(client_of(handler).events("/intents/i/events"))
    assert [each.number for each in events] == [1, 2, 3]
    assert events[-1].is_terminal
    assert resumed_from == [None, "2"]


def test_a_stream_that_has_nothing_more_ends() -> None:
    """204 on resuming means that the intent is finished."""
    assert list(client_of(lambda _: httpx.Response(204)).events("/intents/i/events", after=9)) == []


def test_a_stream_that_only_breaks_is_given_up() -> None:
    """It is tried a bounded number of times."""
    calls = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return httpx.Response(200, stream=Cut())

    with pytest.raises(CallFailed, match="no mesh answers"):
        list(client_of(handler).events("/intents/i/events"))
    assert len(calls) == 4


def test_a_problem_inside_a_stream_is_an_error() -> None:
    """A gateway that cannot go on says why as an event."""
    body = b'event: problem\ndata: {"code": "not_found", "detail": "there is no thread"}\n\n'
    with pytest.raises(CallFailed, match="there is no thread"):
        list(client_of(lambda _: httpx.Response(200, content=body)).events("/threads/t/events"))


def test_data_over_several_lines_is_one_value() -> None:
    """As server-sent events define it."""
    body = b'id: 7\nevent: delta\ndata: {"number": 7,\ndata:  "data": {"text": "x"}}\n\n' + event(8, "intent.dead")
    first, last = client_of(lambda _: httpx.Response(200, content=body)).events("/intents/i/events")
    assert (first.number, first.data) == (7, {"text": "x"})
    assert last.is_terminal
