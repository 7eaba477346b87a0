"""What processes there are, as /proc tells it, without the product's own code."""

import asyncio
import os
import time
from pathlib import Path


def processes_in(folder: Path) -> dict[int, str]:
    """Return pid → command line of every live process whose environment, arguments or directory name `folder`."""
    needle = str(folder).encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            command = (entry / "cmdline").read_bytes()
            if (
                needle in command
                or needle in (entry / "environ").read_bytes()
                or needle in bytes((entry / "cwd").readlink())
            ):
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found


def processes_of(directory: Path) -> list[int]:
    """Return the living processes that have to do with `directory`."""
    return list(processes_in(directory))


def is_alive(pid: int) -> bool:
    """Return whether `pid` is a process that is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: object, *, deadline_s: float = 10.0, what: str = "the condition") -> None:
    """Wait until `condition()` is true; fail when it is not by the deadline."""
    assert callable(condition)
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come about within {deadline_s} s"
        await asyncio.sleep(0.01)
