"""Bounds on the socket: bodies, headers, connections and clients that are too slow."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from support.running_gateway import RunningGateway, SimulatedNode, open_sqlite_ledger, run_gateway

from ledger.ledger import Ledger

HEAD = b"POST /intent HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    """SQLite is enough here: none of this depends on the database."""
    async with open_sqlite_ledger(tmp_path) as ledger:
        yield ledger


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


async def _read_all(reader: asyncio.StreamReader, answer: bytearray) -> None:
    with suppress(OSError):
        while chunk := await reader.read(65536):
            answer += chunk


async def _talk(port: int, *parts: bytes, timeout_s: float = 10) -> bytes:
    """Send the parts until an answer comes, and return all that the server says until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()
    reading = asyncio.create_task(_read_all(reader, answer))
    try:
        async with asyncio.timeout(timeout_s):
            with suppress(OSError):
                for part in parts:
                    if answer:
                        break
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
            await reading
            return bytes(answer)
    finally:
        reading.cancel()
        await _close(writer)


def _is_problem(answer: bytes, status: int) -> bool:
    return answer.startswith(b"HTTP/1.1 %d" % status) and b"application/problem+json" in answer


async def test_declared_large_body_is_refused_unread(running: RunningGateway) -> None:
    """Content-Length alone is enough: 413 without a byte of the body, and the connection closes."""
    answer = await _talk(running.port, HEAD + b"Content-Length: 104857600\r\n\r\n")
    assert _is_problem(answer, 413)
    assert b"connection: close" in answer.lower()


async def test_client_that_asks_first_is_told_at_once(running: RunningGateway) -> None:
    """Expect: 100-continue with too large a body: 413 and no 100."""
    answer = await _talk(running.port, HEAD + b"Expect: 100-continue\r\nContent-Length: 104857600\r\n\r\n")
    assert _is_problem(answer, 413)


async def test_body_without_a_length_is_refused_past_the_limit(running: RunningGateway) -> None:
    """Chunked: the answer is there soon after the limit, while the client would go on for 100 MB."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    sent = 0
    head = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    async with asyncio.timeout(10):
        while not head.done():
            writer.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            sent += 4096
            await writer.drain()
            await asyncio.sleep(0)
    assert _is_problem(await head, 413)
    assert 1024 * 1024 < sent < 4 * 1024 * 1024
    await _close(writer)


async def test_twenty_bodies_of_a_hundred_megabytes_take_no_memory(running: RunningGateway) -> None:
    """Each is refused at once, and what its client sends all the same is not kept; others are served meanwhile."""
    chunk = memoryview(b"x" * 65536)

    async def send() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        answer = bytearray()
        reading = asyncio.create_task(_read_all(reader, answer))
        with suppress(OSError):
            writer.write(HEAD + b"Content-Length: 104857600\r\n\r\n")
            for _ in range(1600):
                writer.write(chunk)
                await writer.drain()
        await reading
        await _close(writer)
        return bytes(answer)

    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sending = [asyncio.create_task(send()) for _ in range(20)]
    assert (await running.client.get("/healthz")).status_code == 200
    assert all(_is_problem(answer, 413) for answer in await asyncio.gather(*sending))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 20 * 1024


async def test_large_body_with_a_length_reaches_a_real_client(running: RunningGateway) -> None:
    """The client reads 413 although it was still sending."""
    response = await running.client.post(
        "/intent", content=b"x" * (100 * 1024 * 1024), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 413


@pytest.mark.parametrize("path", ["/intents/none/cancel", "/nowhere", "/healthz"])
async def test_body_that_nobody_reads_closes_the_connection(running: RunningGateway, path: str) -> None:
    """A call without a body, sent with a huge one, is answered and not drained to the end."""
    answer = await _talk(
        running.port,
        b"POST " + path.encode() + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        *[b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 400,
    )
    assert answer.startswith(b"HTTP/1.1 4")
    assert b"connection: close" in answer.lower()


async def test_import_has_more_room_than_an_intent(running: RunningGateway) -> None:
    """Two megabytes of history are read where two of an intent are not."""
    text = "word " * 100_000
    messages = [{"role": "user", "content": text}] * 4
    assert (await running.client.post("/threads/big/messages", json={"messages": messages})).status_code == 200
    refused = await running.client.post("/intent", json={"type": "echo", "payload": {"text": text * 4}})
    assert refused.status_code == 413


async def test_endless_header_is_refused(running: RunningGateway) -> None:
    """431 past the limit, whether the headers are many, one, or the path."""
    endless = [b"a" * 8192] * 64
    for start in (
        b"GET /healthz HTTP/1.1\r\nx: ",
        b"GET /healthz HTTP/1.1\r\n",
        b"GET /",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5;",
    ):
        answer = await _talk(running.port, start, *endless)
        assert not answer or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400", b"HTTP/1.1 422")), answer[:100]
    many = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"x-a: b\r\n" * 20_000 + b"\r\n"
    assert _is_problem(await _talk(running.port, many), 431)


async def test_what_is_not_http_is_a_problem_too(running: RunningGateway) -> None:
    """Even what never reaches the application is answered in the same shape."""
    assert b"application/problem+json" in await _talk(running.port, b"hello\r\n\r\n")
    answer = await _talk(running.port, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nx: a\x00b\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 4")
    assert b"application/problem+json" in answer


async def test_half_open_headers_are_cut_off(ledger) -> None:
    """200 connections that never finish their headers are closed after the time limit; others are served meanwhile."""
    async with run_gateway(ledger, header_timeout_s=0.5) as running:
        pairs = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(200)]
        for _, writer in pairs:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nx-slow: ")
        assert (await running.client.get("/healthz")).status_code == 200
        async with asyncio.timeout(10):
            answers = await asyncio.gather(*(reader.read() for reader, _ in pairs))
        assert all(_is_problem(answer, 408) for answer in answers)
        for _, writer in pairs:
            await _close(writer)


async def test_silent_connection_is_cut_off(ledger) -> None:
    """One that never says a word too."""
    async with run_gateway(ledger, header_timeout_s=0.3) as running:
        assert _is_problem(await _talk(running.port, timeout_s=5), 408)


async def test_body_that_never_ends_is_cut_off(ledger, node: SimulatedNode) -> None:
    """408 after the time limit, and the connection closes."""
    async with run_gateway(ledger, body_timeout_s=0.3) as running:
        answer = await _talk(running.port, HEAD + b"Content-Length: 100\r\n\r\n{", timeout_s=5)
        assert _is_problem(answer, 408)


async def test_connections_are_bounded(ledger) -> None:
    """One too many is told so with Retry-After, and there is room again when one leaves."""
    async with run_gateway(ledger, connections_max=2) as running:
        pairs = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(2)]
        await asyncio.sleep(0)
        answer = await _talk(running.port)
        assert _is_problem(answer, 503)
        assert b"retry-after: 1" in answer.lower()
        for _, writer in pairs:
            await _close(writer)
        async with asyncio.timeout(5):
            while running.server.server_state.connections:
                await asyncio.sleep(0.02)
        assert (await running.client.get("/healthz")).status_code == 200


async def test_requests_of_a_tenant_are_bounded(ledger, node: SimulatedNode) -> None:
    """One more than the bound is 429; health is answered all the same."""
    async with run_gateway(ledger, tenant_requests_max=1) as running:
        body = {"type": "echo", "payload": {"text": "x"}}
        waiting = asyncio.create_task(running.client.post("/intent?wait=1", json=body))
        async with asyncio.timeout(5):
            while not running.gateway.requests._open:
                await asyncio.sleep(0.005)
        refused = await running.client.get("/intents")
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
        assert (await running.client.get("/healthz")).status_code == 200
        assert (await waiting).status_code == 202


async def test_client_that_stops_reading_is_cut_off(ledger, node: SimulatedNode) -> None:
    """A stream whose client reads nothing any more does not stay open for ever."""
    async with run_gateway(ledger, write_timeout_s=0.3) as running:
        intent = await running.submit(thread_id="t")
        claim = await node.claim(intent["intent_id"])
        _, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=1)
        writer.write(b"GET /threads/t/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await writer.drain()
        writer.transport.pause_reading()
        async with asyncio.timeout(30):
            while not running.gateway.streams._open:
                await asyncio.sleep(0.01)
            while running.gateway.streams._open:
                await node.say(claim, *["x" * 50_000] * 10)
        await _close(writer)


async def test_pipelined_and_kept_alive_requests_are_served(running: RunningGateway) -> None:
    """The bounds do not harm a client that reuses its connection."""
    request = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    last = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    answer = await _talk(running.port, request + request, request + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 4


async def test_web_page_of_another_site_is_refused_without_keys(running: RunningGateway) -> None:
    """Neither a foreign name for this address nor a foreign origin gets in while nobody needs a key."""
    for headers in ({"Host": "evil.example"}, {"Host": "127.evil.example"}, {"Origin": "http://evil.example"}):
        response = await running.client.get("/intents", headers=headers)
        assert (response.status_code, response.json()["code"]) == (403, "forbidden"), headers
    own = {"Origin": running.url}
    assert (await running.client.get("/intents", headers=own)).status_code == 200
    async with httpx.AsyncClient(base_url=f"http://localhost:{running.port}") as client:
        assert (await client.get("/intents")).status_code == 200
