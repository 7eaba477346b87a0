"""An OpenAI-compatible server whose answers the test writes: it remembers what it was asked.

It stands in for a model only where the test is about what the mesh sends and does, never about answers.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from support.running_mesh import free_port

Script = Callable[[list[dict[str, Any]]], list[str]]


class ScriptedModel:
    """Answers `/v1/chat/completions` with the pieces that `script` returns for the messages."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.pause_s = 0.0
        self.status = 200
        # None: a whole answer. Else how it ends after the script's pieces: cut (the connection breaks), end (it just
        # ends), garbage (a line that is no JSON), error (an error in the stream).
        self.ending: str | None = None
        self.has_usage = True
        self.url = ""

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "scripted", "object": "model", "created": 0, "owned_by": "test"}]}

        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> Response:
            body = await request.json()
            self.requests.append(body)
            self.keys.append(request.headers.get("authorization"))
            if self.status != 200:
                return Response(
                    json.dumps({"error": {"message": "scripted failure"}}), self.status, media_type="application/json"
                )
            return StreamingResponse(self._stream(body), media_type="text/event-stream")

        return app

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        base = {"id": "chat-1", "object": "chat.completion.chunk", "created": 0, "model": body["model"]}
        pieces = self.script(body["messages"])
        for piece in pieces:
            yield (
                "data: "
                + json.dumps(base | {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
                + "\n\n"
            )
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
        match self.ending:
            case "cut":
                raise ConnectionError("scripted")
            case "end":
                return
            case "garbage":
                yield "data: {not json\n\n"
            case "error":
                yield "data: " + json.dumps({"error": {"message": "out of memory"}}) + "\n\n"
        yield "data: " + json.dumps(base | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + "\n\n"
        usage = {"prompt_tokens": 7, "completion_tokens": len(pieces), "total_tokens": 7 + len(pieces)}
        if self.has_usage:
            yield "data: " + json.dumps(base | {"choices": [], "usage": usage}) + "\n\n"
        yield "data: [DONE]\n\n"

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["ScriptedModel"]:
        """Serve on loopback while the block runs."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/v1"
        server = uvicorn.Server(uvicorn.Config(self._app(), port=port, log_level="critical", lifespan="off"))
        task = asyncio.create_task(server.serve())
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            yield self
        finally:
            server.should_exit = True
            await task
