"""The capabilities that this node offers, each with its zygote, kept in step with the folders on disk.

Must never let one broken folder take another capability down: the last good one keeps serving.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import structlog

from mesh.contract.template import Template, TemplateError
from worker.capability_folder import CapabilityFolder, load_capabilities
from worker.spawner import SpawnFailed, Zygote

log = structlog.get_logger()


class Slot:
    """One capability that can run: its folder and its zygote."""

    def __init__(self, folder: CapabilityFolder, zygote: Zygote) -> None:
        self.folder = folder
        self.zygote = zygote
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[Zygote]:
        """Hold the zygote: a newer version of the folder does not end it before the last user is done."""
        self._users += 1
        self._idle.clear()
        try:
            yield self.zygote
        finally:
            self._users -= 1
            if self._users == 0:
                self._idle.set()

    async def close_when_idle(self) -> None:
        """Close the zygote after its last user."""
        await self._idle.wait()
        await self.zygote.close()

    def __repr__(self) -> str:
        return f"Slot({self.folder.template.name} {self.folder.digest[:8]})"


class Shelf:
    """Name → capability. `refresh` is the only thing that changes it."""

    def __init__(self, roots: list[Path], *, standby: int, scratch_dir: Path) -> None:
        self._roots = roots
        self._standby = standby
        self._scratch_dir = scratch_dir
        self._slots: dict[str, Slot] = {}
        self._stamp: tuple[tuple[str, int, int], ...] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._retired: set[Slot] = set()

    def get(self, name: str) -> Slot | None:
        """Return the capability of that name."""
        return self._slots.get(name)

    def templates(self) -> list[Template]:
        """What the node tells the ledger it can run."""
        return [slot.folder.template for slot in self._slots.values()]

    def warm(self) -> frozenset[str]:
        """The capabilities whose workers can start without an import."""
        return frozenset(name for name, slot in self._slots.items() if slot.zygote.is_warm)

    async def refresh(self) -> bool:
        """Look at the folders; return whether what can run has changed."""
        stamp = await asyncio.to_thread(self._read_stamp)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        found: dict[str, CapabilityFolder] = {}
        for root in self._roots:
            if not root.is_dir():  # it may come later
                continue
            folders, broken = await asyncio.to_thread(load_capabilities, root)
            found |= {folder.template.name: folder for folder in folders}
            for name, error in broken.items():
                self._report(root / name, error)
        changed = [
            folder
            for name, folder in found.items()
            if name not in self._slots or self._slots[name].folder.digest != folder.digest
        ]
        gone = [name for name in self._slots if name not in found and not self._is_broken(name)]
        for name in gone:
            self._retire(self._slots.pop(name))
            log.info("capability_removed", capability=name)
        await asyncio.gather(*(self._put(folder) for folder in changed))
        return bool(changed or gone)

    def _is_broken(self, name: str) -> bool:
        """A folder that is there but cannot be read now keeps its last good version."""
        return any((root / name / "template.yaml").exists() for root in self._roots)

    async def _put(self, folder: CapabilityFolder) -> None:
        name = folder.template.name
        zygote = Zygote(folder, standby=self._standby, scratch_dir=self._scratch_dir)
        try:
            await zygote.start()
        except SpawnFailed as error:
            log.error("capability_does_not_start", capability=name, path=str(folder.path), detail=str(error))
            await zygote.close()
            return
        old = self._slots.get(name)
        self._slots[name] = Slot(folder, zygote)
        log.info("capability_ready", capability=name, version=folder.template.version)
        if old is not None:
            self._retire(old)

    def _retire(self, slot: Slot) -> None:
        """Let the old zygote's workers finish, then close it."""
        self._retired.add(slot)
        task = asyncio.create_task(slot.close_when_idle())
        self._retiring.add(task)

        def forget(done: asyncio.Task[None]) -> None:
            self._retiring.discard(done)
            if not done.cancelled() and done.exception() is None:
                self._retired.discard(slot)

        task.add_done_callback(forget)

    @staticmethod
    def _report(path: Path, error: TemplateError) -> None:
        for mistake in error.mistakes:
            log.error("capability_broken", path=str(path), mistake=str(mistake))

    def _read_stamp(self) -> tuple[tuple[str, int, int], ...]:
        stamps = []
        for root in self._roots:
            for path in sorted(root.glob("*/**/*")) if root.is_dir() else []:
                if "__pycache__" in path.parts or not path.is_file():
                    continue
                status = path.stat()
                stamps.append((str(path), status.st_mtime_ns, status.st_size))
        return tuple(stamps)

    async def close(self) -> None:
        """End every zygote and every worker of theirs."""
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        everything = [slot.zygote.close() for slot in (*self._slots.values(), *self._retired)]
        self._slots.clear()
        self._retired.clear()
        await asyncio.gather(*everything)
