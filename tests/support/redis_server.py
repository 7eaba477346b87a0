"""A real server that speaks Redis' protocol, for tests: start, stop, kill, freeze, thaw, restart, empty.

Must never leave a process behind: it dies with the test run.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from mesh.backplane.embedded_server import find_program

START_TIMEOUT_S = 10.0


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


class RedisServer:
    """One server on a Unix socket in its own folder. `is_persistent` keeps data over a restart."""

    def __init__(self, folder: Path, *, is_persistent: bool = False, policy: str = "noeviction") -> None:
        self._folder = folder
        self._is_persistent = is_persistent
        self._policy = policy
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{folder}/redis.sock"

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None
        return self._process.pid

    def client(self) -> Redis:
        """A plain client, to look and to meddle."""
        return Redis.from_url(self.url, decode_responses=True, socket_timeout=5)

    def start(self) -> None:
        """Start, and wait until it answers."""
        options = {
            "--port": "0",
            "--unixsocket": f"{self._folder}/redis.sock",
            "--dir": str(self._folder),
            "--logfile": f"{self._folder}/redis.log",
            "--save": "",
            "--appendonly": "yes" if self._is_persistent else "no",
            "--appendfsync": "always",
            "--maxmemory-policy": self._policy,
        }
        command = [str(find_program()), *(part for option in options.items() for part in option)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
        deadline = time.monotonic() + START_TIMEOUT_S
        with self.client() as client:
            while True:
                with contextlib.suppress(RedisError):
                    if client.ping():
                        return
                assert self._process.poll() is None, Path(self._folder, "redis.log").read_text()
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.01)

    def stop(self, *, signal_number: int = signal.SIGKILL) -> None:
        """End the process; SIGKILL unless told otherwise. Does nothing to one that has ended."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self.thaw()
            self._process.send_signal(signal_number)
        self._process.wait(timeout=10)
        self._process = None

    def restart(self) -> None:
        """Kill it and start it again; without persistence it comes back empty."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def flush(self) -> None:
        """FLUSHALL, and forget the scripts too."""
        with self.client() as client:
            client.flushall()
            client.script_flush()


@contextlib.contextmanager
def running_redis(*, is_persistent: bool = False, policy: str = "noeviction") -> Iterator[RedisServer]:
    """Run a server in a short temporary folder (a socket's path is limited to 107 bytes)."""
    with tempfile.TemporaryDirectory(prefix="redis-", dir="/tmp") as folder:
        server = RedisServer(Path(folder), is_persistent=is_persistent, policy=policy)
        server.start()
        try:
            yield server
        finally:
            server.stop()
