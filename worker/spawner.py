"""The node's side of workers: a zygote per capability, one fresh process per intent, watched to its end.

    zygote = Zygote(folder, standby=2, scratch_dir=Path("/run/mesh/workers"))
    await zygote.start()
    worker = await zygote.take()
    await worker.activate(Assignment.from_claim(claim, folder))
    async for frame in worker.frames(): …
    status = await worker.wait()
    await zygote.close()

Must never fork the node itself (the zygote is exec'ed), run code of a capability in the node, or wait for the
end of a pipe: a grandchild can hold it open.
"""

import asyncio
from collections import deque
from pathlib import Path

from worker import scratch
from worker.assignment import Assignment
from worker.capability_folder import CapabilityFolder
from worker.worker_process import ExitStatus, Worker
from worker.zygote_process import SpawnFailed, ZygoteProcess

__all__ = ["Assignment", "ExitStatus", "SpawnFailed", "Worker", "Zygote"]

TAKE_PATIENCE_S = 20.0


class Zygote:
    """The process that has imported one capability and forks its workers ahead.

    Args:
        folder: the capability.
        standby: how many children stand by, forked ahead; 0 forks on demand.
        scratch_dir: where the workers' temporary directories are made; one machine's nodes may share it. What
            nodes that died have left there is removed at start.
    """

    def __init__(self, folder: CapabilityFolder, *, standby: int, scratch_dir: Path) -> None:
        self.folder = folder
        self._standby = standby
        self._scratch_dir = scratch_dir
        self._process: ZygoteProcess | None = None
        self._starting = asyncio.Lock()
        self._waiters: deque[asyncio.Future[Worker]] = deque()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"Zygote({self.folder.template.name}, {'warm' if self.is_warm else 'cold'})"

    @property
    def is_warm(self) -> bool:
        """Whether the handler is imported and `take` is quick."""
        return self._process is not None and self._process.is_alive

    async def start(self) -> None:
        """Start the process and import the handler; nothing to do when it runs already.

        Raises: SpawnFailed with the last lines of the traceback.
        """
        async with self._starting:
            if self._is_closed:
                raise SpawnFailed("the zygote is closed", is_retryable=True)
            if self.is_warm:
                return
            if self._process is not None:
                await self._process.bury()
            await asyncio.to_thread(self._tidy)
            if self._is_closed:
                raise SpawnFailed("the zygote is closed", is_retryable=True)
            self._process = ZygoteProcess(self.folder, scratch_dir=self._scratch_dir, on_change=self._serve_waiters)
            await self._process.start()
            self._process.request(self._standby)

    def _tidy(self) -> None:
        self._scratch_dir.mkdir(parents=True, exist_ok=True)
        scratch.sweep_dead_owners(self._scratch_dir)

    async def take(self) -> Worker:
        """Return a child that stands by, and have the next one forked ahead; starts the zygote anew if it died.

        Raises: SpawnFailed.
        """
        for is_last_try in (False, True):
            if not self.is_warm:
                await self.start()
            process = self._process
            assert process is not None
            try:
                worker = process.take() or await self._wait_for_worker(process)
            except SpawnFailed:
                if is_last_try or process.is_alive:
                    raise
                continue  # it died between two tasks: a new one may do better
            process.request(self._standby - len(process.idle) - process.requested)
            return worker
        raise AssertionError("unreachable")

    async def _wait_for_worker(self, process: ZygoteProcess) -> Worker:
        waiter: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        process.request(len(self._waiters) - process.requested)
        try:
            async with asyncio.timeout(TAKE_PATIENCE_S):
                return await asyncio.shield(waiter)
        except TimeoutError:
            raise SpawnFailed(f"no worker was forked within {TAKE_PATIENCE_S:.0f} s", is_retryable=True) from None
        except asyncio.CancelledError:
            if waiter.done() and waiter.exception() is None:
                waiter.result().begin_kill()  # it came at the same moment, and nobody will use it
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _serve_waiters(self) -> None:
        """Give children to those who wait, oldest first, and bad news when there are none to come."""
        process = self._process
        assert process is not None
        while self._waiters and (worker := process.take()) is not None:
            self._waiters.popleft().set_result(worker)
        while self._waiters and (process.refusals or not process.is_alive):
            detail = process.refusals.pop(0) if process.refusals else "the capability's zygote died"
            self._waiters.popleft().set_exception(SpawnFailed(detail, is_retryable=True))
        # Nothing is asked for here: children that fail to come must not be asked for in a circle.
        process.refusals.clear()

    async def close(self) -> None:
        """Kill all workers and the zygote; no process and no temporary directory is left. May be called twice."""
        self._is_closed = True
        if self._process is not None:
            await self._process.bury()
