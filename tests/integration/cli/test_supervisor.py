"""Roles under one parent: started again after a crash, stopped in order, and gone when the parent is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cli.settings import ROOT
from cli.supervisor import LOG_BYTES_MAX, RoleFailed, RoleSpec, Supervisor

SLEEPER = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
GRANDPARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', %r]); print('up', flush=True); time.sleep(600)"


def spec(folder: Path, name: str, code: str, *, grace_s: float = 5.0) -> RoleSpec:
    """A role that runs `code`."""
    return RoleSpec(name, [sys.executable, "-c", code], dict(os.environ), folder / f"{name}.log", grace_s)


def eventually(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Wait until the condition holds."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def said() -> list[str]:
    """What the supervisor told."""
    return []


@pytest.fixture
def supervisor(said: list[str]) -> Iterator[Supervisor]:
    """A supervisor that leaves nothing behind."""
    supervisor = Supervisor(said.append)
    yield supervisor
    for role in supervisor.roles:
        role.kill()


def test_a_crashed_role_is_started_again(supervisor: Supervisor, said: list[str], tmp_path: Path) -> None:
    """With a pause, and it is told."""
    role = supervisor.start(spec(tmp_path, "gateway", SLEEPER))
    supervisor.is_ready = True
    assert role.process is not None
    first = role.process.pid
    os.kill(first, signal.SIGKILL)
    assert supervisor.wait_until(lambda: role.is_running and role.process.pid != first, timeout_s=10)  # type: ignore[union-attr]
    assert "gateway was killed by signal 9" in said[0]


def test_a_role_that_may_finish_is_not_started_again(supervisor: Supervisor, said: list[str], tmp_path: Path) -> None:
    """A node that an operator drained ends with code 0; for a gateway that would be a crash."""
    node = spec(tmp_path, "node-1", "pass")
    supervisor.start(replace(node, may_finish=True))
    supervisor.is_ready = True
    assert supervisor.wait_until(lambda: not supervisor.roles, timeout_s=10)
    assert said == ["node-1 has finished, as it was asked to"]
    gateway = supervisor.start(spec(tmp_path, "gateway", "pass"))
    assert supervisor.wait_until(lambda: gateway.crash_count == 1, timeout_s=10)


def test_pauses_between_crashes_grow(supervisor: Supervisor, tmp_path: Path) -> None:
    """A role that cannot live does not keep the machine busy."""
    role = supervisor.start(spec(tmp_path, "gateway", "raise SystemExit(7)"))
    pauses = []
    for _ in range(3):
        eventually(lambda: not role.is_running, "exit")
        assert role.note_exit() == 7
        pauses.append(role.start_at - time.monotonic())
        role.start()
    assert pauses[0] < pauses[1] < pauses[2] < 3


def test_bad_settings_end_the_start_with_the_role_own_words(supervisor: Supervisor, tmp_path: Path) -> None:
    """Exit code 2 is not tried again."""
    supervisor.start(spec(tmp_path, "gateway", "import sys; print('INTENTMESH_PORT: wrong'); sys.exit(2)"))
    with pytest.raises(RoleFailed, match="INTENTMESH_PORT: wrong"):
        supervisor.wait_until(lambda: False, timeout_s=10)


def test_roles_stop_in_the_reverse_order_of_their_start(supervisor: Supervisor, tmp_path: Path) -> None:
    """Nodes first, together; what they need goes on until they are gone."""
    code = (
        "import signal, sys, time\n"
        "def stop(*_):\n"
        f"    open({str(tmp_path / 'order')!r}, 'a').write(sys.argv[1] + ' ')\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    for name in ("redis", "gateway", "node-1", "node-2"):
        plain = spec(tmp_path, name, code)
        supervisor.start(RoleSpec(name, [*plain.command, name], plain.environment, plain.log_path, plain.grace_s))
        eventually(lambda log=plain.log_path: "up" in log.read_text(), f"{name} is up")
    supervisor.stop()
    *nodes, gateway, redis = (tmp_path / "order").read_text().split()
    assert sorted(nodes) == ["node-1", "node-2"]
    assert [gateway, redis] == ["gateway", "redis"]
    assert not any(role.is_running for role in supervisor.roles)


def test_a_role_that_ignores_the_request_is_killed_after_its_grace(
    supervisor: Supervisor, said: list[str], tmp_path: Path
) -> None:
    """Stopping is bounded."""
    role = supervisor.start(spec(tmp_path, "gateway", STUBBORN, grace_s=0.3))
    eventually(lambda: role.log_tail() == "up", "the role is up")
    begun_at = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - begun_at < 3
    assert said == ["gateway did not stop in time: killed"]
    assert not role.is_running


def test_a_second_request_stops_at_once(supervisor: Supervisor, tmp_path: Path) -> None:
    """Whoever presses Ctrl-C twice does not want to wait."""
    role = supervisor.start(spec(tmp_path, "gateway", STUBBORN, grace_s=60))
    eventually(lambda: role.log_tail() == "up", "the role is up")
    supervisor.stop_count = 2
    supervisor._stop_together([role], asked_before=1)
    assert not role.is_running


def test_what_a_role_started_goes_with_it(supervisor: Supervisor, tmp_path: Path) -> None:
    """A child in the role's process group does not outlive it."""
    role = supervisor.start(spec(tmp_path, "gateway", GRANDPARENT % SLEEPER))
    eventually(lambda: role.log_tail() == "up", "the role is up")
    assert role.process is not None
    children = Path(f"/proc/{role.process.pid}/task/{role.process.pid}/children").read_text().split()
    assert len(children) == 1
    supervisor.stop()
    eventually(lambda: not is_alive(int(children[0])), "the grandchild is gone")


def test_roles_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    """kill -9 leaves no process: the kernel tells the children."""
    code = (
        "import os, pathlib, sys, time\n"
        "from cli.supervisor import RoleSpec, Supervisor\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "role = Supervisor(print).start(RoleSpec('gateway', command, dict(os.environ), folder / 'log', 5))\n"
        "(folder / 'pid.new').write_text(str(role.process.pid))\n"
        "(folder / 'pid.new').rename(folder / 'pid')\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=os.environ | {"PYTHONPATH": str(ROOT)})
    eventually((tmp_path / "pid").exists, "the role is started")
    pid = int((tmp_path / "pid").read_text())
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    eventually(lambda: not is_alive(pid), "the role ended with its supervisor")


def test_a_log_is_bounded_while_the_role_goes_on_writing(supervisor: Supervisor, tmp_path: Path) -> None:
    """The older part is kept once; the role's descriptor stays valid."""
    role = supervisor.start(
        spec(tmp_path, "gateway", "import time\nwhile True: print('new', flush=True); time.sleep(.01)")
    )
    with role.spec.log_path.open("ab") as log:
        log.truncate(LOG_BYTES_MAX + 1)
    role.bound_log()
    assert role.spec.log_path.with_suffix(".log.1").stat().st_size > LOG_BYTES_MAX
    eventually(lambda: role.log_tail(1) == "new", "the role writes to the shortened log")
    assert role.spec.log_path.stat().st_size < 100_000
