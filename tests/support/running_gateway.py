"""A real gateway on a loopback socket over a given ledger, and nodes that exist only as calls to that ledger.

Must never reach into the application: tests talk to it as any client would.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from gateway.app import build_app
from gateway.settings import GatewaySettings
from gateway.state import Gateway
from gateway.wire import Server, bind, server_config
from ledger.ledger import Ledger, open_ledger
from ledger.settings import LedgerSettings
from mesh.backplane.backplane import Backplane
from mesh.backplane.notice_board import NoticeBoard
from mesh.contract.api import SubmitIntent
from mesh.contract.errors import Cause
from mesh.contract.messages import (
    Claim,
    ClaimRequest,
    CommitResult,
    EmitEvents,
    EventKind,
    FailAttempt,
    RegisterNode,
    Settled,
    WorkerEvent,
)
from mesh.contract.ports import SilentPort
from mesh.contract.template import Template

ECHO = Template(
    name="echo",
    version="1",
    input_schema={
        "type": "object",
        "required": ["text"],
        "properties": {"text": {"type": "string"}, "parts": {"type": "array", "items": {"type": "integer"}}},
    },
)
CHAT = Template(name="chat", version="1", supports_multi_turn=True)


@dataclass
class RunningGateway:
    """A gateway that serves at `url`. `client` sends no key of its own."""

    url: str
    port: int
    client: httpx.AsyncClient
    server: Server
    app: FastAPI

    @property
    def gateway(self) -> Gateway:
        """What it holds."""
        gateway: Gateway = self.app.state.gateway
        return gateway

    @property
    def ledger(self) -> Ledger:
        """The ledger behind it."""
        return self.gateway.ledger

    def document(self) -> dict[str, Any]:
        """The OpenAPI document, which the application itself was made from."""
        document: dict[str, Any] = self.app.openapi()
        return document

    async def submit(self, text: str = "hello", **members: Any) -> dict[str, Any]:
        """Submit an echo intent and return the answer's body."""
        headers = members.pop("headers", {})
        body = {"type": "echo", "payload": {"text": text}, **members}
        response = await self.client.post("/intent", json=body, headers=headers)
        assert response.status_code == 202, response.text
        return response.json()


@asynccontextmanager
async def open_sqlite_ledger(folder: Path) -> AsyncIterator[Ledger]:
    """A ledger over a new SQLite file, without an embedder."""
    settings = LedgerSettings(data_dir=folder, embedding_model="none")
    ledger = await open_ledger(settings, port=SilentPort(), embedder=None)
    try:
        yield ledger
    finally:
        await ledger.close()


@asynccontextmanager
async def run_gateway(
    ledger: Ledger, *, backplane: Backplane | None = None, **settings: Any
) -> AsyncIterator[RunningGateway]:
    """Serve `ledger` on a free loopback port for as long as the block runs."""
    chosen = GatewaySettings(**{"host": "127.0.0.1", "port": 0, "poll_interval_s": 0.1, **settings})
    board = NoticeBoard(backplane)
    await board.start()
    ledger.port = board
    app = build_app(chosen, ledger, backplane, board)
    gateway: Gateway = app.state.gateway
    listening = bind("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = Server(server_config(app, chosen), listening, on_shutdown=gateway.closing.set)
    serving = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(10):
            while not server.started:
                await asyncio.sleep(0.005)
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield RunningGateway(url, port, client, server, app)
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, 20)
        await board.close()


@dataclass
class SimulatedNode:
    """A node that runs nothing: it claims and settles by calling the ledger."""

    ledger: Ledger
    node_id: str = "node-1"

    async def register(self, *templates: Template) -> None:
        """Bring capabilities along; echo and chat unless told otherwise."""
        await self.ledger.nodes.register(
            RegisterNode(node_id=self.node_id, host="test", slots=4, capabilities=list(templates or (ECHO, CHAT)))
        )

    async def claim(self, intent_id: str) -> Claim:
        """Take an intent."""
        return await self.ledger.claims.claim(intent_id, ClaimRequest(node_id=self.node_id))

    async def say(self, claim: Claim, *texts: str) -> None:
        """Stream deltas."""
        events = [WorkerEvent(kind=EventKind.DELTA, data={"text": text}) for text in texts]
        batch = EmitEvents(node_id=self.node_id, epoch=claim.epoch, events=events)
        await self.ledger.claims.emit(claim.intent_id, batch)

    async def commit(self, claim: Claim, result: Any) -> Settled:
        """Succeed."""
        outcome = CommitResult(node_id=self.node_id, epoch=claim.epoch, result=result)
        return await self.ledger.claims.commit(claim.intent_id, outcome)

    async def fail(self, claim: Claim, cause: Cause = Cause.HANDLER_REFUSED, *, is_retryable: bool = False) -> Settled:
        """Fail."""
        outcome = FailAttempt(
            node_id=self.node_id, epoch=claim.epoch, cause=cause, detail="refused", is_retryable=is_retryable
        )
        return await self.ledger.claims.fail(claim.intent_id, outcome)

    async def run(self, intent_id: str) -> Settled:
        """Claim an intent and succeed with its own payload."""
        claim = await self.claim(intent_id)
        return await self.commit(claim, claim.payload)

    async def turn(self, tenant_id: str, thread_id: str, text: str) -> None:
        """Commit one whole turn of a thread."""
        request = SubmitIntent(type="echo", payload={"text": text}, thread_id=thread_id)
        submitted = await self.ledger.intents.submit(tenant_id, request, capability=ECHO, idempotency_key=None)
        await self.run(submitted.intent.intent_id)


def parse_stream(text: str) -> list[dict[str, Any]]:
    """Return the events of a finished event stream: id, event, and data parsed; comments and retries left out."""
    events = []
    for block in text.split("\n\n"):
        members = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line and not line.startswith(":"))
        if "data" in members:
            events.append({**members, "data": json.loads(members["data"])})
    return events


async def read_events(lines: AsyncIterator[str], count: int) -> list[dict[str, Any]]:
    """Return the next `count` events of an open stream."""
    events: list[dict[str, Any]] = []
    members: dict[str, Any] = {}
    async for line in lines:
        if line == "":
            if "data" in members:
                events.append({**members, "data": json.loads(members["data"])})
            members = {}
            if len(events) == count:
                return events
        elif not line.startswith(":"):
            key, _, value = line.partition(": ")
            members[key] = value
    return events
