"""Role processes under one parent: started, watched, started again after a crash, stopped in order.

A loop reconciles wanted with actual; signal handlers only set a flag. It stays single-threaded: a child is
told to die with the thread that started it, and forking from a process with threads is not safe.
Must never leave a process behind: not after an orderly stop, nor when this process is killed.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
TICK_S = 0.05
LOG_BYTES_MAX = 20 * 1024 * 1024
RESTART_DELAY_S = 0.5
RESTART_DELAY_MAX_S = 30.0
# A role that ran this long had a good start: its next crash is a new story.
HEALTHY_AFTER_S = 30.0
CRASHES_AT_START_MAX = 3
# What every role returns for settings that it cannot use: trying again would not help.
EXIT_BAD_SETTINGS = 2

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class RoleSpec:
    """What to run. `grace_s` is how long it may take to stop after SIGTERM.

    `may_finish`: ending by itself with code 0 is an end in order (a node that was drained), not a crash.
    """

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    log_path: Path
    grace_s: float
    may_finish: bool = False


class RoleFailed(Exception):
    """A role cannot be kept running; the message holds the end of its log."""


def _die_with_parent(parent_pid: int) -> Callable[[], None]:
    """Return what a child does before exec: ask the kernel for SIGKILL at its parent's death (Linux)."""

    def prepare() -> None:
        with suppress(AttributeError):  # other systems have no prctl: there an orderly stop is all we promise
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)

    return prepare


class Role:
    """One role process and its story."""

    def __init__(self, spec: RoleSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.crash_count = 0
        self.start_at = 0.0
        self._started_at = 0.0

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process in a session of its own, so that Ctrl-C in the terminal reaches only us."""
        path = self.spec.log_path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.bound_log()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own command
                self.spec.command,
                env=self.spec.environment,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        finally:
            os.close(descriptor)
        self._started_at = time.monotonic()

    def note_exit(self) -> int:
        """Record that the process ended by itself; set when to start it again. Returns its exit code."""
        assert self.process is not None
        code = self.process.wait()
        self._kill_group()
        if time.monotonic() - self._started_at > HEALTHY_AFTER_S:
            self.crash_count = 0
        delay_s = min(RESTART_DELAY_MAX_S, RESTART_DELAY_S * 2**self.crash_count)
        self.crash_count += 1
        self.start_at = time.monotonic() + delay_s
        self.process = None
        return code

    def send(self, number: int) -> None:
        """Send a signal if the process lives."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End the process and its group at once."""
        self.send(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
            self._kill_group()

    def _kill_group(self) -> None:
        # The group outlives its leader as long as it has members; an empty one is no error.
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def bound_log(self) -> None:
        """Move a log that has grown too long aside, in place: the process goes on appending to the same file."""
        path = self.spec.log_path
        with suppress(FileNotFoundError):
            if path.stat().st_size > LOG_BYTES_MAX:
                path.with_suffix(".log.1").write_bytes(path.read_bytes())
                os.truncate(path, 0)

    def log_tail(self, line_count: int = 12) -> str:
        """Return the end of the log."""
        try:
            with self.spec.log_path.open("rb") as file:
                file.seek(max(0, self.spec.log_path.stat().st_size - 16_384))
                lines = file.read().decode("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(lines[-line_count:])


class Supervisor:
    """Keeps roles running until a signal asks to stop. Roles stop in the reverse order of their start."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.roles: list[Role] = []
        self.stop_count = 0
        self.is_ready = False
        self._say = say
        self._log_check_at = 0.0

    def install_signal_handlers(self) -> None:
        """Let SIGINT, SIGTERM and SIGHUP ask for a stop; a second one asks for it at once."""

        def ask(_number: int, _frame: FrameType | None) -> None:
            self.stop_count += 1

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, ask)

    def start(self, spec: RoleSpec) -> Role:
        """Start a role and watch it from now on."""
        role = Role(spec)
        self.roles.append(role)
        role.start()
        return role

    def give_up(self, role: Role) -> None:
        """End a role and watch it no longer."""
        self.roles.remove(role)
        role.kill()

    def tick(self) -> None:
        """One round of reconciling: start again what crashed and has waited long enough.

        Raises: RoleFailed when a role refuses its settings, or crashes again and again before the mesh is ready.
        """
        now = time.monotonic()
        for role in list(self.roles):
            if role.process is None:
                if now >= role.start_at:
                    role.start()
            elif not role.is_running:
                self._handle_exit(role)
        if now >= self._log_check_at:
            self._log_check_at = now + 10.0
            for role in self.roles:
                role.bound_log()

    def _handle_exit(self, role: Role) -> None:
        code = role.note_exit()
        name, log_path = role.spec.name, role.spec.log_path
        if code == 0 and role.spec.may_finish:
            self.roles.remove(role)
            self._say(f"{name} has finished, as it was asked to")
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        is_hopeless = code == EXIT_BAD_SETTINGS or role.crash_count >= CRASHES_AT_START_MAX
        if is_hopeless and not self.is_ready:
            raise RoleFailed(f"{name} {how}; the end of {log_path}:\n{role.log_tail()}")
        delay_s = max(0.0, role.start_at - time.monotonic())
        self._say(f"{name} {how} (log: {log_path}); starting it again in {delay_s:.1f} s")

    def wait_until(self, condition: Callable[[], bool], *, timeout_s: float) -> bool:
        """Keep reconciling until `condition` holds. False when the time is over or a stop was asked for."""
        give_up_at = time.monotonic() + timeout_s
        while not self.stop_count and time.monotonic() < give_up_at:
            self.tick()
            if condition():
                return True
            time.sleep(TICK_S)
        return False

    def stop(self) -> None:
        """Stop every role, the last started first; never takes longer than the graces together."""
        asked_before = self.stop_count
        groups: dict[str, list[Role]] = {}
        for role in reversed(self.roles):
            groups.setdefault(role.spec.name.partition("-")[0], []).append(role)
        for group in groups.values():
            self._stop_together(group, asked_before)

    def _stop_together(self, group: Sequence[Role], asked_before: int) -> None:
        running = [role for role in group if role.is_running]
        for role in running:
            role.send(signal.SIGTERM)
        give_up_at = time.monotonic() + max((role.spec.grace_s for role in running), default=0.0)
        while any(role.is_running for role in running):
            if self.stop_count > max(asked_before, 1) or time.monotonic() >= give_up_at:
                for role in running:
                    if role.is_running:
                        self._say(f"{role.spec.name} did not stop in time: killed")
                break
            time.sleep(TICK_S)
        for role in group:
            role.kill()
