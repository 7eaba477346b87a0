"""A whole mesh of real processes on loopback, in one data directory, for the acceptance tests.

Must never leave a process behind: `stop` ends what `start` began, by pid, and says what survived.
"""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
from support.process_list import processes_in

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
BUSY_TIMEOUT_S = 60.0


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def eventually(condition: Any, *, timeout_s: float, what: str | Callable[[], str]) -> Any:
    """Return the condition's first true value; fail with `what` after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what() if callable(what) else what}"
        await asyncio.sleep(0.05)


class RunningMesh:
    """Redis, gateway, ledger and nodes as processes. On SQLite the gateway's process holds the ledger too."""

    def __init__(
        self,
        folder: Path,
        *,
        database_url: str | None = None,
        nodes: int = 1,
        with_redis: bool = True,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.data_dir = folder / "data"
        self._database_url = database_url
        self._node_count = nodes
        self._with_redis = with_redis
        self._ports = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self._ports[0]}"
        self.mesh_token = secrets.token_urlsafe(16)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._extra = environment or {}
        self._redis_url: str | None = None
        self.client = httpx.AsyncClient(base_url=self.url, timeout=120)

    def environment(self) -> dict[str, str]:
        """What every role of this mesh is started with."""
        plain = {key: value for key, value in os.environ.items() if not key.startswith("INTENTMESH_")}
        mine = {
            "INTENTMESH_DATA_DIR": str(self.data_dir),
            "INTENTMESH_HOST": "127.0.0.1",
            "INTENTMESH_PORT": str(self._ports[0]),
            "INTENTMESH_LEDGER_URL": f"http://127.0.0.1:{self._ports[1]}",
            "INTENTMESH_LEDGER_PORT": str(self._ports[1]),
            "INTENTMESH_MESH_TOKEN": self.mesh_token,
            "INTENTMESH_CAPABILITIES_DIR": str(ROOT / "capabilities"),
            "INTENTMESH_EMBEDDING_MODEL": "none",
            "INTENTMESH_NODE_SLOTS": "4",
            "PYTHONPATH": str(ROOT),
        }
        if self._redis_url:
            mine["INTENTMESH_REDIS_URL"] = self._redis_url
        if self._database_url:
            mine["INTENTMESH_DATABASE_URL"] = self._database_url
        return plain | mine | self._extra

    def launch(self, name: str, *arguments: str, **extra: str) -> subprocess.Popen[bytes]:
        """Start one role; its log goes to `<folder>/<name>.log`."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env=self.environment() | extra,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes[name] = process
        return process

    def start_node(self, name: str, **extra: str) -> subprocess.Popen[bytes]:
        """Start a node called `name`."""
        return self.launch(name, "mesh", INTENTMESH_NODE_ID=name, **extra)

    async def start(self) -> Self:
        """Start everything and wait until a node has registered."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if self._with_redis:
            await self.start_redis()
        if self._database_url:
            subprocess.run(
                [sys.executable, "-m", "ledger", "upgrade"],
                env=self.environment(),
                cwd=self.folder,
                check=True,
                capture_output=True,
            )
            self.launch("ledger", "ledger", "serve")
        self.launch("gateway", "gateway")
        await eventually(self.is_ready, timeout_s=START_TIMEOUT_S, what=lambda: f"a ready gateway{self._logs()}")
        for number in range(1, self._node_count + 1):
            self.start_node(f"node-{number}")
        await eventually(
            lambda: self._nodes_up(self._node_count),
            timeout_s=START_TIMEOUT_S,
            what=lambda: f"{self._node_count} nodes{self._logs()}",
        )
        return self

    async def start_redis(self) -> None:
        """Start the embedded server, or start it again."""
        address = self.data_dir / "redis.url"
        address.unlink(missing_ok=True)
        self.launch("redis", "mesh.backplane.embedded_server", "--data-dir", str(self.data_dir))
        await eventually(address.exists, timeout_s=START_TIMEOUT_S, what="redis.url")
        self._redis_url = address.read_text().strip()

    async def is_ready(self) -> bool:
        """Whether the gateway says so; fails at once when a role has ended."""
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name} ended with {process.returncode}{self._logs()}"
        try:
            return (await self.client.get("/readyz")).status_code == 200
        except httpx.TransportError:
            return False

    async def _nodes_up(self, count: int) -> bool:
        nodes = (await self.client.get("/nodes")).json()["items"]
        return sum(node["status"] == "up" for node in nodes) >= count

    def _logs(self) -> str:
        return "".join(f"\n--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    async def submit(
        self, capability: str, payload: dict[str, Any], *, wait_s: float = 60, **fields: Any
    ) -> dict[str, Any]:
        """Post an intent as a careful client does and return the answer, which must be a 2xx in the end.

        A 503 says that nothing was lost and when to come again; the same Idempotency-Key makes that safe.
        """
        body = {"type": capability, "payload": payload} | fields
        key = {"Idempotency-Key": secrets.token_hex(16)}
        deadline_s = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            answer = await self.client.post(
                "/intent", params={"wait": wait_s} if wait_s else {}, json=body, headers=key
            )
            if answer.status_code != 503 or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(float(answer.headers["Retry-After"]))
        assert answer.is_success, answer.text
        return dict(answer.json())

    async def intent(self, intent_id: str) -> dict[str, Any]:
        """Return one intent as the gateway shows it."""
        return dict((await self.client.get(f"/intents/{intent_id}")).raise_for_status().json())

    def kill(self, name: str) -> None:
        """End one role as a power cut would."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    async def stop(self) -> None:
        """Stop nodes, then gateway and ledger, then Redis; no process of this mesh may survive."""
        await self.client.aclose()
        order = sorted(
            self.processes,
            key=lambda name: (
                ("redis", "ledger", "gateway").index(name) if name in {"redis", "ledger", "gateway"} else 9
            ),
        )
        codes = {}
        for name in reversed(order):
            process = self.processes.pop(name)
            process.send_signal(signal.SIGTERM)
            try:
                codes[name] = await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                codes[name] = process.wait()
        await eventually(
            lambda: not processes_in(self.folder),
            timeout_s=5,
            what=lambda: f"no process left: {processes_in(self.folder)}",
        )
        assert set(codes.values()) <= {0}, f"exit codes {codes}{self._logs()}"

    async def __aenter__(self) -> Self:
        try:
            return await self.start()
        except BaseException:
            for process in self.processes.values():
                process.kill()
                process.wait()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
