"""The few things that a zygote and its children ask of the Linux kernel and Python has no word for.

Must never import more than the standard library: every worker carries what stands here.
Source: prctl(2), proc(5).
"""

# pathlib would cost every worker memory.
# ruff: noqa: PTH110, PTH123, PTH208

import contextlib
import ctypes
import os
import resource
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_NAME_BYTES_MAX = 15
_RLIMIT_LOCKS = 10  # kept by Linux since 2.4, used by nothing

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that made it ends; leave at once when it has ended."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, however it has detached itself."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def renounce_privileges() -> None:
    """Never gain privileges by exec, neither this process nor its descendants."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def hide_from_others() -> None:
    """Keep processes of the same user from reading this one's memory and environment, until it executes another program.

    Root reads them all the same.
    """
    _prctl(_PR_SET_DUMPABLE, 0)


def set_process_name(name: str) -> None:
    """Set the name that ps and top show."""
    short = ctypes.create_string_buffer(name.encode("ascii", "replace")[:_NAME_BYTES_MAX])
    _libc.prctl(_PR_SET_NAME, short, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def set_birth_mark(mark: int) -> None:
    """Mark this process and all that will ever descend from it (worker.scratch says what for)."""
    with contextlib.suppress(ValueError, OSError):  # inside another worker its mark may be the last word
        resource.setrlimit(_RLIMIT_LOCKS, (mark, mark))


def children_of(pid: int) -> list[int]:
    """Return the direct children of `pid`, zombies included; empty when it is gone."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    children: list[int] = []
    for thread in threads:
        try:
            descriptor = os.open(f"/proc/{pid}/task/{thread}/children", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if not os.path.exists(f"/proc/{pid}/task/{thread}"):
                continue
            return _children_by_scan(pid)  # a kernel without CONFIG_PROC_CHILDREN
        except OSError:
            continue
        try:
            text = b""
            while chunk := os.read(descriptor, 65536):
                text += chunk
        except OSError:
            continue
        finally:
            os.close(descriptor)
        children.extend(map(int, text.split()))
    return children


def _children_by_scan(pid: int) -> list[int]:
    return [other for other in all_pids() if parent_and_session(other)[0] == pid]


def all_pids() -> list[int]:
    """Return every process id that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def parent_and_session(pid: int) -> tuple[int, int]:
    """Return parent and session id of `pid`; (0, 0) when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0, 0
    return int(fields[1]), int(fields[3])


def descendants_of(pids: list[int], *, count_max: int = 1_000_000) -> list[int]:
    """Return all descendants of `pids`, at most about `count_max`: cheap when only their number matters."""
    found: list[int] = []
    to_visit = list(pids)
    while to_visit and len(found) < count_max:
        children = children_of(to_visit.pop())
        found.extend(children)
        to_visit.extend(children)
    return found


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal; a process that is gone or not ours is left alone."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def kill_group(group: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process group; one that is gone is left alone."""
    with contextlib.suppress(OSError):
        os.killpg(group, number)
