"""What this machine and this node's own past say about taking one more intent.

Must never block: it reads one line of /proc and counters.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mesh.bidding import NodeSnapshot

# A failure counts half after so long.
FAILURE_HALF_LIFE_S = 60.0
_MEMINFO = Path("/proc/meminfo")


def memory_used_share() -> float:
    """Return the share of memory that is not available, 0 to 1; 0 where the kernel does not say.

    Source: MemAvailable in proc(5).
    """
    try:
        lines = _MEMINFO.read_text().splitlines()
        values = {line.split(":")[0]: float(line.split()[1]) for line in lines[:3]}
        return 1.0 - values["MemAvailable"] / values["MemTotal"]
    except (OSError, KeyError, IndexError, ValueError):
        return 0.0


@dataclass
class Run:
    """One run that is being counted."""

    has_failed: bool = False


class LoadMeter:
    """Counts failures of each capability, fading with time."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[float, float]] = {}

    @contextlib.contextmanager
    def running(self, capability: str) -> Iterator[Run]:
        """Count one run; set `has_failed` on the yielded value when it failed."""
        run = Run()
        yield run
        if run.has_failed:
            now_s = time.monotonic()
            self._failures[capability] = (self.recent_failures(capability, now_s) + 1.0, now_s)

    def recent_failures(self, capability: str, now_s: float) -> float:
        """Return the faded count of failures."""
        count, since_s = self._failures.get(capability, (0.0, now_s))
        return float(count * 0.5 ** ((now_s - since_s) / FAILURE_HALF_LIFE_S))

    def snapshot(self, capability: str, *, slots: int, free_slots: int, is_warm: bool) -> NodeSnapshot:
        """Return what pricing needs to know."""
        return NodeSnapshot(
            slots=slots,
            free_slots=free_slots,
            is_warm=is_warm,
            memory_used_share=memory_used_share(),
            recent_failures=self.recent_failures(capability, time.monotonic()),
        )
