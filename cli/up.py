"""`up`: a whole mesh on this machine, with one command and one data folder.

Starts an embedded Redis-protocol server, a gateway with the ledger in it (SQLite), and nodes, as processes.
Must never start on a data folder that another mesh uses, nor leave a process behind.
"""

import fcntl
import os
import secrets
import shlex
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.text import Text

from cli.connection import open_client
from cli.failures import CallFailed
from cli.output import err, fail, out
from cli.roles import role_command, role_environment
from cli.settings import CliSettings
from cli.supervisor import Role, RoleFailed, RoleSpec, Supervisor

REDIS_START_MAX_S = 15.0
START_MAX_S = 120.0
STILL_WAITING_EVERY_S = 5.0
READY_CHECK_EVERY_S = 0.15
READY_CHECK_TIMEOUT_S = 5.0
# Shorter than a node's own 30 s: who presses Ctrl-C in a terminal waits for it.
DRAIN_TIMEOUT_S = 10.0
STOP_GRACE_S = 8.0
# A gateway lets running requests end for so long: less than its grace here, so that it ends in order.
SHUTDOWN_GRACE_S = 5
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - only looked up, never bound here


class _Teller:
    """Prints progress with the seconds since the start."""

    def __init__(self) -> None:
        self._begun_at = time.monotonic()

    def say(self, text: str) -> None:
        elapsed_s = time.monotonic() - self._begun_at
        err.print(Text.assemble((f"{elapsed_s:6.1f} s  ", "dim"), text), soft_wrap=True)


def up(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [INTENTMESH_HOST, 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65_535, help="Port. [INTENTMESH_PORT, 8080]")] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of everything that the mesh keeps. [INTENTMESH_DATA_DIR, ./.intentmesh]"),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="How many nodes.")] = 1,
    slots: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Intents at once on each node. [INTENTMESH_NODE_SLOTS]")
    ] = None,
) -> None:
    """Start a whole mesh here; Ctrl-C drains and stops all of it.

    Everything is kept in ./.intentmesh of the folder in which you are, unless --data-dir says otherwise.
    Capabilities come from the shipped folder and from ./capabilities; set INTENTMESH_CAPABILITIES_DIR for others.
    """
    given = {"host": host, "port": port, "data_dir": data_dir}
    settings = CliSettings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    settings = settings.model_copy(update={"data_dir": settings.data_dir.expanduser().resolve()})
    lock = _take_data_dir(settings.data_dir)
    teller = _Teller()
    supervisor = Supervisor(teller.say)
    supervisor.install_signal_handlers()
    try:
        mesh = _Mesh(settings, supervisor, teller, node_count=nodes, slots=slots)
        mesh.start()
        mesh.watch()
    except RoleFailed as error:
        raise fail(str(error), "intentmesh doctor says what is missing") from error
    finally:
        if any(role.is_running for role in supervisor.roles):
            teller.say("stopping: nodes finish what they run (Ctrl-C again stops at once)")
        supervisor.stop()
        os.close(lock)
    teller.say("stopped")


def _take_data_dir(data_dir: Path) -> int:
    """Create the data folder and lock it; the lock lasts as long as the returned descriptor."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(data_dir / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise fail(f"the data folder cannot be used: {error}", "--data-dir FOLDER") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise fail(
            f"another mesh (process {owner}) uses {data_dir}",
            "use that one, stop it, or give this one a folder of its own: --data-dir FOLDER --port PORT",
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _ledger_port(settings: CliSettings) -> int:
    """Return where the ledger shall listen: as set, else beside the gateway's port, else on any free one."""
    if settings.ledger_port is not None:
        return settings.ledger_port
    if settings.port < 65_535 and is_port_free("127.0.0.1", settings.port + 1):
        return settings.port + 1
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _mesh_token(settings: CliSettings) -> str:
    """Return the token that the roles show each other: as set, else kept in the data folder."""
    if settings.mesh_token:
        return settings.mesh_token.get_secret_value()
    path = settings.data_dir / "mesh_token"
    with suppress(FileNotFoundError):
        if token := path.read_text(encoding="utf-8").strip():
            return token
    token = secrets.token_urlsafe(32)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(token + "\n")
    return token


class _Mesh:
    """The roles of one mesh and whether it is ready."""

    def __init__(
        self, settings: CliSettings, supervisor: Supervisor, teller: _Teller, *, node_count: int, slots: int | None
    ) -> None:
        self._settings = settings
        self._supervisor = supervisor
        self._teller = teller
        self._node_count = node_count
        self._slots = slots
        host = LOOPBACK_OF.get(settings.host, settings.host)
        self.url = f"http://{host}:{settings.port}"
        self._token = _mesh_token(settings)
        self._check_at = 0.0
        self._begun_at = datetime.now(UTC)
        self._missing = "the gateway does not answer yet"
        self._capability_names: list[str] = []

    def start(self) -> None:
        """Start every role and wait until the mesh takes intents.

        Raises: RoleFailed, or typer.Exit for what a person must change first.
        """
        settings = self._settings
        if not is_port_free(settings.host, settings.port):
            raise fail(
                f"port {settings.port} on {settings.host} is taken or cannot be used",
                f"the same with --port {settings.port + 10 if settings.port < 65_000 else 8080}",
            )
        self._teller.say(f"data in {settings.data_dir}")
        ledger_port = _ledger_port(settings)
        shared = {
            "DATA_DIR": str(settings.data_dir),
            "HOST": settings.host,
            "PORT": str(settings.port),
            "LEDGER_HOST": "127.0.0.1",
            "LEDGER_PORT": str(ledger_port),
            "LEDGER_URL": f"http://127.0.0.1:{ledger_port}",
            "MESH_TOKEN": self._token,
        }
        if redis_url := settings.redis_url or self._start_redis(shared):
            shared["REDIS_URL"] = redis_url
        if self._supervisor.stop_count:
            return
        if (settings.database_url or "").startswith("postgres"):
            self._start_role("ledger", role_command("ledger", "serve"), shared)
        own = {} if "INTENTMESH_SHUTDOWN_GRACE_S" in os.environ else {"SHUTDOWN_GRACE_S": str(SHUTDOWN_GRACE_S)}
        self._start_role("gateway", role_command("gateway"), shared | own)
        self._start_nodes(shared)
        self._wait_until_ready()

    def _start_redis(self, shared: dict[str, str]) -> str | None:
        """Start the embedded server and return its URL; without it the mesh polls."""
        file = self._settings.data_dir / "redis.url"
        file.unlink(missing_ok=True)
        words = ("mesh.backplane.embedded_server", "--data-dir", str(self._settings.data_dir))
        role = self._start_role("redis", role_command(*words), shared)
        if self._supervisor.wait_until(file.is_file, timeout_s=REDIS_START_MAX_S):
            return file.read_text(encoding="utf-8").strip()
        self._supervisor.give_up(role)
        if not self._supervisor.stop_count:
            self._teller.say(f"redis did not start (log: {role.spec.log_path}): the mesh polls instead, slower")
        return None

    def _start_nodes(self, shared: dict[str, str]) -> None:
        settings = self._settings
        drain_s = settings.drain_timeout_s if "drain_timeout_s" in settings.model_fields_set else DRAIN_TIMEOUT_S
        own = {
            "CAPABILITIES_DIR": ":".join(str(root) for root in settings.capability_roots()),
            "DRAIN_TIMEOUT_S": str(drain_s),
        }
        if self._slots:
            own["NODE_SLOTS"] = str(self._slots)
        for number in range(1, self._node_count + 1):
            name = f"node-{number}"
            # With a ledger of its own a mesh knows its nodes again after a restart; elsewhere the name may be taken.
            named = {} if settings.database_url else {"NODE_ID": name}
            self._start_role(
                name, role_command("mesh"), shared | own | named, grace_s=drain_s + STOP_GRACE_S, may_finish=True
            )

    def _start_role(
        self,
        name: str,
        command: list[str],
        settings: dict[str, str],
        *,
        grace_s: float = STOP_GRACE_S,
        may_finish: bool = False,
    ) -> Role:
        self._teller.say(f"starting {name}")
        environment = role_environment({f"INTENTMESH_{key}": value for key, value in settings.items()})
        log_path = self._settings.data_dir / "logs" / f"{name}.log"
        return self._supervisor.start(RoleSpec(name, command, environment, log_path, grace_s, may_finish))

    def _wait_until_ready(self) -> None:
        waited_s = 0.0
        while waited_s < START_MAX_S:
            if self._supervisor.wait_until(self._is_ready, timeout_s=STILL_WAITING_EVERY_S):
                self._supervisor.is_ready = True
                self._tell_ready()
                return
            if self._supervisor.stop_count:
                return
            waited_s += STILL_WAITING_EVERY_S
            self._teller.say(f"still waiting: {self._missing} (logs: {self._settings.data_dir / 'logs'})")
        raise RoleFailed(f"the mesh is not ready after {START_MAX_S:.0f} s: {self._missing}")

    def _is_ready(self) -> bool:
        """Ask the gateway, at most every `READY_CHECK_EVERY_S`."""
        if time.monotonic() < self._check_at:
            return False
        try:
            is_ready = self._ask()
        except CallFailed as error:
            self._missing = error.detail if error.status else "the gateway does not answer yet"
            is_ready = False
        self._check_at = time.monotonic() + READY_CHECK_EVERY_S
        return is_ready

    def _ask(self) -> bool:
        # One short try: between two of them the roles are watched and signals are heard.
        client = open_client(self.url, self._token, tries=1, timeout_s=READY_CHECK_TIMEOUT_S)
        try:
            client.get("/readyz")
            nodes = client.get("/nodes")["items"]
            capabilities = client.get("/capabilities")["items"]
        finally:
            client.close()
        # A ledger that was here before remembers nodes and capabilities of its last life.
        up = [node for node in nodes if node["status"] == "up" and self._is_of_this_life(node)]
        self._capability_names = sorted(item["name"] for item in capabilities if item["is_available"])
        self._missing = f"{len(up)} of {self._node_count} nodes have registered"
        return len(up) >= self._node_count and bool(self._capability_names)

    def _is_of_this_life(self, node: dict[str, Any]) -> bool:
        is_own_ledger = not self._settings.database_url
        return not is_own_ledger or datetime.fromisoformat(node["seen_at"]) >= self._begun_at

    def _tell_ready(self) -> None:
        self._teller.say(f"ready with {len(self._capability_names)} capabilities: {', '.join(self._capability_names)}")
        if self._settings.embedding_model != "none" and find_spec("torch"):
            self._teller.say("the embedding model is loading; until it is there, older turns are ranked by words alone")
        if os.environ.get("INTENTMESH_ACCESS") == "locked":
            self._teller.say("every call needs a key; the first one is made with: intentmesh keys add local")
        if not self._settings.llm_base_url:
            self._teller.say("no model is set (INTENTMESH_LLM_BASE_URL): chat needs one, recall and echo do not")
        name = "echo" if "echo" in self._capability_names else self._capability_names[0]
        body = f'{{"type": "{name}", "payload": {{"text": "hello"}}}}'
        address = shlex.quote(f"{self.url}/intent?wait=10")
        is_default = urlsplit(self.url).port == 8080 and "url" not in self._settings.model_fields_set
        prefix = "" if is_default else f"INTENTMESH_URL={self.url} "
        out.print(
            f"\nThe mesh listens on {self.url} (reference: {self.url}/docs). In another terminal:\n\n"
            f"  curl -s {address} -H 'Content-Type: application/json' -d '{body}'\n"
            f"  {prefix}intentmesh chat{'' if self._settings.llm_base_url else ' --capability recall'}\n\n"
            "Ctrl-C stops it.",
            soft_wrap=True,
        )

    def watch(self) -> None:
        """Keep the roles running until a stop is asked for."""
        while not self._supervisor.stop_count:
            self._supervisor.wait_until(lambda: False, timeout_s=3600.0)
