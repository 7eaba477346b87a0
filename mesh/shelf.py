"""The capabilities that this node offers, each with its zygote, kept in step with the folders on disk.

Must never let one broken folder take another capability down: the last good one keeps serving.
"""

import asyncio
import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path

import structlog

from mesh.contract.template import Template, TemplateError
from worker.capability_folder import CapabilityFolder, load_capabilities
from worker.spawner import SpawnFailed, Zygote

# A look at the folders waits this long for the handlers that it starts; slower ones join when they are ready.
START_TOGETHER_S = 5.0

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
        # Name → digest and task of a folder whose handler is being imported.
        self._starting: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._has_changed = False
        self._stamp: tuple[tuple[str, int, int], ...] | None = None
        self._stopping: set[asyncio.Task[None]] = set()
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
        """Look at the folders; return whether what can run has changed since the last look.

        A handler whose import takes long, or never ends, keeps no other from serving.
        """
        stamp = await asyncio.to_thread(self._read_stamp)
        if stamp != self._stamp:
            self._stamp = stamp
            begun = self._follow(await asyncio.to_thread(self._read_folders))
            if begun:
                await asyncio.wait(begun, timeout=START_TOGETHER_S)
        has_changed, self._has_changed = self._has_changed, False
        return has_changed

    def _read_folders(self) -> dict[str, CapabilityFolder]:
        found: dict[str, CapabilityFolder] = {}
        for root in self._roots:
            if not root.is_dir():  # it may come later
                continue
            folders, broken = load_capabilities(root)
            found |= {folder.template.name: folder for folder in folders}
            for name, error in broken.items():
                found.pop(name, None)  # the later root has the word, even when it cannot be understood
                self._report(root / name, error)
        return found

    def _follow(self, found: dict[str, CapabilityFolder]) -> list[asyncio.Task[None]]:
        """Retire what is gone and start what is new; return the tasks of what was started."""
        for name in {*self._slots, *self._starting} - set(found):
            if self._is_broken(name):
                continue
            self._stop_starting(name)
            if (slot := self._slots.pop(name, None)) is not None:
                self._retire(slot)
                self._has_changed = True
                log.info("capability_removed", capability=name)
        begun = []
        for name, folder in found.items():
            if self._wanted_digest(name) == folder.digest:
                continue
            self._stop_starting(name)
            task = asyncio.create_task(self._put(folder), name=f"start {name}")
            self._starting[name] = folder.digest, task
            begun.append(task)
        return begun

    def _wanted_digest(self, name: str) -> str | None:
        if name in self._starting:
            return self._starting[name][0]
        return self._slots[name].folder.digest if name in self._slots else None

    def _stop_starting(self, name: str) -> None:
        if name in self._starting:
            _, task = self._starting.pop(name)
            task.cancel()
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    def _is_broken(self, name: str) -> bool:
        """A folder that is there but cannot be read now keeps its last good version."""
        return any((root / name / "template.yaml").exists() for root in self._roots)

    async def _put(self, folder: CapabilityFolder) -> None:
        name = folder.template.name
        zygote = Zygote(folder, standby=self._standby, scratch_dir=self._scratch_dir)
        try:
            await zygote.start()
        except (SpawnFailed, OSError) as error:
            log.error("capability_does_not_start", capability=name, path=str(folder.path), detail=str(error))
            if isinstance(error, OSError) or error.is_retryable:
                self._stamp = None  # bad luck, not a bad folder: the next look tries again
            await zygote.close()
            del self._starting[name]
            return
        except BaseException:
            await zygote.close()
            raise
        del self._starting[name]
        old = self._slots.get(name)
        self._slots[name] = Slot(folder, zygote)
        self._has_changed = True
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
                if "__pycache__" in path.parts:
                    continue
                with contextlib.suppress(OSError):  # gone since it was listed
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):
                        stamps.append((str(path), status.st_mtime_ns, status.st_size))
        return tuple(stamps)

    async def close(self) -> None:
        """End every zygote and every worker of theirs."""
        for name in list(self._starting):
            self._stop_starting(name)
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._stopping, *self._retiring, return_exceptions=True)
        everything = [slot.zygote.close() for slot in (*self._slots.values(), *self._retired)]
        self._slots.clear()
        self._retired.clear()
        await asyncio.gather(*everything)
