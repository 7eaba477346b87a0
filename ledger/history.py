"""A thread's stored messages as the units that ranking weighs and a budget keeps or drops whole.

Must never separate a tool call from its results: a model refuses one without the other. No I/O.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mesh.contract.messages import ContextMessage

# The embedding model reads 256 word pieces and was trained on half of that: about 800 characters of prose.
CHUNK_CHARS = 800
# A very long message is cut into longer chunks instead of more; the embedder reads those in windows.
CHUNKS_MAX = 256
# Names how a message's text becomes chunks; vectors of another recipe are never compared.
RECIPE = "speaker-date-800"
_SENTENCE_ENDS = (". ", "! ", "? ", "\n", "。", "！", "？")


@dataclass(frozen=True, slots=True)
class HistoryMessage:
    """One stored message. Units: `tokens` is what it costs in a context (o200k)."""

    message_id: str
    turn_number: int
    position: int
    role: str
    content: str
    at_ms: int
    tokens: int
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands in the thread."""
        return self.turn_number, self.position

    @property
    def heading(self) -> str:
        """Who spoke and on which day: part of what is searched, worth several points of recall and free."""
        moment = datetime.fromtimestamp(self.at_ms / 1000, UTC)
        day = f"{moment.day} {moment:%B %Y}"
        return f"{self.name} ({day})" if self.name else day

    @property
    def body(self) -> str:
        """What was said, and which tools were called with what."""
        called = " ".join(str(call.get("function", call)) for call in self.tool_calls or ())
        return f"{self.content} {called}".strip()

    @property
    def indexed_text(self) -> str:
        """What full-text ranking reads."""
        return f"{self.heading}: {self.body}"

    def as_context(self) -> ContextMessage:
        """The message as a worker gets it."""
        return ContextMessage(
            role=self.role,
            content=self.content,
            name=self.name,
            tool_calls=self.tool_calls,
            tool_call_id=self.tool_call_id,
        )


@dataclass(frozen=True, slots=True)
class Unit:
    """What is kept or dropped as a whole: a message, or a tool call with all its results."""

    messages: tuple[HistoryMessage, ...]

    @property
    def turn_number(self) -> int:
        """The turn that it belongs to."""
        return self.messages[0].turn_number

    @property
    def tokens(self) -> int:
        """What it costs in a context."""
        return sum(message.tokens for message in self.messages)


def units_of(messages: Iterable[HistoryMessage]) -> list[Unit]:
    """Group messages, given in time order, into units: results join the call before them in the same turn."""
    groups: list[list[HistoryMessage]] = []
    for message in messages:
        head = groups[-1][0] if groups else None
        is_result = message.role == "tool" and head is not None and head.turn_number == message.turn_number
        if is_result and head is not None and (head.tool_calls or head.role == "tool"):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [Unit(tuple(group)) for group in groups]


def split_text(text: str, chars_max: int) -> list[str]:
    """Cut `text` into parts of at most `chars_max`, at a sentence's end or else between words where there is one."""
    parts, start = [], 0
    while len(text) - start > chars_max:
        window = text[start : start + chars_max]
        end = max(window.rfind(stop) for stop in _SENTENCE_ENDS) + 1
        if end < chars_max // 2:
            end = window.rfind(" ") + 1
        if end < chars_max // 2:
            end = chars_max
        parts.append(text[start : start + end])
        start += end
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def chunks_of(message: HistoryMessage) -> list[str]:
    """Return the texts to embed for one message, each with its heading; none for an empty message."""
    body = message.body
    chars_max = max(CHUNK_CHARS, -(-2 * len(body) // CHUNKS_MAX))
    return [f"{message.heading}: {part}" for part in split_text(body, chars_max)]
