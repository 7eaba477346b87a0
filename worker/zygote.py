"""The zygote: imports one capability's handler, then forks children that stand by, and reaps them.

    python -m worker.zygote CONTROL_FD NAME

One thread, one loop, no code of the capability once the import is done. It talks to the node in JSON datagrams
on the control socket; a fork's answer carries the child's frame socket, its stdout, its stderr and a pidfd. It is
the subreaper of everything below it: a living worker adopts its own orphans, so whatever else turns up here as a
child is an orphan of a dead worker, and is killed. When the node closes the control socket (or dies), the
zygote kills the whole tree, removes the temporary directories and ends.
Must never start a thread, import more than the standard library itself, or wait for a worker or a pipe.
"""

# pathlib would cost every worker memory.
# ruff: noqa: PTH102, PTH106, PTH120, PTH123, PTH208

import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from worker import child, kernel
from worker.exit_codes import EXIT_SPAWN_FAILED, REASON_PROCESSES
from worker.wire import INTENT_PAYLOAD_FD, MESH_FD

_DATAGRAM_BYTES_MAX = 128 * 1024
_FIRST_OWN_FD = 10  # the low ones are the children's
_WATCH_INTERVAL_S = 0.1
_ORPHAN_INTERVAL_S = 0.005
_ORPHAN_PATIENCE_S = 2.0
_SHUT_DOWN_PATIENCE_S = 5.0
_DETAIL_CHARACTERS_MAX = 2000
_MEMORY_SPARE_KB = 4 * 1024


class _Child:
    """One forked child. `report` is set once it is reaped, until the node is told."""

    def __init__(self, scratch: str) -> None:
        self.scratch = scratch
        self.is_active = False
        self.reason: str | None = None
        self.report: dict[str, Any] | None = None
        self.reaped_at = 0.0


class _Zygote:
    def __init__(self, control: socket.socket, config: dict[str, Any], handler: child.Handler | None) -> None:
        self._control = control
        self._config = config
        self._handler = handler
        self._pid = os.getpid()
        self._children: dict[int, _Child] = {}
        self._count = 0
        self._is_asked_to_end = False
        self._has_orphans = False
        self._inherited = _descriptors_from(INTENT_PAYLOAD_FD + 1, besides={control.fileno()})
        self._null = _raised(os.open(os.devnull, os.O_RDWR))
        wake_read, self._wake_write = map(_raised, os.pipe())
        self._wake_read = wake_read
        for descriptor in (wake_read, self._wake_write):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _on_terminate(self, *_: object) -> None:
        self._is_asked_to_end = True

    def serve(self) -> None:
        """Obey the node until it goes away."""
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while not self._is_asked_to_end:
            for descriptor, _ in poll.poll(self._pause_ms()):
                if descriptor == self._wake_read:
                    _drain(self._wake_read)
                elif not self._obey():
                    self._is_asked_to_end = True
            self._reap()
            self._watch()
        self._shut_down()

    def _pause_ms(self) -> float | None:
        if self._has_orphans:
            return _ORPHAN_INTERVAL_S * 1000
        return _WATCH_INTERVAL_S * 1000 if any(one.is_active for one in self._children.values()) else None

    # ---- the node's orders

    def _obey(self) -> bool:
        """Carry out one order; False when the node is gone."""
        try:
            datagram = self._control.recv(_DATAGRAM_BYTES_MAX)
        except ConnectionError:
            return False
        if not datagram:
            return False
        order = json.loads(datagram)
        for _ in range(order.get("fork", 0)):
            self._fork()
        if (one := self._children.get(order.get("taken", 0))) is not None:
            one.is_active = True
        if (pid := order.get("terminate", 0)) in self._children and self._children[pid].report is None:
            kernel.kill_group(pid, signal.SIGTERM)
        return True

    def _tell(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors or [])
        except ConnectionError:
            self._is_asked_to_end = True

    # ---- forking

    def _fork(self) -> None:
        self._count += 1
        scratch = f"{self._config['scratch']}/{self._count}"
        theirs: list[int] = []
        ours: list[int] = []
        pid = 0
        try:
            os.mkdir(scratch, 0o700)
            node_end, worker_end = socket.socketpair()
            theirs.append(node_end.detach())
            ours.append(worker_end.detach())
            for _ in ("stdout", "stderr"):
                read_end, write_end = os.pipe()
                theirs.append(read_end)
                ours.append(write_end)
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                self._become_child(scratch, ours)
            self._children[pid] = _Child(scratch)
            theirs.append(os.pidfd_open(pid))
            self._tell({"forked": pid}, theirs)
        except OSError as error:
            if pid:
                kernel.kill(pid)
            else:
                _remove_empty(scratch)
            self._tell({"fork_failed": f"the machine refuses another process: {error.strerror}"})
        finally:
            for descriptor in ours + theirs:
                os.close(descriptor)

    def _become_child(self, scratch: str, descriptors: list[int]) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            self._control.detach()
            frames, stdout, stderr = descriptors
            os.dup2(self._null, 0)
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            os.dup2(frames, MESH_FD)
            # What the import opened becomes /dev/null rather than free: an object that still holds the number
            # must not find another file, or another child's position, behind it.
            for descriptor in self._inherited:
                os.dup2(self._null, descriptor, inheritable=False)
            low = MESH_FD + 1
            for descriptor in [*self._inherited, os.sysconf("SC_OPEN_MAX")]:
                os.closerange(low, descriptor)
                low = descriptor + 1
            child.stand_by(self._config, self._handler, scratch, self._pid)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(EXIT_SPAWN_FAILED)

    # ---- reaping

    def _reap(self) -> None:
        """Reap what has ended, kill what it left behind, and report workers whose tree is gone."""
        has_reaped = False
        while (ended := _ended_child()) is not None:
            has_reaped = True
            one = self._children.get(ended)
            if one is not None:
                kernel.kill_group(ended)  # the zombie still holds the group's number
            _, status, usage = os.wait4(ended, 0)
            if one is not None:
                one.report = _report(ended, status, usage, one.reason)
                one.reaped_at = time.monotonic()
        if has_reaped or self._has_orphans:
            self._kill_orphans()
            self._report_exits()

    def _kill_orphans(self) -> None:
        alive = {pid for pid, one in self._children.items() if one.report is None}
        orphans = [pid for pid in kernel.children_of(self._pid) if pid not in alive]
        for pid in orphans + (kernel.descendants_of(orphans) if orphans else []):
            kernel.kill(pid)
        self._has_orphans = bool(orphans)

    def _report_exits(self) -> None:
        """Tell the node who ended: when no orphan is left, or after a while in spite of one that cannot die."""
        now = time.monotonic()
        for pid, one in list(self._children.items()):
            if one.report is None or (self._has_orphans and now < one.reaped_at + _ORPHAN_PATIENCE_S):
                continue
            del self._children[pid]
            self._tell({**one.report, "scratch": None if _remove_empty(one.scratch) else one.scratch})

    def _watch(self) -> None:
        """Kill a worker with more processes than it may have."""
        count_max = self._config["limits"]["processes"]
        for pid, one in self._children.items():
            if not one.is_active or one.report is not None or one.reason is not None:
                continue
            if len(kernel.descendants_of([pid], count_max=count_max)) >= count_max:
                one.reason = REASON_PROCESSES
                kernel.kill_group(pid)
                kernel.kill(pid)

    def _shut_down(self) -> None:
        """Kill everything below, remove the temporary directories."""
        self._control.close()
        for pid, one in self._children.items():
            if one.report is None:
                kernel.kill_group(pid)
                kernel.kill(pid)
        until = time.monotonic() + _SHUT_DOWN_PATIENCE_S
        while time.monotonic() < until:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                rest = kernel.children_of(self._pid)
                for other in rest + kernel.descendants_of(rest):
                    kernel.kill(other)
                time.sleep(0.002)
        from worker.scratch import remove_tree  # its imports are for the last moment only

        remove_tree(self._config["scratch"])


def _ended_child() -> int | None:
    """Return a child that has ended and is not yet reaped."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


def _report(pid: int, status: int, usage: Any, reason: str | None) -> dict[str, Any]:
    is_signalled = os.WIFSIGNALED(status)
    return {
        "exited": pid,
        "exit_code": None if is_signalled else os.WEXITSTATUS(status),
        "signal": os.WTERMSIG(status) if is_signalled else None,
        "cpu_ms": round((usage.ru_utime + usage.ru_stime) * 1000),
        "memory_peak_kb": usage.ru_maxrss,
        "reason": reason,
    }


def _remove_empty(scratch: str) -> bool:
    try:
        os.rmdir(scratch)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        pass


def _raised(descriptor: int) -> int:
    """Move a descriptor of our own above those that the children use."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD)
    os.close(descriptor)
    return moved


def _descriptors_from(low: int, *, besides: set[int]) -> list[int]:
    """Return the open descriptors from `low` on, ascending."""
    listing = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        names = os.listdir(listing)
    finally:
        os.close(listing)
    return sorted(fd for fd in map(int, names) if fd >= low and fd != listing and fd not in besides)


# ---- the import


def _load_handler(config: dict[str, Any]) -> child.Handler | None:
    """Import what the children shall run; None for a program."""
    if config["runtime"] == "exec":
        return None
    if config["runtime"] == "prompt":
        from worker.prompt_runtime import load_prompts

        return load_prompts(config["folder"])
    import importlib.util

    path = f"{config['folder']}/handler.py"
    name = f"capability_{config['name'].replace('-', '_')}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    sys.dont_write_bytecode = True  # a capability's folder is read, never written
    specification.loader.exec_module(module)
    sys.dont_write_bytecode = False
    handler: child.Handler = module.run
    return handler


def _why_unfit(config: dict[str, Any]) -> str | None:
    """Return why this process must not be forked, after the import."""
    names = os.listdir("/proc/self/task")
    if len(names) > 1:
        return f"handler.py starts {len(names) - 1} thread(s) when it is imported: start them inside run()"
    if config["runtime"] == "exec":
        return None
    with open("/proc/self/status", "rb") as file:
        data_kb = next(int(line.split()[1]) for line in file if line.startswith(b"VmData:"))
    if data_kb + _MEMORY_SPARE_KB > config["limits"]["memory_mb"] * 1024:
        need_mb = (data_kb + _MEMORY_SPARE_KB) // 1024 + 1
        return f"limits.memory_mb is too small: the imported handler alone needs {need_mb}"
    return None


def _describe(error: BaseException) -> str:
    import traceback

    own = os.path.dirname(__file__) + os.sep
    steps = [step for step in traceback.extract_tb(error.__traceback__) if "importlib" not in step.filename]
    steps = [step for step in steps if not step.filename.startswith(own)]
    text = "".join(traceback.format_list(steps) + traceback.format_exception_only(type(error), error)).strip()
    return text[-_DETAIL_CHARACTERS_MAX:]


def main() -> None:
    """Run the zygote on the control socket whose number is the first argument."""
    given = int(sys.argv[1])
    control = socket.socket(fileno=fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD))
    os.close(given)
    datagram = control.recv(_DATAGRAM_BYTES_MAX)
    if not datagram:
        return
    config = json.loads(datagram)
    # While the capability's own code runs here, only the kernel can end this process with its node.
    kernel.die_with_parent(config["node_pid"])
    kernel.set_birth_mark(config["birth_mark"])
    kernel.renounce_privileges()
    kernel.adopt_orphans()
    kernel.set_process_name(f"zygote:{config['name']}")
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for low in range(MESH_FD, INTENT_PAYLOAD_FD + 1):  # nothing that is opened later lies on the children's numbers
        if low != null:
            os.dup2(null, low, inheritable=False)
    if null > INTENT_PAYLOAD_FD:
        os.close(null)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    try:
        handler = _load_handler(config)
        unfit = _why_unfit(config)
    except BaseException as error:
        unfit = _describe(error)
    if unfit is not None:
        socket.send_fds(control, [json.dumps({"failed": unfit}).encode()], [])
        os._exit(EXIT_SPAWN_FAILED)
    zygote = _Zygote(control, config, handler)
    kernel.outlive_parent()
    gc.collect()
    gc.disable()
    gc.freeze()
    socket.send_fds(control, [b'{"ready": true}'], [])
    zygote.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
