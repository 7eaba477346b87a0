"""Real zygotes and workers for handlers given as text, and the proof that nothing of them is left."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.capability_files import claim_of, python_capability
from support.process_list import processes_of

from mesh.contract.messages import AttemptLog, Claim
from worker.capability_folder import CapabilityFolder
from worker.frames import Error, Frame, Result
from worker.spawner import Assignment, ExitStatus, Worker, Zygote

DEADLINE_S = 30.0


@dataclass
class Outcome:
    """What one worker said and how it ended."""

    status: ExitStatus
    log: AttemptLog
    frames: list[Frame] = field(default_factory=list)

    @property
    def result(self) -> Any:
        """The result; fails the test with the whole outcome when there is none."""
        results = [frame for frame in self.frames if isinstance(frame, Result)]
        assert len(results) == 1, self
        return results[0].result

    @property
    def error(self) -> Error:
        """The error frame; fails the test with the whole outcome when there is none."""
        errors = [frame for frame in self.frames if isinstance(frame, Error)]
        assert len(errors) == 1, self
        return errors[0]


class Lab:
    """Starts zygotes for handlers that are given as text, and runs intents in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.scratch_dir = root / "scratch"
        self._zygotes: list[Zygote] = []

    def zygote(self, what: str | CapabilityFolder, *, standby: int = 1, **template: Any) -> Zygote:
        """Return a zygote that is not started yet."""
        folder = python_capability(self.root / "capabilities", what, **template) if isinstance(what, str) else what
        zygote = Zygote(folder, standby=standby, scratch_dir=self.scratch_dir)
        self._zygotes.append(zygote)
        return zygote

    async def begin(self, zygote: Zygote, claim: Claim | None = None) -> Worker:
        """Take a worker and activate it."""
        worker = await zygote.take()
        await worker.activate(Assignment.from_claim(claim or claim_of(), zygote.folder))
        return worker

    async def run(self, what: Zygote | str | CapabilityFolder, claim: Claim | None = None, **template: Any) -> Outcome:
        """Run one intent to its end; nobody answers what the worker asks."""
        zygote = what if isinstance(what, Zygote) else self.zygote(what, **template)
        async with asyncio.timeout(DEADLINE_S):
            worker = await self.begin(zygote, claim)
            frames = [frame async for frame in worker.frames()]
            status = await worker.wait()
        return Outcome(status, worker.log(), frames)

    async def close(self) -> None:
        """End all zygotes and prove that they left nothing."""
        for zygote in self._zygotes:
            await zygote.close()
        assert processes_of(self.scratch_dir) == []
        if self.scratch_dir.exists():
            assert list(self.scratch_dir.iterdir()) == []
