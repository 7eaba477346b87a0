"""Nodes in this process over a real ledger behind a real socket, with capabilities given as text, and faults on the way.

Must never reach into a node: tests see what the ledger, the processes and the callers see.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import SecretStr
from starlette.types import Receive, Scope, Send
from support.capability_files import write_capability
from support.running_mesh import eventually, free_port

from ledger.app import build_ledger_app
from ledger.client import LedgerClient
from ledger.ledger import Ledger
from mesh.backplane.backplane import Backplane
from mesh.contract.api import IntentView, SubmitIntent
from mesh.contract.states import TERMINAL
from mesh.contract.template import Template
from mesh.node import Node
from mesh.settings import NodeSettings
from worker.capability_folder import load_capability

TOKEN = "test"
TENANT = "local"
PATIENCE_S = 15.0


class Faults:
    """Stands before the ledger's application; `answer` decides for each request what goes wrong with it."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.seen: list[str] = []
        # Gets "POST /path", returns None, "lose" (done, but answered as by a proxy that lost it), "fail" (500) or "hang".
        self.answer: Callable[[str], str | None] = lambda _: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        call = f"{scope['method']} {scope['path']}"
        self.seen.append(call)
        match self.answer(call):
            case "hang":
                await asyncio.Event().wait()
            case "fail":
                await _reply(send, 500, b'{"code": "internal", "detail": "scripted failure"}')
            case "lose":
                await self._app(scope, receive, _ignore)
                await _reply(send, 502, b"<html>")
            case _:
                await self._app(scope, receive, send)


async def _ignore(_: Any) -> None:
    """Take a part of an answer, and lose it."""


async def _reply(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


class NodeLab:
    """One ledger that can be switched off and on, and any number of nodes."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.folder = folder
        self.ledger = ledger
        self.capabilities = folder / "capabilities"
        self.capabilities.mkdir()
        self.faults = Faults(build_ledger_app(ledger, SecretStr(TOKEN)))
        self.port = free_port()
        self.nodes: dict[str, Node] = {}
        self.runs: dict[str, asyncio.Task[None]] = {}
        self._clients: list[LedgerClient] = []
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    # ---- the ledger

    async def start_ledger(self) -> None:
        """Serve the ledger on its port."""
        config = uvicorn.Config(
            self.faults, port=self.port, log_level="critical", lifespan="off", timeout_graceful_shutdown=0
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve())
        await eventually(
            lambda: self._server is not None and self._server.started, timeout_s=5, what="the ledger serves"
        )

    async def stop_ledger(self) -> None:
        """Close the socket: calls are refused from now on."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None

    # ---- nodes

    def capability(self, handler: str, *, name: str = "probe", **template: Any) -> Template:
        """Write a capability whose handler.py is `handler`, and return its template."""
        return load_capability(write_capability(self.capabilities, name, {"handler.py": handler}, **template)).template

    def node(
        self, node_id: str = "node-1", *, backplane: Backplane | None = None, timeout_s: float = 5.0, **settings: Any
    ) -> Node:
        """Begin to run a node."""
        chosen = {
            "node_id": node_id,
            "node_slots": 4,
            "node_standby": 1,
            "lease_margin_s": 0.3,  # the ledger's lease is short here, and a busy machine must not use it up
            "data_dir": self.folder / node_id,
            "capabilities_dir": str(self.capabilities),
            "capabilities_reload_s": 0.05,
            "node_poll_interval_s": 0.05,
            "node_poll_idle_interval_s": 0.2,
            "ledger_url": f"http://127.0.0.1:{self.port}",
        }
        client = LedgerClient(f"http://127.0.0.1:{self.port}", TOKEN, timeout_s=timeout_s)
        self._clients.append(client)
        node = Node(NodeSettings(**(chosen | settings)), ledger=client, backplane=backplane)
        self.nodes[node_id] = node
        self.runs[node_id] = asyncio.create_task(node.run(), name=node_id)
        return node

    async def up(self, node_id: str = "node-1") -> None:
        """Wait until a node is registered."""

        async def is_up() -> bool:
            if (run := self.runs[node_id]).done():
                run.result()
            return any(view.node_id == node_id for view in await self.ledger.nodes.list())

        await eventually(is_up, timeout_s=PATIENCE_S, what=f"{node_id} is registered")

    async def drained(self, node_id: str = "node-1", *, within_s: float = PATIENCE_S) -> float:
        """Ask a node to stop, and return how long that took."""
        began_s = time.monotonic()
        self.nodes[node_id].drain()
        await asyncio.wait_for(self.runs[node_id], within_s)
        return time.monotonic() - began_s

    async def close(self) -> None:
        """End everything."""
        for run in self.runs.values():
            run.cancel()
        await asyncio.gather(*self.runs.values(), return_exceptions=True)
        for client in self._clients:
            await client.close()
        await self.stop_ledger()

    # ---- intents

    async def submit(self, template: Template, payload: dict[str, Any] | None = None, **fields: Any) -> IntentView:
        """Submit an intent."""
        request = SubmitIntent(type=template.name, payload=payload or {}, **fields)
        submitted = await self.ledger.intents.submit(TENANT, request, capability=template, idempotency_key=None)
        return submitted.intent

    async def look(self, intent: IntentView) -> IntentView:
        """Look at an intent again."""
        return await self.ledger.intents.get(TENANT, intent.intent_id)

    async def until(self, intent: IntentView, *statuses: str, within_s: float = PATIENCE_S) -> IntentView:
        """Wait until an intent has one of these statuses (a terminal one unless told otherwise)."""
        wanted = statuses or tuple(str(state) for state in TERMINAL)
        last = intent

        async def has_come() -> bool:
            nonlocal last
            for run in self.runs.values():
                if run.done():
                    run.result()
            last = await self.look(intent)
            return last.status in wanted

        await eventually(has_come, timeout_s=within_s, what=lambda: f"the intent is {wanted}, not {last}")
        return last

    async def run(self, template: Template, payload: dict[str, Any] | None = None, **fields: Any) -> IntentView:
        """Submit an intent and wait for its end."""
        return await self.until(await self.submit(template, payload, **fields))

    async def kinds(self, intent: IntentView) -> list[str]:
        """The kinds of an intent's events, in order."""
        events = await self.ledger.events.after(TENANT, intent.thread_id, 0, intent_id=intent.intent_id, limit=1000)
        return [str(event.kind) for event in events]

    async def said(self, intent: IntentView, attempt: int = 1) -> str:
        """The text that an attempt streamed."""
        events = await self.ledger.events.after(TENANT, intent.thread_id, 0, intent_id=intent.intent_id, limit=1000)
        return "".join(
            event.data["text"] for event in events if event.kind == "delta" and event.data["attempt"] == attempt
        )


async def file_text(path: Path, *, within_s: float = PATIENCE_S) -> str:
    """Wait until a worker has written a file, and return what it wrote."""
    await eventually(lambda: path.exists() and path.read_text(), timeout_s=within_s, what=f"{path.name} is written")
    return path.read_text()
