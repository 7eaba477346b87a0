"""The embedded server: private, persistent, alone on its directory, and gone with its owner."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.mesh_messages import announcement, bid

from mesh.backplane import embedded_server
from mesh.backplane.backplane import Backplane
from mesh.backplane.client import connect
from mesh.backplane.embedded_server import EmbeddedServer, find_program, socket_path, url_for
from mesh.contract.errors import ErrorCode, MeshError


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_it_keeps_the_book_over_a_restart(tmp_path: Path) -> None:
    """An intent that waited is there again."""
    intent = announcement()
    async with EmbeddedServer(tmp_path) as server, Backplane(server.url, prefix="test") as backplane:
        assert backplane.is_up
        await backplane.announce([intent])
    async with EmbeddedServer(tmp_path) as server, Backplane(server.url, prefix="test") as backplane:
        (award,) = await backplane.place_bids("n1", 1, [bid("n1")], ttl_s=30)
        assert award.intent_id == intent.intent_id


async def test_only_this_user_can_reach_it(tmp_path: Path) -> None:
    """No port, a socket and a folder with no rights for others, and no eviction."""
    async with EmbeddedServer(tmp_path) as server:
        for path in (socket_path(tmp_path), socket_path(tmp_path).parent):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        redis = connect(server.url)
        try:
            settings = {**await redis.config_get("port"), **await redis.config_get("maxmemory-policy")}
            assert settings == {"port": "0", "maxmemory-policy": "noeviction"}
        finally:
            await redis.aclose()
        assert (tmp_path / "redis.url").read_text().strip() == server.url == url_for(tmp_path)


async def test_it_ends_when_it_is_closed(tmp_path: Path) -> None:
    """No process is left."""
    server = EmbeddedServer(tmp_path)
    await server.start()
    pid = server.pid
    assert pid is not None
    await server.close()
    assert not is_alive(pid)
    await server.close()


async def test_it_is_killed_when_it_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen server does not hold the shutdown."""
    monkeypatch.setattr(embedded_server, "STOP_TIMEOUT_S", 0.2)
    server = EmbeddedServer(tmp_path)
    await server.start()
    assert server.pid is not None
    os.kill(pid := server.pid, signal.SIGSTOP)
    await server.close()
    assert not is_alive(pid)


async def test_a_second_server_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    """And the first is unharmed."""
    async with EmbeddedServer(tmp_path) as server:
        with pytest.raises(MeshError, match="already runs"):
            await EmbeddedServer(tmp_path).start()
        async with Backplane(server.url, prefix="test") as backplane:
            assert backplane.is_up


async def test_after_kill_9_it_starts_again_on_the_same_directory(tmp_path: Path) -> None:
    """A stale socket and a lock of a dead process are no obstacles."""
    server = EmbeddedServer(tmp_path)
    await server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await server.close()
    async with EmbeddedServer(tmp_path) as server, Backplane(server.url, prefix="test") as backplane:
        assert backplane.is_up


def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """kill -9 of the owner leaves no server."""
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            f"subprocess.Popen([sys.executable, '-m', 'mesh.backplane.embedded_server', '--data-dir', {str(tmp_path)!r}])\n"
            "time.sleep(60)",
        ]
    )
    try:
        deadline = time.monotonic() + 15
        while not socket_path(tmp_path).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (server,) = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
    finally:
        owner.kill()
        owner.wait()
    while is_alive(int(server)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_a_directory_too_deep_for_a_socket_gets_a_short_path(tmp_path: Path) -> None:
    """The data stays in the directory; the socket lies in a private folder elsewhere."""
    deep = tmp_path / ("d" * 120) / "with space and %"
    assert len(os.fsencode(socket_path(deep))) <= 107
    assert socket_path(deep).parent != deep / "redis"
    async with EmbeddedServer(deep) as server, Backplane(server.url, prefix="test") as backplane:
        assert backplane.is_up
        assert stat.S_IMODE(socket_path(deep).parent.stat().st_mode) == 0o700
    assert (deep / "redis" / "appendonlydir").is_dir()
    socket_path(deep).unlink(missing_ok=True)
    socket_path(deep).parent.rmdir()


async def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """The child's words reach the error."""
    with pytest.raises(MeshError, match="no Redis or Valkey server"):
        await EmbeddedServer(tmp_path, program=Path("/bin/false")).start()


def test_a_server_setting_that_is_no_server_is_refused(tmp_path: Path) -> None:
    """Neither a missing file nor another program."""
    for program in (tmp_path / "missing", Path("/bin/true")):
        with pytest.raises(MeshError) as caught:
            find_program(program)
        assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_an_old_server_on_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6.x is too old; the packaged server is used instead, and a new one on PATH before that."""
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho 'Redis server v=6.2.1 sha=0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find_program() != program
    program.write_text("#!/bin/sh\necho 'Redis server v=7.0.15 sha=0'\n")
    assert find_program() == program


async def test_a_foreign_folder_at_the_short_path_is_refused(tmp_path: Path) -> None:
    """A link that someone else put there is not followed."""
    deep = tmp_path / ("e" * 120)
    folder = socket_path(deep).parent
    folder.symlink_to(tmp_path)
    try:
        with pytest.raises(MeshError, match="not a directory of this user"):
            await EmbeddedServer(deep).start()
    finally:
        folder.unlink()
    await asyncio.sleep(0)
