"""`python -m mesh`: signals, exit codes, and what its workers may see of it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.node_lab import TOKEN, NodeLab, file_text
from support.process_list import processes_of
from support.running_mesh import ROOT, eventually

from mesh.contract.template import Template

Starter = Callable[..., "subprocess.Popen[bytes]"]

LEASE_TTL_S = 2.0


@pytest.fixture
async def start(lab: NodeLab) -> AsyncIterator[Starter]:
    """Start a node's process beside the lab's ledger."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**extra: str) -> "subprocess.Popen[bytes]":
        plain = {key: value for key, value in os.environ.items() if not key.startswith("INTENTMESH_")}
        mine = {
            "INTENTMESH_NODE_ID": "node-1",
            "INTENTMESH_DATA_DIR": str(lab.folder / "node-1"),
            "INTENTMESH_CAPABILITIES_DIR": str(lab.capabilities),
            "INTENTMESH_LEDGER_URL": f"http://127.0.0.1:{lab.port}",
            "INTENTMESH_MESH_TOKEN": TOKEN,
            "INTENTMESH_NODE_POLL_INTERVAL_S": "0.05",
            "PYTHONPATH": str(ROOT),
        }
        with (lab.folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "mesh"],
                cwd=lab.folder,
                env={**plain, **mine, **extra},
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


@pytest.fixture
def sleeper(lab: NodeLab, tmp_path: Path) -> Template:
    """A capability that says that it has begun, and works for as long as it is told."""
    return lab.capability(
        f"""
        import time
        def run(intent, context):
            open("{tmp_path}/begun", "w").write("yes")
            time.sleep(intent.payload["for_s"] if intent.attempt == 1 else 0)
            return intent.attempt
        """
    )


async def ended(process: "subprocess.Popen[bytes]", *, within_s: float) -> int:
    """Wait for a process's end and return its exit code."""
    return await asyncio.to_thread(process.wait, within_s)


async def test_one_signal_drains_even_a_node_that_was_draining(
    lab: NodeLab, start: Starter, sleeper: Template, tmp_path: Path
) -> None:
    """The operator's wish to drain is not a first signal: what runs still ends well."""
    process = start()
    intent = await lab.submit(sleeper, {"for_s": 1.5})
    await file_text(tmp_path / "begun")
    await lab.ledger.nodes.drain("node-1")
    await eventually(lambda: b"drain_requested" in (tmp_path / "log").read_bytes(), timeout_s=5, what="it drains")
    process.send_signal(signal.SIGTERM)
    assert await ended(process, within_s=10) == 0
    done = await lab.look(intent)
    assert (done.status, done.result) == ("succeeded", 1)


async def test_a_second_signal_ends_it_at_once(lab: NodeLab, start: Starter, sleeper: Template, tmp_path: Path) -> None:
    """No process is left, and another node runs the intent again."""
    process = start()
    intent = await lab.submit(sleeper, {"for_s": 60})
    await file_text(tmp_path / "begun")
    process.send_signal(signal.SIGINT)
    await eventually(lambda: b"node_draining" in (tmp_path / "log").read_bytes(), timeout_s=5, what="it drains")
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert await ended(process, within_s=10) == 0
    assert time.monotonic() - began_s < 5
    await eventually(lambda: not processes_of(tmp_path / "node-1"), timeout_s=5, what="no process is left")
    lab.node("node-2")
    assert (await lab.until(intent)).result == 2


async def test_a_wrong_token_is_said_in_one_line(lab: NodeLab, start: Starter, sleeper: Template) -> None:
    """With the setting to look at, and without a traceback."""
    process = start(INTENTMESH_MESH_TOKEN="wrong")
    assert await ended(process, within_s=15) == 1
    text = (lab.folder / "log").read_text()
    assert "INTENTMESH_MESH_TOKEN" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [("NODE_ID", "a b"), ("NODE_ID", "../x"), ("LLM_BASE_URL", "localhost:8000"), ("NODE_SLOTS", "0")],
)
async def test_a_bad_setting_is_named(lab: NodeLab, start: Starter, name: str, value: str) -> None:
    """Before anything is started."""
    process = start(**{f"INTENTMESH_{name}": value})
    assert await ended(process, within_s=15) == 2
    assert f"INTENTMESH_{name}" in (lab.folder / "log").read_text()


async def test_a_killed_node_leaves_nothing(lab: NodeLab, start: Starter, sleeper: Template, tmp_path: Path) -> None:
    """SIGKILL: its workers end with it, and the next node goes on once the lease is over."""
    process = start()
    intent = await lab.submit(sleeper, {"for_s": 60})
    await file_text(tmp_path / "begun")
    process.kill()
    await eventually(lambda: not processes_of(tmp_path / "node-1"), timeout_s=5, what="no process is left")
    lab.node("node-2")
    done = await lab.until(intent)
    assert (done.result, done.attempts[0].cause) == (2, "lease_lost")


def test_a_process_of_the_same_user_cannot_read_a_hidden_one() -> None:
    """The mesh token and the model's key stand in a node's environment; root alone reads it."""
    script = textwrap.dedent(
        """
        import ctypes, os, sys
        from worker.kernel import hide_from_others
        if os.getuid() == 0:
            os.setuid(65534)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as after a program's start
        if sys.argv[1] == "hidden":
            hide_from_others()
        if os.fork() == 0:
            try:
                open(f"/proc/{os.getppid()}/environ").read()
            except PermissionError:
                os._exit(13)
            os._exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
        """
    )
    codes = [
        subprocess.run([sys.executable, "-c", script, mode], env={"PYTHONPATH": str(ROOT)}).returncode
        for mode in ("open", "hidden")
    ]
    assert codes == [0, 13]
