"""`python -m gateway` as a process: starts, serves nodes and callers, refuses what is unsafe, stops cleanly."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from support.running_gateway import ECHO
from support.running_mesh import ROOT, free_port

from gateway.__main__ import serve
from gateway.settings import GatewaySettings
from ledger.client import LedgerClient
from mesh.contract.errors import MeshError
from mesh.contract.messages import ClaimRequest, CommitResult, RegisterNode

TOKEN = "mesh-token-for-tests"


class GatewayProcess:
    """One gateway over SQLite in a folder of its own."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.port, self.ledger_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        plain = {key: value for key, value in os.environ.items() if not key.startswith("INTENTMESH_")}
        chosen = {
            "DATA_DIR": str(folder),
            "PORT": str(self.port),
            "LEDGER_URL": f"http://127.0.0.1:{self.ledger_port}",
            "MESH_TOKEN": TOKEN,
            "EMBEDDING_MODEL": "none",
            **settings,
        }
        self.environment = plain | {f"INTENTMESH_{name}": value for name, value in chosen.items() if value}
        self.environment["PYTHONPATH"] = str(ROOT)
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", env=self.environment, stderr=asyncio.subprocess.PIPE
        )

    async def end(self) -> tuple[int, str]:
        """Wait until it has ended, and return its exit code and log."""
        assert self.process is not None
        _, log = await asyncio.wait_for(self.process.communicate(), 30)
        assert self.process.returncode is not None
        return self.process.returncode, log.decode()


async def _ready(client: httpx.AsyncClient, gateway: GatewayProcess) -> None:
    async with asyncio.timeout(30):
        while True:
            assert gateway.process is not None
            assert gateway.process.returncode is None, await gateway.end()
            try:
                if (await client.get("/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def running_process(folder: Path, **settings: str) -> AsyncIterator[tuple[GatewayProcess, httpx.AsyncClient]]:
    """A ready gateway process; killed at the end if it still lives."""
    gateway = GatewayProcess(folder, **settings)
    await gateway.start()
    try:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as client:
            await _ready(client, gateway)
            yield gateway, client
    finally:
        assert gateway.process is not None
        if gateway.process.returncode is None:
            gateway.process.kill()
            await gateway.process.communicate()


async def test_gateway_over_sqlite_serves_callers_and_nodes_and_stops(tmp_path: Path) -> None:
    """A node claims over the internal port; SIGTERM ends streams and waits, and the exit code is 0."""
    async with running_process(tmp_path) as (gateway, client):
        node = LedgerClient(f"http://127.0.0.1:{gateway.ledger_port}", TOKEN)
        await node.register(RegisterNode(node_id="n", host="test", slots=1, capabilities=[ECHO]))
        body = {"type": "echo", "payload": {"text": "hi"}, "thread_id": "t"}
        asking = asyncio.create_task(client.post("/intent?wait=20", json=body))
        async with asyncio.timeout(10):
            while not (found := (await node.claimable("n", ["echo"], 1)).intents):
                await asyncio.sleep(0.02)
        claim = await node.claim(found[0].intent_id, ClaimRequest(node_id="n"))
        await node.commit(claim.intent_id, CommitResult(node_id="n", epoch=claim.epoch, result=claim.payload))
        answer = await asking
        assert (answer.status_code, answer.json()["result"]) == (200, {"text": "hi"})
        await node.close()

        reading = asyncio.create_task(client.get("/threads/t/events"))
        waiting = asyncio.create_task(client.post("/intent?wait=60", json=body))
        async with asyncio.timeout(10):
            while "intentmesh_http_requests_open 3.0" not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.02)
        assert gateway.process is not None
        gateway.process.send_signal(signal.SIGTERM)
        assert "result.committed" in (await reading).text
        assert (await waiting).status_code == 202
        code, log = await gateway.end()
        assert code == 0, log
        assert "Traceback" not in log


async def test_second_process_on_the_same_file_is_refused(tmp_path: Path) -> None:
    """Exit code 1, and the message names the way out."""
    async with running_process(tmp_path):
        second = GatewayProcess(tmp_path)
        await second.start()
        code, log = await second.end()
        assert code == 1
        assert "PostgreSQL" in log
        assert "Traceback" not in log


async def test_taken_port_is_said(tmp_path: Path) -> None:
    """Exit code 1 with the address, before any database is touched."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gateway = GatewayProcess(tmp_path / "other", PORT=str(port))
        await gateway.start()
        code, log = await gateway.end()
        assert (code, "Traceback" in log) == (1, False)
        assert f"127.0.0.1:{port}" in log
        assert not (tmp_path / "other").exists()


async def test_wrong_setting_is_named(tmp_path: Path) -> None:
    """Exit code 2 with the variable's name, and no traceback."""
    gateway = GatewayProcess(tmp_path, PORT="http")
    await gateway.start()
    code, log = await gateway.end()
    assert (code, "Traceback" in log) == (2, False)
    assert "INTENTMESH_PORT" in log


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "0.0.0.0"}, "INTENTMESH_ACCESS"),
        ({"host": "0.0.0.0", "access": "locked", "mesh_token": None}, "INTENTMESH_MESH_TOKEN"),
        ({"ledger_host": "0.0.0.0", "mesh_token": None}, "INTENTMESH_LEDGER_HOST"),
        ({"host": "192.0.2.1"}, "address of this machine"),
        ({"redis_url": "nonsense"}, "redis://"),
        ({"database_url": "mysql://x/y"}, "sqlite:///"),
    ],
)
async def test_unsafe_or_impossible_start_is_refused(tmp_path: Path, settings: dict[str, str], said: str) -> None:
    """With a hint that says what to set, before anything is served."""
    chosen = {"port": 0, "data_dir": tmp_path, "mesh_token": TOKEN, "embedding_model": "none", **settings}
    with pytest.raises(MeshError) as caught:
        await asyncio.wait_for(serve(GatewaySettings(**chosen)), 20)
    assert said in f"{caught.value.detail} {caught.value.hint}"


async def test_locked_gateway_beyond_loopback_makes_its_first_key(tmp_path: Path) -> None:
    """Nobody gets in but with the mesh token, which makes a key."""
    async with running_process(tmp_path, HOST="0.0.0.0", ACCESS="locked") as (_, client):
        assert (await client.get("/intents")).status_code == 401
        operator = {"Authorization": f"Bearer {TOKEN}"}
        secret = (await client.post("/admin/keys", json={"label": "first"}, headers=operator)).json()["secret"]
        assert (await client.get("/intents", headers={"Authorization": f"Bearer {secret}"})).status_code == 200
