"""What this machine and this node's own past say about taking one more intent.

Must never block: it reads one short file of /proc and counts.
"""

import collections
import time
from pathlib import Path

from mesh.contract.errors import Cause

FAILURES_REMEMBERED_S = 120.0
# What may well go better on another node; a handler's own mistake would not.
NODE_FAULTS = frozenset({Cause.SPAWN_FAILED, Cause.WORKER_CRASHED, Cause.OOM_KILLED, Cause.TIMED_OUT})
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


class FailureCounter:
    """Failures of the last two minutes that were this node's fault, by capability."""

    def __init__(self) -> None:
        self._moments_s: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)

    def add(self, capability: str, cause: Cause) -> None:
        """Count a failed attempt, if it was the node's fault."""
        if cause in NODE_FAULTS:
            self._moments_s[capability].append(time.monotonic())

    def recent(self) -> dict[str, int]:
        """Return capability → count; what is too old is forgotten."""
        oldest_s = time.monotonic() - FAILURES_REMEMBERED_S
        for moments_s in self._moments_s.values():
            while moments_s and moments_s[0] < oldest_s:
                moments_s.popleft()
        return {name: len(moments_s) for name, moments_s in self._moments_s.items() if moments_s}
