"""Temporary directories of workers, and what dead zygotes left in and around them.

Every process below a zygote carries its birth mark: a value, drawn from the directory's path, of a resource limit
that Linux has kept since 2.4 without using it (RLIMIT_LOCKS). Fork, exec, setsid, a cleared environment and a new
parent leave it alone, so even a daemon by the book is found when its zygote could not end it.
Must never follow a symbolic link out of a directory that it removes, or kill a process without the mark.
"""

import contextlib
import hashlib
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


def birth_mark(directory: Path) -> int:
    """Return the mark of the zygote that owns `directory`: 40 bits."""
    return int.from_bytes(hashlib.sha256(str(directory).encode()).digest()[:5], "big")


def sweep_dead_owners(scratch_dir: Path) -> None:
    """Kill the processes and remove the directories of zygotes whose node is gone."""
    for entry in list(scratch_dir.iterdir()):
        owner = _OWNER.search(entry.name)
        if owner is not None and _started_at(int(owner[1])) != int(owner[2]):
            kill_leftovers(entry)
            remove_tree(entry)


def kill_leftovers(directory: Path) -> None:
    """Kill every process with the mark of `directory`, until there is none."""
    mark = str(birth_mark(directory)).encode()
    for _ in range(_ROUNDS_MAX):
        found = [pid for pid in kernel.all_pids() if _is_marked(pid, mark)]
        for pid in found:
            kernel.kill(pid)
        if not found:
            return
        time.sleep(_ROUND_PAUSE_S)


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        limits = Path(f"/proc/{pid}/limits").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    # A zombie is dead already; its parent will reap it.
    return state != b"Z" and any(line.split()[3:4] == [mark] for line in limits.splitlines() if b"file locks" in line)
