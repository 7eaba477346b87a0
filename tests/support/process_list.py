"""What processes there are, as /proc tells it, without the product's own code."""

import asyncio
import time
from pathlib import Path


def processes_of(directory: Path) -> list[int]:
    """Return the living processes that name `directory` in their environment or work in it."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            is_ours = str(directory).encode() in (process / "environ").read_bytes()
            is_inside = str((process / "cwd").readlink()).startswith(str(directory))
        except OSError:
            continue
        if state != "Z" and (is_ours or is_inside):
            found.append(int(process.name))
    return found


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
