"""The node's side of a worker: start a zygote per capability, take one fresh process per intent, watch it end.

Must never fork the node itself (the zygote is exec'ed), run code of a capability in the node, or wait for the
end of a pipe: a grandchild can hold it open.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.contract.messages import AttemptLog, Claim
from mesh.contract.template import Limits
from worker.capability_folder import CapabilityFolder
from worker.frames import Frame


class SpawnFailed(Exception):
    """No worker could be had. `detail` is fit for the intent's error; `is_retryable` tells cause from bad luck.

    Not retryable: the handler cannot be imported, the program is missing. Retryable: the machine refused a
    process, the zygote died.
    """

    def __init__(self, detail: str, *, is_retryable: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.is_retryable = is_retryable


@dataclass(frozen=True)
class ExitStatus:
    """How a worker ended; exactly one of `exit_code` and `signal` is set.

    `reason` is set when the mesh itself ended it: `killed` (Worker.kill or terminate), `processes` (more than
    limits.processes), `zygote_died`. Units: cpu_ms user + system time of the whole tree that was waited for.
    """

    exit_code: int | None
    signal: int | None
    cpu_ms: int
    memory_peak_kb: int
    reason: str | None = None


@dataclass(frozen=True)
class Assignment:
    """What a worker is told when it is activated."""

    claim: Claim
    limits: Limits

    @classmethod
    def from_claim(cls, claim: Claim, folder: CapabilityFolder) -> "Assignment":
        """Build the assignment of `claim` for a worker of `folder`."""
        raise NotImplementedError


class Worker:
    """One operating-system process for one intent. Made by `Zygote.take`."""

    pid: int

    async def activate(self, assignment: Assignment) -> None:
        """Hand over the intent; the worker begins at once. Call exactly once.

        A worker that died meanwhile raises nothing here: `frames` ends and `wait` tells how it ended.
        """
        raise NotImplementedError

    def frames(self) -> AsyncIterator[Frame]:
        """Yield what the worker says until it ends. A last line that was cut off by its death is dropped.

        Raises: FrameInvalid, FrameTooLarge (both carry `cause` and `detail`); then kill the worker.
        """
        raise NotImplementedError

    async def send(self, frame: dict[str, Any]) -> None:
        """Send one frame (worker.frames: ack, llm_delta, llm_result, llm_error); silent when the worker has ended."""
        raise NotImplementedError

    async def kill(self) -> ExitStatus:
        """SIGKILL the worker and every process that descends from it; return when none is left."""
        raise NotImplementedError

    async def terminate(self, grace_s: float) -> ExitStatus:
        """SIGTERM the worker's process group, and `kill` what is left after `grace_s`."""
        raise NotImplementedError

    async def wait(self) -> ExitStatus:
        """Return how the worker ended, once its whole process tree is gone."""
        raise NotImplementedError

    def log(self) -> AttemptLog:
        """Return the newest part of stdout and stderr so far; complete after `wait`."""
        raise NotImplementedError


class Zygote:
    """The process that has imported one capability and forks its workers ahead.

    Args:
        folder: the capability.
        standby: how many children stand by, forked ahead.
        scratch_dir: where the workers' temporary directories are made; one node's own.
    """

    def __init__(self, folder: CapabilityFolder, *, standby: int, scratch_dir: Path) -> None:
        raise NotImplementedError

    @property
    def is_warm(self) -> bool:
        """Whether the handler is imported and `take` is quick."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start the process and import the handler; nothing to do when it runs already.

        Raises: SpawnFailed with the last lines of the traceback.
        """
        raise NotImplementedError

    async def take(self) -> Worker:
        """Return a child that stands by, and have the next one forked ahead; starts the zygote anew if it died.

        Raises: SpawnFailed.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Kill all workers and the zygote; no process and no temporary directory is left. May be called twice."""
        raise NotImplementedError
