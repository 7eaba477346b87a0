"""The ledger's side of the embedder: starts the process, keeps it alive, batches what is asked of it.

Must never block the event loop, never queue without bound, and never let a crash of the model be more than a moment
without semantic ranking.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from ledger.embedder.frames import LENGTH_BYTES, header_length, pack_frame, parse_header
from ledger.embedder.process import PACKAGED_MODEL, packaged_model_id
from mesh.contract.errors import ErrorCode, MeshError, unavailable

QUEUED_TEXTS_MAX = 512
TEXTS_A_FRAME = 8
TEXT_CHARS_MAX = 20_000
# A call of so few texts is a query that somebody waits for; more are messages to index.
URGENT_TEXTS_MAX = 4
LOAD_TIMEOUT_S = 300.0
# No frame takes nearly as long: a process that does not answer by then hangs and is replaced.
ANSWER_TIMEOUT_S = 60.0
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.5, 30.0
_HEALTHY_AFTER_S = 60.0

_log = structlog.get_logger(__name__)
Vectors = NDArray[np.float32]


class _ProcessLost(Exception):
    """The process ended, hung or spoke nonsense."""


@dataclass(eq=False)
class _Call:
    """One `embed` that waits."""

    texts: list[str]
    future: asyncio.Future[Vectors]
    rows: list[Vectors] = field(default_factory=list)

    @property
    def is_urgent(self) -> bool:
        return len(self.texts) <= URGENT_TEXTS_MAX

    @property
    def rest(self) -> list[str]:
        return self.texts[len(self.rows) :]


class EmbedderProcess:
    """An `Embedder` whose model lives in a child process of its own."""

    def __init__(
        self,
        model_name: str = PACKAGED_MODEL,
        *,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Name the model; nothing starts yet. `command` stands in for `python -m ledger.embedder` in tests."""
        self._model_name = model_name
        self._model_id = packaged_model_id() if model_name == PACKAGED_MODEL else model_name
        self._command = list(command or (sys.executable, "-m", "ledger.embedder"))
        self._environment = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None
        self._dimension = 0
        self._ready = asyncio.Event()
        self._calls: deque[_Call] = deque()
        self._is_asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "ready" if self.is_ready else "not ready"
        return f"EmbedderProcess({self._model_id}, {state}, {len(self._calls)} waiting)"

    @property
    def model_id(self) -> str:
        """Name and version of the model; of a model from the hub the version is known once it is loaded."""
        return self._model_id

    @property
    def dimension(self) -> int:
        """Length of a vector; 0 until the model was loaded once."""
        return self._dimension

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded and its process lives."""
        return self._ready.is_set()

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Begin to load the model in the background."""
        if self._task is None:
            self._task = asyncio.create_task(self._supervise(), name="embedder")

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the model is loaded; False when it is not by then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        return self.is_ready

    async def close(self) -> None:
        """End the process and fail what waits."""
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def embed(self, texts: Sequence[str], *, timeout_s: float) -> Vectors:
        """Return unit vectors, float32[n, dimension].

        Raises: MeshError `unavailable` when the model is loading, the queue is full, or the time is over;
            `too_large` for a text beyond TEXT_CHARS_MAX: cut it into chunks.
        """
        if any(len(text) > TEXT_CHARS_MAX for text in texts):
            raise MeshError(ErrorCode.TOO_LARGE, f"a text to embed may have {TEXT_CHARS_MAX} characters at most")
        if not self.is_ready:
            raise unavailable("the embedding model is not loaded yet")
        if not texts:
            return np.zeros((0, self._dimension), dtype=np.float32)
        if sum(len(call.texts) for call in self._calls) + len(texts) > QUEUED_TEXTS_MAX:
            raise unavailable("the embedder has more to do than it may queue")
        call = _Call(list(texts), asyncio.get_running_loop().create_future())
        self._calls.append(call)
        self._is_asked.set()
        try:
            async with asyncio.timeout(timeout_s):
                return await call.future
        except TimeoutError as error:
            raise unavailable(f"the embedder did not answer within {timeout_s:g} s") from error
        finally:
            with contextlib.suppress(ValueError):
                self._calls.remove(call)

    async def _supervise(self) -> None:
        """Run one process after another, with growing pauses while they fail."""
        backoff_s = BACKOFF_MIN_S
        while True:
            started_at = time.monotonic()
            try:
                await self._run_process()
            except Exception as error:  # whatever it was: the next process starts clean
                if time.monotonic() - started_at > _HEALTHY_AFTER_S:
                    backoff_s = BACKOFF_MIN_S
                _log.warning("embedder_lost", detail=str(error), retry_in_s=backoff_s)
            finally:
                self._ready.clear()
                self._fail_waiting("the embedder stopped")
            await asyncio.sleep(backoff_s)
            backoff_s = min(BACKOFF_MAX_S, 2 * backoff_s)

    async def _run_process(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            self._model_name,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._child_environment(),
        )
        self._process = process
        try:
            hello, _ = await self._receive(process, LOAD_TIMEOUT_S)
            if "failed" in hello:
                raise _ProcessLost(f"the model {self._model_name!r} cannot be loaded: {hello['failed']}")
            self._model_id, self._dimension = str(hello["model_id"]), int(hello["dimension"])
            self._ready.set()
            _log.info("embedder_ready", model_id=self._model_id, pid=process.pid)
            await self._serve(process)
        finally:
            self._process = None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _child_environment(self) -> dict[str, str]:
        # The model needs none of the mesh's secrets.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("INTENTMESH_")}
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(part for part in (root, kept.get("PYTHONPATH")) if part)
        quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        one_thread = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        return kept | {"PYTHONPATH": path} | quiet | one_thread | self._environment

    async def _serve(self, process: asyncio.subprocess.Process) -> None:
        number = 0
        ended = asyncio.create_task(process.wait())
        try:
            while True:
                batch = self._next_batch()
                if not batch:
                    self._is_asked.clear()
                    asked = asyncio.create_task(self._is_asked.wait())
                    try:
                        await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        asked.cancel()
                    if ended.done():
                        raise _ProcessLost(f"the process ended with {process.returncode}")
                    continue
                number += 1
                await self._exchange(process, number, batch)
        finally:
            ended.cancel()

    def _next_batch(self) -> list[tuple[_Call, list[str]]]:
        """Take up to one frame's worth of texts: of urgent calls if there are any, else of the others."""
        waiting = [call for call in self._calls if call.rest and not call.future.done()]
        batch: list[tuple[_Call, list[str]]] = []
        room = TEXTS_A_FRAME
        for call in [call for call in waiting if call.is_urgent] or waiting:
            if room <= 0:
                break
            texts = call.rest[:room]
            batch.append((call, texts))
            room -= len(texts)
        return batch

    async def _exchange(
        self, process: asyncio.subprocess.Process, number: int, batch: list[tuple[_Call, list[str]]]
    ) -> None:
        """Send one frame and hand its vectors out."""
        assert process.stdin is not None
        texts = [text for _, part in batch for text in part]
        process.stdin.write(pack_frame({"id": number, "texts": texts}))
        await process.stdin.drain()
        header, body = await self._receive(process, ANSWER_TIMEOUT_S)
        if header.get("id") != number:
            raise _ProcessLost("the process answered something else than it was asked")
        if "failed" in header:
            for call, _ in batch:
                if not call.future.done():
                    call.future.set_exception(unavailable(f"the embedder failed: {header['failed']}"))
            return
        vectors = np.frombuffer(body, dtype="<f4").reshape(len(texts), self._dimension)
        start = 0
        for call, part in batch:
            call.rows.extend(vectors[start : start + len(part)])
            start += len(part)
            if not call.rest and not call.future.done():
                call.future.set_result(np.array(call.rows, dtype=np.float32))

    @staticmethod
    async def _receive(process: asyncio.subprocess.Process, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                length = header_length(await process.stdout.readexactly(LENGTH_BYTES))
                header = parse_header(await process.stdout.readexactly(length))
                return header, await process.stdout.readexactly(header["bytes"])
        except asyncio.IncompleteReadError as error:
            raise _ProcessLost(f"the process ended ({await process.wait()})") from error
        except TimeoutError as error:
            raise _ProcessLost(f"the process did not answer within {timeout_s:g} s") from error

    def _fail_waiting(self, detail: str) -> None:
        for call in self._calls:
            if not call.future.done():
                call.future.set_exception(unavailable(detail))
