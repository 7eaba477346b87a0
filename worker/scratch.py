"""Temporary directories of workers, and what dead zygotes left in and around them.

Must never follow a symbolic link out of a directory that it removes, or kill a process that does not carry the
directory's name in its environment, work in it, or belong to a session named by the caller.
"""

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker import kernel

_OWNER = re.compile(r"\.([0-9]+)-([0-9]+)-[0-9]+$")
_ROUNDS_MAX = 50
_ROUND_PAUSE_S = 0.01


def remove_tree(path: str | Path) -> None:
    """Remove a directory with all that is in it, also what its owner forbade himself to write."""

    def open_up(function: Callable[..., Any], name: str, _: object) -> None:
        with contextlib.suppress(OSError):
            parent = Path(name).parent
            parent.chmod(stat.S_IRWXU)
            if not Path(name).is_symlink():
                Path(name).chmod(stat.S_IRWXU)
            if function in (os.rmdir, os.unlink):
                function(name)
            else:
                shutil.rmtree(name, ignore_errors=True)

    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path, onerror=open_up)


def owner_name(sequence: int) -> str:
    """Return a name that says which process owns a directory, in a way that a reused process id does not match."""
    return f"{os.getpid()}-{_started_at(os.getpid())}-{sequence}"


def _started_at(pid: int) -> int:
    """Return when `pid` started, in clock ticks since boot; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return 0


def sweep_dead_owners(scratch_dir: Path) -> None:
    """Kill the processes and remove the directories of zygotes whose node is gone."""
    for entry in list(scratch_dir.iterdir()):
        owner = _OWNER.search(entry.name)
        if owner is not None and _started_at(int(owner[1])) != int(owner[2]):
            kill_leftovers(entry, sessions=set())
            remove_tree(entry)


def kill_leftovers(directory: Path, *, sessions: set[int]) -> None:
    """Kill every process that works in `directory`, names it in its environment, or belongs to `sessions`.

    For a zygote that could not clean up itself: its workers are gone, their detached descendants may not be.
    """
    for _ in range(_ROUNDS_MAX):
        found = [pid for pid in kernel.all_pids() if _belongs(pid, str(directory), sessions)]
        for pid in found:
            kernel.kill(pid)
        if not found:
            return
        time.sleep(_ROUND_PAUSE_S)


def _belongs(pid: int, directory: str, sessions: set[int]) -> bool:
    if pid == os.getpid():
        return False
    process = Path(f"/proc/{pid}")
    try:
        parts = (process / "stat").read_bytes().rpartition(b")")[2].split()
        if parts[0] == b"Z":
            return False  # dead already; its parent will reap it
        if int(parts[3]) in sessions:
            return True
        working_directory = str((process / "cwd").readlink())
        if working_directory == directory or working_directory.startswith(directory + "/"):
            return True
        environment = (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
    marks = (f"TMPDIR={directory}".encode(), f"HOME={directory}".encode())
    return any(value.startswith(mark) for mark in marks for value in environment)
