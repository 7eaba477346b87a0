"""Stored messages for tests of ranking and packing, made from a few words."""

from collections.abc import Mapping
from typing import Any

from ledger.history import HistoryMessage
from ledger.ranking import Corpus, Vectors
from ledger.tokens import message_tokens
from ledger.words import counted_terms

MINUTE_MS = 60_000


def message(
    turn_number: int,
    content: str,
    *,
    role: str = "user",
    name: str | None = None,
    position: int = 0,
    at_ms: int | None = None,
    tool_calls: list[dict[str, Any]] | None = None,
    tool_call_id: str | None = None,
) -> HistoryMessage:
    """Return one message; turns follow each other by a minute unless told otherwise."""
    return HistoryMessage(
        message_id=f"m{turn_number}.{position}",
        turn_number=turn_number,
        position=position,
        role=role,
        content=content,
        at_ms=turn_number * MINUTE_MS if at_ms is None else at_ms,
        tokens=message_tokens(content, name, tool_calls),
        name=name,
        tool_calls=tool_calls,
        tool_call_id=tool_call_id,
    )


def exchange(turn_number: int, question: str, answer: str) -> list[HistoryMessage]:
    """Return a user's message and the assistant's answer."""
    return [message(turn_number, question), message(turn_number, answer, role="assistant", position=1)]


def corpus(messages: list[HistoryMessage], vectors: Mapping[str, Vectors] | None = None) -> Corpus:
    """Return the corpus of these messages."""
    terms = {each.message_id: counted_terms(each.indexed_text) for each in messages}
    return Corpus(messages, terms, vectors or {})
