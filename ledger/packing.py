"""What goes into a context within a token budget, and in which order. Pure.

Must never exceed the budget, never change a pin's words, never part a tool call from its results, and never cut without a
visible mark.

Rule, in order of right: pins; summary and notes up to their shares; the newest exchange, cut where it exceeds its share;
the last turns, newest first, as far as their share reaches; older units by score, skipping what does not fit; what is
left over lengthens the newest exchange again. Printed: pins, summary, notes, then history in time order.
Hard case: when everything fits, everything is in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ledger.context_settings import ContextSettings
from ledger.history import Unit
from ledger.tokens import MESSAGE_OVERHEAD_TOKENS, message_tokens, truncate_to_tokens
from mesh.contract.messages import ContextMessage
from mesh.contract.template import ContextShare

Source = Literal["pin", "summary", "note", "older", "recent"]

RECENT = "one of the last turns"
NEWEST = "newest exchange"
NEWEST_CUT = "newest exchange, cut to its share"
CHOSEN = "chosen by score"
ALL_FIT = "everything fits"
NO_ROOM = "does not fit into what is left"
TURNS_REACHED = "older_turns reached"


@dataclass(frozen=True)
class Prelude:
    """What stands before the history: facts word for word, what was compacted, notes."""

    pins: Sequence[ContextMessage] = ()
    summary: ContextMessage | None = None
    notes: ContextMessage | None = None


@dataclass(frozen=True)
class PackedMessage:
    """One message of a context and where it came from.

    `turn_number` and `unit` (its place in the corpus) are None before the history.
    """

    message: ContextMessage
    source: Source
    tokens: int
    turn_number: int | None = None
    unit: int | None = None


@dataclass(frozen=True)
class Packed:
    """A finished context. `reasons` says for each unit why it is in or out; `included` holds those that are in."""

    messages: list[PackedMessage]
    tokens: int
    included: frozenset[int]
    reasons: list[str]
    pins_left_out: int = 0


def _cut(message: ContextMessage, tokens_max: int) -> tuple[ContextMessage, int] | None:
    """Return the message and its cost, cut to `tokens_max` with a mark; None when nothing of it fits."""
    cost = message_tokens(message.content, message.name, message.tool_calls)
    if cost <= tokens_max:
        return message, cost
    prefix = f"{message.name}: " if message.name else ""
    text = truncate_to_tokens(prefix + message.content, tokens_max - MESSAGE_OVERHEAD_TOKENS)
    content = text.removeprefix(prefix)
    if message.tool_calls or not text.startswith(prefix) or not content:
        return None
    return message.model_copy(update={"content": content}), message_tokens(content, message.name)


@dataclass
class _Packer:
    """The state of one packing: what is taken so far."""

    units: Sequence[Unit]
    share: ContextShare
    settings: ContextSettings
    left: int
    head: list[PackedMessage] = field(default_factory=list)
    body: dict[int, list[PackedMessage]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    recent_turns: frozenset[int] = frozenset()
    pins_left_out: int = 0

    def __post_init__(self) -> None:
        turns = sorted({unit.turn_number for unit in self.units})
        self.recent_turns = frozenset(turns[-self.share.recent_turns :] if self.share.recent_turns else ())

    def share_of(self, part: float) -> int:
        return min(self.left, int(self.share.max_tokens * part))

    def take_prelude(self, prelude: Prelude) -> None:
        for pin in prelude.pins:
            cost = message_tokens(pin.content, pin.name)
            if cost <= self.left:
                self.head.append(PackedMessage(pin, "pin", cost))
                self.left -= cost
            else:
                self.pins_left_out += 1
        parts: tuple[tuple[ContextMessage | None, Source, float], ...] = (
            (prelude.summary, "summary", self.settings.summary_share),
            (prelude.notes, "note", self.settings.notes_share),
        )
        for message, source, part in parts:
            if message is not None and (cut := _cut(message, self.share_of(part))):
                self.head.append(PackedMessage(cut[0], source, cut[1]))
                self.left -= cut[1]

    def source_of(self, unit: Unit) -> Source:
        return "recent" if unit.turn_number in self.recent_turns else "older"

    def take(self, index: int, reason: str) -> None:
        """Take a unit whole; the caller has seen that it fits."""
        unit = self.units[index]
        self.body[index] = [
            PackedMessage(message.as_context(), self.source_of(unit), message.tokens, unit.turn_number, index)
            for message in unit.messages
        ]
        self.reasons[index] = reason
        self.left -= unit.tokens

    def take_newest(self, places: Sequence[int], allowance: int) -> None:
        """Take the newest turn's units within `allowance`, short ones first so that only the long are cut."""
        for done, index in enumerate(sorted(places, key=lambda index: self.units[index].tokens)):
            unit = self.units[index]
            if unit.tokens <= allowance:
                self.take(index, NEWEST)
                allowance -= unit.tokens
            elif len(unit.messages) == 1 and (
                cut := _cut(unit.messages[0].as_context(), allowance // (len(places) - done))
            ):
                self.body[index] = [PackedMessage(cut[0], "recent", cut[1], unit.turn_number, index)]
                self.reasons[index] = NEWEST_CUT
                self.left -= cut[1]
                allowance -= cut[1]

    def lengthen_newest(self) -> None:
        """Give what is left over to the units that were cut."""
        places = [index for index, reason in self.reasons.items() if reason == NEWEST_CUT]
        for index in places:
            self.left += sum(message.tokens for message in self.body.pop(index))
        self.take_newest(places, self.left)

    def take_recent(self, allowance: int) -> None:
        """Take units of the last turns, newest first, until one does not fit into `allowance`."""
        for index in range(len(self.units) - 1, -1, -1):
            unit = self.units[index]
            if index in self.body:
                continue
            if unit.turn_number not in self.recent_turns or unit.tokens > min(allowance, self.left):
                return
            self.take(index, RECENT)
            allowance -= unit.tokens

    def take_older(self, order: Sequence[int]) -> None:
        """Take units by score, skipping what does not fit, from no more than the allowed number of older turns."""
        turns: set[int] = set()
        for index in order:
            unit = self.units[index]
            if index in self.body:
                continue
            is_recent = unit.turn_number in self.recent_turns
            if unit.tokens > self.left:
                self.reasons[index] = NO_ROOM
            elif not is_recent and unit.turn_number not in turns and len(turns) >= self.share.older_turns:
                self.reasons[index] = TURNS_REACHED
            else:
                self.take(index, RECENT if is_recent else CHOSEN)
                if not is_recent:
                    turns.add(unit.turn_number)


def pack(
    units: Sequence[Unit], order: Sequence[int], prelude: Prelude, share: ContextShare, settings: ContextSettings
) -> Packed:
    """Fill a budget of `share.max_tokens`. `units` stand in time order; `order` lists their places, best first."""
    packer = _Packer(units, share, settings, left=share.max_tokens)
    packer.take_prelude(prelude)
    older_turns = {unit.turn_number for unit in units} - packer.recent_turns
    if sum(unit.tokens for unit in units) <= packer.left and len(older_turns) <= share.older_turns:
        for index in range(len(units)):
            packer.take(index, ALL_FIT)
    elif units:
        if packer.recent_turns:
            newest = units[-1].turn_number
            left_before = packer.left
            places = [index for index, unit in enumerate(units) if unit.turn_number == newest]
            packer.take_newest(places, packer.share_of(settings.newest_share))
            packer.take_recent(int(share.max_tokens * settings.recent_share) - (left_before - packer.left))
        packer.take_older(order)
        packer.lengthen_newest()
    messages = packer.head + [message for index in sorted(packer.body) for message in packer.body[index]]
    return Packed(
        messages=messages,
        tokens=sum(message.tokens for message in messages),
        included=frozenset(packer.body),
        reasons=[packer.reasons.get(index, NO_ROOM) for index in range(len(units))],
        pins_left_out=packer.pins_left_out,
    )
