"""A node: bids for intents, claims what it is awarded, runs each in a worker, reports the outcome.

A loop reconciles wanted with actual; notices only wake it. The ledger is the truth: an award is a hint, the
claim is the fence. Must never touch the database, and never trust a lease that it could not renew.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Coroutine
from typing import Any

import structlog

from ledger.client import LedgerClient
from mesh.attempt import Attempt
from mesh.backplane.backplane import Backplane
from mesh.bidding import NodeSnapshot, make_bids, price
from mesh.contract.errors import Cause, ErrorCode, MeshError
from mesh.contract.messages import (
    Announcement,
    Award,
    ClaimRequest,
    FailAttempt,
    Heartbeat,
    LeaseRef,
    Notice,
    RegisterNode,
)
from mesh.event_pump import until_accepted
from mesh.lease import Lease, renew_interval_s
from mesh.llm.broker import Broker
from mesh.load import FailureCounter, memory_used_share
from mesh.outcome import settle
from mesh.settings import NodeSettings
from mesh.shelf import Shelf, Slot

# An intent that this node declined is offered to others for so long before it is offered here again.
DECLINE_EXCLUDES_S = 5.0
WAKE_BLOCK_S = 1.0
# After a call that the ledger did not answer, a lease is renewed again after this share of the usual pause.
RETRY_SHARE = 0.1
# A standing bid outlives two missed renewals, so that a dead node is out of the book soon.
BID_TTL_IN_INTERVALS = 3

log = structlog.get_logger()


class _Running:
    """A claimed intent on this node."""

    def __init__(self, attempt: Attempt, lease: Lease) -> None:
        self.attempt = attempt
        self.lease = lease
        # While the outcome is on its way, a lease that is not renewed may simply be over.
        self.is_settling = False


class Node:
    """One node. `run` returns when `drain` was asked for and done."""

    def __init__(self, settings: NodeSettings, *, ledger: LedgerClient, backplane: Backplane | None) -> None:
        self.settings = settings
        self.node_id = settings.node_id
        self._ledger = ledger
        self._backplane = backplane
        self._broker = Broker(settings)
        self._shelf = Shelf(
            settings.capability_roots(), standby=settings.node_standby, scratch_dir=settings.data_dir / "scratch"
        )
        self._failures = FailureCounter()
        self._running: dict[str, _Running] = {}
        self._claiming: set[str] = set()
        # Awards of intents whose earlier attempt is still ending here.
        self._next_awards: dict[str, Award] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._bid_wanted = asyncio.Event()
        self._heartbeat_wanted = asyncio.Event()
        self._drain_wanted = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._lease_ttl_s = 15.0
        self._is_registered = False
        self._is_handing_back = False
        # A node that cannot reach the ledger must not win what it cannot claim.
        self._has_ledger = True

    @property
    def free_slots(self) -> int:
        """Slots that hold neither a running nor a claiming intent; none while draining."""
        if self._drain_wanted.is_set():
            return 0
        return max(0, self.settings.node_slots - len(self._running) - len(self._claiming))

    @property
    def is_draining(self) -> bool:
        """Whether the node finishes and takes no more."""
        return self._drain_wanted.is_set()

    def drain(self) -> None:
        """Ask the node to finish what runs and to stop."""
        self._drain_wanted.set()
        self._bid_wanted.set()
        self._heartbeat_wanted.set()

    async def run(self) -> None:
        """Serve until drained. Raises whatever a loop could not handle: a bug, so the process should end.

        Raises: MeshError when the ledger refuses this node.
        """
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._drain_wanted.wait(), name="drain")]
        try:
            tasks.append(asyncio.create_task(self._start(), name="start"))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[-1].done():
                return  # asked to stop before it could begin
            tasks[-1].result()
            working = [asyncio.create_task(loop, name=name) for name, loop in self._loops().items()]
            tasks += working
            done, _ = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._drain_wanted.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while self._tasks:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._shelf.close()
            await self._broker.close()

    def _loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {
            "heartbeat": self._heartbeat_loop(),
            "lease_guard": self._lease_guard_loop(),
            "bid": self._bid_loop(),
            "wake": self._wake_loop(),
            "poll": self._poll_loop(),
            "reload": self._reload_loop(),
            "finish": self._finish_when_drained(),
        }

    async def _start(self) -> None:
        """Look at the capabilities, and register: as soon as the ledger is there."""
        await self._shelf.refresh()
        is_told = False
        async for attempt in until_accepted():
            with attempt:
                try:
                    await self._register()
                except MeshError as error:
                    if not is_told:
                        log.warning("ledger_does_not_answer", ledger_url=self.settings.ledger_url, detail=error.detail)
                    is_told = True
                    raise

    async def _register(self) -> None:
        """Tell the ledger what this node can run.

        Raises: MeshError when the ledger did not take it.
        """
        message = RegisterNode(
            node_id=self.node_id,
            host=socket.gethostname(),
            slots=self.settings.node_slots,
            capabilities=self._shelf.templates(),
        )
        self._is_registered = True  # a change while this is under way asks for another time
        try:
            welcome = await self._ledger.register(message)
        except BaseException:
            self._is_registered = False
            raise
        self._lease_ttl_s = welcome.lease_ttl_s
        if welcome.is_draining:
            self.drain()
        log.info("node_registered", node_id=self.node_id, capabilities=sorted(t.name for t in message.capabilities))

    async def _finish_when_drained(self) -> None:
        """Let what runs end; stop what does not, so that another node may take it up."""
        await self._drain_wanted.wait()
        log.info("node_draining", running=len(self._running))
        if self._backplane is not None:
            with contextlib.suppress(MeshError):
                await self._backplane.withdraw(self.node_id)
        if not await _wait(self._idle, self.settings.drain_timeout_s):
            self._is_handing_back = True
            for running in self._running.values():
                running.attempt.stop(Cause.NODE_DRAINED)
            await _wait(self._idle, self._lease_ttl_s)
        with contextlib.suppress(MeshError):
            await self._ledger.heartbeat(Heartbeat(node_id=self.node_id, is_draining=True))
        log.info("node_stopped")

    # ---- leases

    async def _heartbeat_loop(self) -> None:
        pause_s = 0.0
        while True:
            await _wait(self._heartbeat_wanted, pause_s)
            self._heartbeat_wanted.clear()
            pause_s = renew_interval_s(self._lease_ttl_s)
            try:
                # A call that hangs must leave time for another one before the lease is over.
                async with asyncio.timeout(pause_s):
                    await self._renew()
                    if not self._is_registered:
                        await self._register()
            except (MeshError, TimeoutError) as error:
                pause_s *= RETRY_SHARE
                self._note_ledger(False, detail=error.detail if isinstance(error, MeshError) else "no answer in time")
            else:
                self._note_ledger(True)

    def _note_ledger(self, has_ledger: bool, **facts: str) -> None:
        """Bid no more when the ledger does not answer, and again when it does."""
        if has_ledger is not self._has_ledger:
            self._has_ledger = has_ledger
            self._bid_wanted.set()
            (log.info if has_ledger else log.warning)("ledger_answers" if has_ledger else "heartbeat_failed", **facts)

    async def _renew(self) -> None:
        """Renew every lease in one call and obey what the ledger says.

        Raises: MeshError when the ledger did not answer.
        """
        held = dict(self._running)
        sent_at_s = time.monotonic()
        reply = await self._ledger.heartbeat(
            Heartbeat(
                node_id=self.node_id,
                leases=[LeaseRef(intent_id=key, epoch=value.attempt.claim.epoch) for key, value in held.items()],
                free_slots=self.free_slots,
                is_draining=self._drain_wanted.is_set(),
            )
        )
        renewed = set(reply.renewed)
        for intent_id, running in held.items():
            if intent_id in renewed:
                running.lease.renew(sent_at_s)
            elif self._running.get(intent_id) is running and not running.is_settling:
                log.warning("stale_lease", intent_id=intent_id, epoch=running.attempt.claim.epoch)
                running.attempt.stop(Cause.LEASE_LOST)
        for order in reply.cancel:
            if order.intent_id in held:
                held[order.intent_id].attempt.stop(order.cause)
        if reply.drain and not self._drain_wanted.is_set():
            log.info("drain_requested_by_operator")
            self.drain()
        if not reply.is_known:
            self._is_registered = False

    async def _lease_guard_loop(self) -> None:
        """Kill the worker of every lease that could not be renewed in time, whatever the network does."""
        while True:
            await asyncio.sleep(min(0.5, self._lease_ttl_s / 20))
            now_s = time.monotonic()
            for intent_id, running in self._running.items():
                if running.lease.is_over(now_s) and running.attempt.stop_cause is None:
                    log.warning("lease_not_renewed", intent_id=intent_id)
                    running.attempt.stop(Cause.LEASE_LOST)

    # ---- finding work

    async def _bid_loop(self) -> None:
        """Keep standing bids in the book; every freed slot bids at once and may be handed pending intents."""
        if self._backplane is None:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        interval_s = renew_interval_s(self._lease_ttl_s)
        while True:
            self._bid_wanted.clear()
            if not self._drain_wanted.is_set():
                try:
                    awards = await self._backplane.place_bids(
                        self.node_id,
                        self.free_slots if self._has_ledger else 0,
                        make_bids(self.node_id, self._snapshot(), self._shelf.templates()),
                        ttl_s=interval_s * BID_TTL_IN_INTERVALS,
                    )
                except MeshError as error:
                    log.debug("bid_failed", detail=error.detail)
                else:
                    await self._take_all(awards)
            await _wait(self._bid_wanted, interval_s)

    def _snapshot(self) -> NodeSnapshot:
        return NodeSnapshot(
            slots=self.settings.node_slots,
            free_slots=self.free_slots,
            memory_share=memory_used_share(),
            warm=self._shelf.warm(),
            recent_failures=self._failures.recent(),
        )

    async def _wake_loop(self) -> None:
        """Receive awards, and wakes that mean: ask the ledger now."""
        if self._backplane is None:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        while True:
            try:
                wakes = await self._backplane.next_wakes(self.node_id, timeout_s=WAKE_BLOCK_S)
            except MeshError:
                await asyncio.sleep(self.settings.node_poll_interval_s)
                continue
            await self._take_all([wake for wake in wakes if isinstance(wake, Award)])
            if any(isinstance(wake, Notice) for wake in wakes):
                self._heartbeat_wanted.set()

    async def _poll_loop(self) -> None:
        """Ask the ledger for work: often while Redis is away, rarely while it is there."""
        while True:
            is_up = self._backplane is not None and self._backplane.is_up
            await asyncio.sleep(
                self.settings.node_poll_idle_interval_s if is_up else self.settings.node_poll_interval_s
            )
            if self.free_slots == 0:
                continue
            names = [template.name for template in self._shelf.templates()]
            try:
                found = await self._ledger.claimable(self.node_id, names, self.free_slots)
            except MeshError as error:
                log.debug("poll_failed", code=error.code)
                continue
            for announcement in found.intents:
                if self._can_afford(announcement):
                    self._begin(announcement.intent_id, announcement.capability, None)

    def _can_afford(self, announcement: Announcement) -> bool:
        slot = self._shelf.get(announcement.capability)
        if slot is None or self.free_slots == 0:
            return False
        parts = price(self._snapshot(), slot.folder.template)
        return announcement.budget is None or parts.total <= announcement.budget

    async def _take_all(self, awards: list[Award]) -> None:
        """Begin what fits before anything is awaited, so that no bid offers a slot twice; give the rest back."""
        for award in [award for award in awards if not self._take(award)]:
            log.info("award_declined", intent_id=award.intent_id, capability=award.capability)
            await self._decline(award)

    async def _decline(self, award: Award) -> None:
        assert self._backplane is not None, "only a backplane awards"
        with contextlib.suppress(MeshError):
            await self._backplane.decline(award, exclude_s=DECLINE_EXCLUDES_S)

    def _take(self, award: Award) -> bool:
        if award.intent_id in self._running:
            self._next_awards[award.intent_id] = award
            return True
        if self.free_slots == 0 or not self._has_ledger or self._shelf.get(award.capability) is None:
            return False
        self._begin(award.intent_id, award.capability, award)
        return True

    def _begin(self, intent_id: str, capability: str, award: Award | None) -> None:
        if intent_id in self._running or intent_id in self._claiming:
            return
        self._claiming.add(intent_id)
        self._idle.clear()
        self._spawn(self._serve(intent_id, capability, award))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The lease runs out, and the intent is tried again; the node's other work goes on.
            log.error("serving_broke", exc_info=error)

    # ---- one intent

    async def _serve(self, intent_id: str, capability: str, award: Award | None) -> None:
        try:
            slot = self._shelf.get(capability)
            if slot is None:
                return
            with slot.in_use() as zygote:  # from before the claim on: a newer version must not end it in between
                running = await self._claim(intent_id, slot, award)
                if running is None:
                    return
                outcome = await running.attempt.run(zygote)
            if isinstance(outcome, FailAttempt):
                self._failures.add(capability, outcome.cause)
            running.is_settling = True
            if running.attempt.stop_cause is not Cause.LEASE_LOST:
                await settle(self._ledger, running.attempt.claim, outcome)
        finally:
            self._claiming.discard(intent_id)
            self._running.pop(intent_id, None)
            self._bid_wanted.set()
            if (again := self._next_awards.pop(intent_id, None)) is not None:
                self._spawn(self._take_all([again]))
            if not self._running and not self._claiming:
                self._idle.set()

    async def _claim(self, intent_id: str, slot: Slot, award: Award | None) -> _Running | None:
        """Claim an intent; None when it is not to be had.

        A claim that got no answer may have been made: it is asked for again, else its lease would have to run out.
        """
        sent_at_s = time.monotonic()
        try:
            async for retry in until_accepted(patience_s=self._lease_ttl_s / 2):
                with retry:
                    is_repeat = retry.retry_state.attempt_number > 1
                    request = ClaimRequest(node_id=self.node_id, award=award, is_repeat=is_repeat)
                    claim = await self._ledger.claim(intent_id, request)
        except MeshError as error:
            if error.code not in (ErrorCode.NOT_CLAIMABLE, ErrorCode.NOT_FOUND):
                log.warning("claim_failed", intent_id=intent_id, code=error.code, detail=error.detail)
                if award is not None:
                    await self._decline(award)
            return None
        attempt = Attempt(claim, slot.folder, ledger=self._ledger, broker=self._broker, node_id=self.node_id)
        lease = Lease(claim.lease_ttl_s, self.settings.lease_margin_s, sent_at_s)
        running = self._running[intent_id] = _Running(attempt, lease)
        self._claiming.discard(intent_id)
        if self._is_handing_back:
            attempt.stop(Cause.NODE_DRAINED)
        return running

    async def _reload_loop(self) -> None:
        while True:
            await asyncio.sleep(self.settings.capabilities_reload_s)
            try:
                if await self._shelf.refresh():
                    self._is_registered = False
                    self._heartbeat_wanted.set()
                    self._bid_wanted.set()
            except OSError as error:
                log.warning("capabilities_unreadable", detail=str(error))


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Return whether the event came in time. (`asyncio.wait_for` of Python 3.11 can lose a cancellation.)"""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
