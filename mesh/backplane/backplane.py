"""The mesh's hints over Redis: offers intents to bids, wakes nodes and watchers; the only face other rooms see.

Redis is never the truth here: whatever it loses, the ledger's sweeper and the slow polls make good. So the calls
of `MeshPort` (announce, forget, notify) never raise and never take longer than about a second, and they return at
once while an outage lasts; the calls of a node raise MeshError `unavailable` then.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog
from prometheus_client import Counter, Gauge
from pydantic import ValidationError
from redis.exceptions import RedisError, ResponseError

from mesh.backplane import client
from mesh.backplane.book import START, Book, read_award
from mesh.backplane.keys import Keys
from mesh.contract.errors import ErrorCode, MeshError, unavailable
from mesh.contract.messages import Announcement, Award, Bid, Notice

Wake = Award | Notice
T = TypeVar("T")

CALL_MAX_S = 0.8
CALLS_AT_ONCE_MAX = 32
BLOCK_MAX_S = 2.0
PROBE_INTERVAL_S = 0.25
READ_MAX = 256
NOTICES_MAX = 10_000
WAKES_MAX = 4096
WAKES_TTL_S = 3600
TOLD_AGAIN_S = 30.0
# Answers that mean "not now" to any call; other error replies are about the one call that got them.
_OUTAGE_REPLIES = frozenset(
    [
        "BUSY",
        "CLUSTERDOWN",
        "LOADING",
        "MASTERDOWN",
        "MISCONF",
        "MOVED",
        "NOAUTH",
        "NOPERM",
        "NOREPLICAS",
        "OOM",
        "READONLY",
        "UNKILLABLE",
    ]
)

_FAILURES = Counter("intentmesh_backplane_failures", "Calls to Redis that failed or were skipped", ["call"])
_UP = Gauge("intentmesh_backplane_up", "Whether Redis answers and may be used")
_PLACED = Counter("intentmesh_backplane_announced", "Announced intents by what became of them", ["outcome"])
_log = structlog.get_logger(__name__)


class Backplane:
    """One process's connection to the mesh. Implements `mesh.contract.ports.MeshPort`.

    Use `Backplane.open(url, prefix=…)`, or `async with Backplane(url, prefix=…) as backplane`.
    """

    def __init__(self, url: str, *, prefix: str) -> None:
        self._keys = Keys(prefix)
        self._redis = client.connect(url)
        self._blocking = client.connect(url, is_blocking=True)
        self._places = asyncio.Semaphore(CALLS_AT_ONCE_MAX)
        self._book = Book(self._redis, self._keys)
        self._up = asyncio.Event()
        self._recovery: asyncio.Task[None] | None = None
        self._is_closed = False
        self._told_at = -TOLD_AGAIN_S
        self._cursors: defaultdict[str, str] = defaultdict(lambda: START)
        self._confirmed: defaultdict[str, int] = defaultdict(int)
        self._bidding: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def __repr__(self) -> str:
        return f"Backplane({self._keys.prefix!r}, {'up' if self.is_up else 'down'})"

    @classmethod
    async def open(cls, url: str, *, prefix: str) -> Self:
        """Connect and verify the server; with no server there, return all the same and keep trying.

        Raises: MeshError `invalid_request` when the URL cannot be read, the server is older than 7.0, or its
            maxmemory-policy evicts.
        """
        backplane = cls(url, prefix=prefix)
        try:
            await backplane.start()
        except BaseException:
            await backplane.close()
            raise
        return backplane

    async def start(self) -> None:
        """See `open`."""
        try:
            async with asyncio.timeout(2 * CALL_MAX_S):
                await self._probe()
        except client.UnfitServer as error:
            if error.reason.code is not ErrorCode.UNAVAILABLE:
                raise error.reason from None
            self._fail("start", error)
        except (RedisError, OSError, TimeoutError) as error:
            self._fail("start", error)

    async def close(self) -> None:
        """Drop every connection and stop recovering."""
        self._is_closed = True
        self._up.clear()
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        await self._redis.aclose()
        await self._blocking.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_up(self) -> bool:
        """Whether the last call got an answer, and the server may be used."""
        return self._up.is_set()

    async def ping(self) -> bool:
        """Ask the server now; never raises."""
        return await self._hint("ping", self._redis.ping) is not None

    async def wait_up(self, timeout_s: float) -> None:
        """Wait until the server may be used.

        Raises: MeshError `unavailable` after `timeout_s`.
        """
        if self._is_closed:
            raise unavailable("the backplane was closed")
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            raise unavailable("the backplane (Redis) does not answer") from None

    # ---- MeshPort: never raises, about a second at most

    async def announce(self, announcements: Sequence[Announcement]) -> None:
        """Award each intent to the best admissible bid, or keep it in the book. One round trip."""
        if announcements:
            outcomes = await self._hint("announce", lambda: self._book.announce(announcements))
            for outcome in outcomes or ():
                _PLACED.labels(outcome).inc()

    async def forget(self, announcements: Sequence[Announcement]) -> None:
        """Take intents out of the book, with the memory that they were awarded lately. One round trip."""
        if announcements:
            await self._hint("forget", lambda: self._book.forget(announcements))

    async def notify(self, notices: Sequence[Notice], *, origin: str = "") -> None:
        """Put notices on the stream that every gateway reads, and wake the node that must cancel.

        Args:
            origin: who says it; `NoticeReader` hands it back, so that a sender can skip its own.
        """
        if notices:
            await self._hint("notify", lambda: self._send_notices(notices, origin))

    async def _send_notices(self, notices: Sequence[Notice], origin: str) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for notice in notices:
                text = notice.model_dump_json()
                pipe.xadd(self._keys.notices, {"n": text, "o": origin}, maxlen=NOTICES_MAX)
                if notice.cancel_on_node:
                    wakes = self._keys.wakes(notice.cancel_on_node)
                    pipe.xadd(wakes, {"n": text}, maxlen=WAKES_MAX)
                    pipe.expire(wakes, WAKES_TTL_S)
            await pipe.execute()

    # ---- a node's side: raises MeshError `unavailable`

    async def place_bids(self, node_id: str, free_slots: int, bids: Sequence[Bid], *, ttl_s: float) -> list[Award]:
        """Replace the node's standing bids and free slots, and return the pending intents that it gets at once.

        Awards that `next_wakes` has not handed out yet are taken off `free_slots` by the book: count as used
        every award that this object has returned to you, before you call it. Call it whenever a slot is freed or
        a price changed, and well before `ttl_s` is over: bids are forgotten then.
        """
        async with self._bidding[node_id]:
            reply = await self._attempt(
                "place_bids",
                lambda: self._book.bid(
                    node_id,
                    free_slots,
                    bids,
                    ttl_s=ttl_s,
                    cursor=self._cursors[node_id],
                    confirmed=self._confirmed[node_id],
                ),
            )
            self._confirmed[node_id] = reply.number
            return reply.awards

    async def decline(self, award: Award, *, exclude_s: float) -> None:
        """Give an award back: another node gets it at once or it waits, and this node is passed over for a while.

        The slot stays handed out until the node's next `place_bids`.
        """
        await self._attempt("decline", lambda: self._book.decline(award, exclude_s=exclude_s))

    async def withdraw(self, node_id: str) -> None:
        """Take the node's bids out of the book; awards that it has not received go to others."""
        async with self._bidding[node_id]:
            await self._attempt(
                "withdraw",
                lambda: self._book.withdraw(node_id, cursor=self._cursors[node_id], confirmed=self._confirmed[node_id]),
            )

    async def next_wakes(self, node_id: str, timeout_s: float) -> list[Wake]:
        """Wait for awards, and for notices of intents to cancel (`Notice.cancel_on_node` is this node).

        Returns: what came, oldest first; nothing after `timeout_s`. Each once, unless this process was restarted.
        One call at a time for a node. Raises not faster than `timeout_s` while the server is gone.
        """
        stream = self._keys.wakes(node_id)
        entries = await self._read("next_wakes", stream, self._cursors[node_id], timeout_s, is_patient=True)
        wakes: list[Wake] = []
        for entry_id, fields in entries:
            self._cursors[node_id] = entry_id
            try:
                wakes.append(read_award(fields["a"]) if "a" in fields else Notice.model_validate_json(fields["n"]))
            except (ValueError, KeyError, TypeError, ValidationError) as error:
                _log.warning("backplane.wake_unreadable", entry=entry_id, error=str(error))
        return wakes

    def notices(self) -> "NoticeReader":
        """Return a reader of the notice stream from now on."""
        return NoticeReader(self)

    # ---- calls and outages

    async def _hint(self, call: str, work: Callable[[], Awaitable[T]]) -> T | None:
        """Do `work` if the server is there; swallow what goes wrong with it."""
        try:
            return await self._attempt(call, work)
        except MeshError:
            return None
        except ValueError as error:
            _log.error("backplane.hint_refused", call=call, error=str(error))
            return None

    async def _attempt(self, call: str, work: Callable[[], Awaitable[T]]) -> T:
        """Run one call under the limits of time and of connections.

        Raises: MeshError `unavailable`, at once while an outage lasts.
        """

        async def run() -> T:
            async with self._places:
                return await work()

        return await self._guard(call, run, limit_s=CALL_MAX_S)

    async def _guard(self, call: str, work: Callable[[], Awaitable[T]], *, limit_s: float) -> T:
        if not self.is_up:
            _FAILURES.labels(call).inc()
            raise unavailable("the backplane (Redis) does not answer")
        try:
            async with asyncio.timeout(limit_s):
                return await work()
        except (RedisError, OSError, TimeoutError) as error:
            if _is_outage(error):
                self._fail(call, error)
            else:
                _FAILURES.labels(call).inc()
                _log.error("backplane.call_failed", call=call, error=f"{type(error).__name__}: {error}")
            raise unavailable(f"the backplane (Redis) does not answer: {type(error).__name__}") from error

    def _fail(self, call: str, error: Exception) -> None:
        """Begin an outage: told once, and ended by the first probe that succeeds."""
        _FAILURES.labels(call).inc()
        self._up.clear()
        _UP.set(0)
        if self._is_closed:
            return
        if time.monotonic() - self._told_at >= TOLD_AGAIN_S:
            self._told_at = time.monotonic()
            _log.warning("backplane.down", call=call, error=f"{type(error).__name__}: {error}")
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._recover(), name="backplane recovery")

    async def _recover(self) -> None:
        last = ""
        while True:
            try:
                async with asyncio.timeout(CALL_MAX_S):
                    await self._probe()
            except (RedisError, OSError, TimeoutError) as error:
                if isinstance(error, client.UnfitServer) and str(error) != last:
                    _log.error("backplane.unusable", error=error.reason.detail, hint=error.reason.hint)
                    last = str(error)
                await asyncio.sleep(PROBE_INTERVAL_S)
                continue
            _log.info("backplane.up")
            return

    async def _probe(self) -> None:
        await client.verify_server(self._redis)
        # A server that takes no writes (disk full, replica) is not up.
        await self._redis.set(self._keys.probe, "1", px=1000)
        await self._book.load()
        self._up.set()
        _UP.set(1)

    async def _read(
        self, call: str, stream: str, cursor: str, timeout_s: float, *, is_patient: bool
    ) -> list[tuple[str, dict[str, str]]]:
        """Read a stream's entries after `cursor`, waiting for the first; nothing after `timeout_s`.

        Args:
            is_patient: whether a failure is followed by another try, as long as there is time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if not self.is_up:
                await self.wait_up(max(0.0, left_s))
            block_s = min(BLOCK_MAX_S, left_s)
            # BLOCK 0 would mean for ever.
            block_ms = max(1, round(block_s * 1000)) if block_s > 0 else None
            read = partial(self._blocking.xread, {stream: cursor}, count=READ_MAX, block=block_ms)
            try:
                reply: Any = await self._guard(call, read, limit_s=BLOCK_MAX_S + 1)
            except MeshError:
                if left_s <= 0 or not is_patient or self._is_closed:
                    raise
                await asyncio.sleep(min(PROBE_INTERVAL_S, left_s))
                continue
            entries = _entries(reply)
            if entries or left_s <= 0:
                return entries

    async def _newest(self, stream: str) -> str:
        """Return the id of a stream's newest entry."""
        entries: Any = await self._attempt("notices", lambda: self._redis.xrevrange(stream, count=1))
        return str(entries[0][0]) if entries else START


def _is_outage(error: Exception) -> bool:
    if type(error) is not ResponseError:
        return True
    return str(error).partition(" ")[0] in _OUTAGE_REPLIES


def _entries(reply: Any) -> list[tuple[str, dict[str, str]]]:
    """Return the entries of the one stream that was read."""
    if not reply:
        return []
    streams = list(reply.values()) if isinstance(reply, dict) else [entries for _, entries in reply]
    return [(entry_id, fields) for entry_id, fields in streams[0]]


class NoticeReader:
    """Reads the notice stream, for `NoticeBoard`, from its first `begin` on."""

    def __init__(self, backplane: Backplane) -> None:
        self._backplane = backplane
        self._stream = backplane._keys.notices
        self._cursor: str | None = None

    async def begin(self, timeout_s: float) -> None:
        """Wait until the server is there; the first time, take the stream's newest entry as the beginning.

        Raises: MeshError `unavailable`, not faster than `timeout_s` while the server is gone.
        """
        await self._backplane.wait_up(timeout_s)
        if self._cursor is None:
            self._cursor = await self._backplane._newest(self._stream)

    async def next(self, timeout_s: float) -> list[tuple[str, Notice]]:
        """Wait for notices.

        Returns: (origin, notice) pairs, oldest first; nothing after `timeout_s`.
        Raises: MeshError `unavailable`; what was told in the meantime may be lost then.
        """
        assert self._cursor is not None, "begin first"
        entries = await self._backplane._read("notices", self._stream, self._cursor, timeout_s, is_patient=False)
        notices = []
        for entry_id, fields in entries:
            self._cursor = entry_id
            try:
                notices.append((fields.get("o", ""), Notice.model_validate_json(fields["n"])))
            except (KeyError, ValidationError) as error:
                _log.warning("backplane.notice_unreadable", entry=entry_id, error=str(error))
        return notices
