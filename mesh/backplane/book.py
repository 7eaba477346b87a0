"""The book of standing bids and waiting intents: Python's face over lua/*.lua.

Each method is one atomic step and one round trip. Must never decide anything: the scripts do, and
mesh.bidding says what they must decide. Raises redis-py's errors; `Backplane` maps them.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from mesh.backplane.keys import Keys
from mesh.contract.messages import Announcement, Award, Bid, Loser, PriceParts

START = "0-0"
_STEPS = ("announce", "bid", "decline", "forget", "withdraw")
# The rank puts the higher priority first, then the older intent; exact in a double up to the year 2286.
_RANK_OF_PRIORITY = 10**13


class Script(NamedTuple):
    """A step's text, and the digest by which the server knows it."""

    text: str
    digest: str


class BidReply(NamedTuple):
    """What a node gets for its bids. `number` confirms the reply with the next bid."""

    number: int
    awards: list[Award]


@cache
def scripts() -> dict[str, Script]:
    """Return every step by name, each with the shared part in front."""
    folder = files("mesh.backplane") / "lua"
    shared = (folder / "book.lua").read_text("utf-8")
    loaded = {}
    for name in _STEPS:
        text = shared + (folder / f"{name}.lua").read_text("utf-8")
        loaded[name] = Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
    return loaded


def rank(priority: int, accepted_at_ms: int) -> int:
    """Return the place in the queue: less goes first."""
    return accepted_at_ms - priority * _RANK_OF_PRIORITY


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _exact(number: float, what: str) -> str:
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}: only finite numbers can be compared")
    return repr(float(number))


def _record(intent: Announcement) -> str:
    return _compact(
        [
            intent.tenant_id,
            _exact(intent.tenant_weight, "tenant_weight"),
            intent.intent_id,
            intent.thread_id,
            intent.capability,
            str(rank(intent.priority, intent.accepted_at_ms)),
            "inf" if intent.budget is None else _exact(intent.budget, "budget"),
            str(intent.attempt),
        ]
    )


def _offer(bid: Bid) -> str:
    affine = bid.parts_with_affinity
    return _compact(
        [
            _exact(bid.parts.total, "price"),
            bid.parts.model_dump_json(),
            _exact(affine.total, "price"),
            affine.model_dump_json(),
        ]
    )


def read_award(text: str) -> Award:
    """Return the award that a script wrote."""
    tenant_id, intent_id, thread_id, capability, node_id, price, parts, losers, awarded_at_ms = json.loads(text)
    return Award(
        tenant_id=tenant_id,
        intent_id=intent_id,
        thread_id=thread_id,
        capability=capability,
        node_id=node_id,
        price=float(price),
        parts=PriceParts.model_validate_json(parts),
        # An empty list leaves Lua as an empty object.
        losers=[Loser(node_id=loser, price=float(asked), reason=reason) for loser, asked, reason in losers or []],
        awarded_at_ms=int(awarded_at_ms),
    )


class Book:
    """The book of one mesh."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._root = keys.root

    async def load(self) -> None:
        """Give the server every script. A server forgets them when it restarts or fails over."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for script in scripts().values():
                pipe.script_load(script.text)
            await pipe.execute()

    async def announce(self, announcements: Sequence[Announcement]) -> list[str]:
        """Returns: for each awarded, pending, duplicate or refused."""
        return await self._run("announce", [[_record(intent)] for intent in announcements])

    async def forget(self, announcements: Sequence[Announcement]) -> None:
        """Take intents out of the book."""
        await self._run("forget", [[_record(intent)] for intent in announcements])

    async def bid(
        self, node_id: str, free_slots: int, bids: Sequence[Bid], *, ttl_s: float, cursor: str, confirmed: int
    ) -> BidReply:
        """Replace the node's bids.

        Args:
            cursor: id of the last wake that was read from the node's stream.
            confirmed: number of the last reply to this method that arrived.
        """
        offers = [part for bid in bids for part in (bid.capability, _offer(bid))]
        arguments = [node_id, str(free_slots), str(max(1, round(ttl_s * 1000))), cursor, str(confirmed), *offers]
        ((number, *awards),) = await self._run("bid", [arguments])
        return BidReply(int(number), [read_award(text) for text in awards])

    async def decline(self, award: Award, *, exclude_s: float) -> str:
        """Returns: awarded, pending, refused, or unknown when the award was too old to take back."""
        last = f"{award.thread_id} {award.tenant_id}"
        (status,) = await self._run("decline", [[award.node_id, award.intent_id, str(round(exclude_s * 1000)), last]])
        return str(status)

    async def withdraw(self, node_id: str, *, cursor: str, confirmed: int) -> int:
        """Returns: how many awards that had not arrived went to others."""
        (count,) = await self._run("withdraw", [[node_id, cursor, str(confirmed)]])
        return int(count)

    async def _run(self, step: str, calls: Sequence[Sequence[str]]) -> list[Any]:
        """Run a step once for each list of arguments, in one round trip (two when the server lost its scripts)."""
        digest = scripts()[step].digest
        if not calls:
            return []
        try:
            return await self._send(digest, calls)
        except NoScriptError:
            # Some calls of a pipeline may have run: each step may be repeated harmlessly.
            await self.load()
            return await self._send(digest, calls)

    async def _send(self, digest: str, calls: Sequence[Sequence[str]]) -> list[Any]:
        if len(calls) == 1:
            return [await self._redis.evalsha(digest, 1, self._root, *calls[0])]
        async with self._redis.pipeline(transaction=False) as pipe:
            for arguments in calls:
                pipe.evalsha(digest, 1, self._root, *arguments)
            return await pipe.execute()
