"""Wakes those who watch a thread, whoever committed what: this process (at once) or another (notice stream).

Must never carry content: a wake means "read the ledger". It may wake for nothing, and never the other way round:
a wake between registering and waiting, or between two waits, is kept, and after an outage everybody is woken.
A notice that its sender could not send wakes nobody: who watches polls slowly all the same.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from mesh.backplane.backplane import Backplane
from mesh.contract.errors import MeshError
from mesh.contract.ids import new_id
from mesh.contract.messages import Announcement, Notice

READ_TIMEOUT_S = 2.0
PAUSE_S = 0.1


class Watch:
    """One watcher's bell. Register first, then read the ledger, then wait, and read again."""

    def __init__(self) -> None:
        self._bell = asyncio.Event()

    def ring(self) -> None:
        """Let the next wait, or the one that is going on, return True."""
        self._bell.set()

    async def wait(self, timeout_s: float) -> bool:
        """Return True as soon as something was committed since the last wait, False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._bell.wait()
        except TimeoutError:
            # It may have rung in the very moment in which the time was over.
            if not self._bell.is_set():
                return False
        self._bell.clear()
        return True


class NoticeBoard:
    """All watchers of one process. Is itself a `MeshPort`: give it to the ledger as its port.

    What is notified through it wakes this process's watchers at once and then goes on to the backplane
    (announce and forget pass through). Without a backplane only this process's own notices wake.
    """

    def __init__(self, backplane: Backplane | None) -> None:
        self._backplane = backplane
        self._origin = new_id()
        self._watches: defaultdict[tuple[str, str], set[Watch]] = defaultdict(set)
        self._reading: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"NoticeBoard({sum(len(watches) for watches in self._watches.values())} watches)"

    async def start(self) -> None:
        """Begin to read the notice stream, in the background, through every outage."""
        if self._backplane is not None and self._reading is None:
            self._reading = asyncio.create_task(self._read(self._backplane), name="notice board")

    async def close(self) -> None:
        """Stop reading, and wake everybody once more."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None
        self._wake_all()

    @asynccontextmanager
    async def watch(self, tenant_id: str, thread_id: str) -> AsyncIterator[Watch]:
        """Watch a thread for as long as the block runs."""
        watch = Watch()
        watches = self._watches[tenant_id, thread_id]
        watches.add(watch)
        try:
            yield watch
        finally:
            watches.discard(watch)
            # Another watcher may have come after the set was emptied and dropped: drop only this very set.
            if not watches and self._watches.get((tenant_id, thread_id)) is watches:
                del self._watches[tenant_id, thread_id]

    def poke(self, notices: Iterable[Notice]) -> None:
        """Wake the watchers of these threads in this process."""
        for notice in notices:
            for watch in self._watches.get((notice.tenant_id, notice.thread_id), ()):
                watch.ring()

    async def announce(self, announcements: Sequence[Announcement]) -> None:
        """Pass on to the backplane."""
        if self._backplane is not None:
            await self._backplane.announce(announcements)

    async def forget(self, announcements: Sequence[Announcement]) -> None:
        """Pass on to the backplane."""
        if self._backplane is not None:
            await self._backplane.forget(announcements)

    async def notify(self, notices: Sequence[Notice]) -> None:
        """Poke, then tell the other processes."""
        self.poke(notices)
        if self._backplane is not None:
            await self._backplane.notify(notices, origin=self._origin)

    def _wake_all(self) -> None:
        for watches in self._watches.values():
            for watch in watches:
                watch.ring()

    async def _read(self, backplane: Backplane) -> None:
        reader = backplane.notices()
        # Until the stream's newest entry is known, notices may pass unseen.
        is_gap = True
        while True:
            try:
                if is_gap:
                    await reader.begin(timeout_s=READ_TIMEOUT_S)
                    is_gap = False
                    self._wake_all()
                told = await reader.next(READ_TIMEOUT_S)
            except MeshError:
                is_gap = True
                self._wake_all()
                await asyncio.sleep(PAUSE_S)
                continue
            self.poke(notice for origin, notice in told if origin != self._origin)
