"""Builds the context of a thread's next turn: what is pinned, summed up, noted, and the turns that matter to it.

Must never exceed the budget, never show another tenant's words, and never wait for the embedder longer than a moment:
without it the context is ranked by words alone and the receipt says so.
The current message is no part of it: it travels in the intent's payload.
"""

import asyncio
import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ledger.context_settings import ContextSettings
from ledger.history import CHUNK_CHARS, split_text
from ledger.packing import Packed, Prelude, pack
from ledger.ranking import Corpus, Query, Ranking, Vectors, rank, rank_by_recency
from ledger.store import Store
from ledger.thread_reader import ThreadFacts, ThreadReader
from ledger.tokens import COUNTING, count_tokens
from mesh.contract import canonical_json
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.messages import ContextMessage
from mesh.contract.ports import Embedder
from mesh.contract.template import ContextShare

OLDER_TURNS_MAX = 1000
_QUERIES_KEPT = 256
_QUERY_CHARS_MAX = 16_000
_QUERY_CHUNKS_MAX = 4


@dataclass(frozen=True)
class BuiltContext:
    """A context in the order in which a worker gets it, and the receipt that explains it."""

    messages: list[ContextMessage]
    receipt: dict[str, Any]


def open_share(max_tokens: int) -> ContextShare:
    """Return the share of a caller who names only a budget: three recent turns, older ones as far as it reaches."""
    return ContextShare(max_tokens=max_tokens, recent_turns=3, older_turns=OLDER_TURNS_MAX)


class ContextService:
    """The one place where contexts are made. Safe to call concurrently."""

    def __init__(self, store: Store, embedder: Embedder | None, settings: ContextSettings | None = None) -> None:
        self._reader = ThreadReader(store)
        self._queries = _QueryVectors(embedder) if embedder else None
        self._settings = settings or ContextSettings()

    async def build(self, tenant_id: str, thread_id: str, *, query: str | None, share: ContextShare) -> BuiltContext:
        """Build the context for a message `query`; without one, the newest turns that fit.

        Raises: MeshError `not_found` when the tenant has no such thread; what the store raises.
        """
        return await self._build(tenant_id, thread_id, query, share, self._settings)

    async def explain(
        self,
        tenant_id: str,
        thread_id: str,
        *,
        query: str | None,
        share: ContextShare,
        settings: Mapping[str, Any] | None = None,
    ) -> BuiltContext:
        """Build the context that other settings would give; `settings` overrides fields of ContextSettings.

        Raises: MeshError `invalid_request` with the field for a setting that does not exist or is out of range.
        """
        return await self._build(tenant_id, thread_id, query, share, self._overridden(settings or {}))

    def prepare(self, query: str) -> None:
        """Begin to embed a query that a claim will soon ask for. Never raises, never waits."""
        if self._queries and (text := query.strip()):
            self._queries.begin(text)

    def forget(self, tenant_id: str, thread_id: str) -> None:
        """Drop what memory holds of an erased thread."""
        self._reader.forget(tenant_id, thread_id)

    async def close(self) -> None:
        """Stop what runs in the background."""
        if self._queries:
            await self._queries.close()

    def _overridden(self, settings: Mapping[str, Any]) -> ContextSettings:
        try:
            return ContextSettings.model_validate(self._settings.model_dump() | dict(settings))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(["settings", *map(str, first["loc"])])
            known = ", ".join(ContextSettings.model_fields)
            raise MeshError(
                ErrorCode.INVALID_REQUEST, f"{field}: {first['msg']}", field=field, hint=f"settings are: {known}"
            ) from error

    async def _build(
        self, tenant_id: str, thread_id: str, query: str | None, share: ContextShare, settings: ContextSettings
    ) -> BuiltContext:
        text = (query or "").strip()
        model_id = self._queries.model_id if self._queries else None
        if self._queries and text:
            self._queries.begin(text)
        facts, corpus = await self._reader.read(tenant_id, thread_id, model_id=model_id)
        vectors, semantic = None, "off"
        if self._queries and text and corpus.units:
            if model_id:  # a ledger that was never reached has not named its model yet
                vectors = await self._queries.get(text, model_id, timeout_s=settings.query_timeout_s)
            semantic = "unavailable" if vectors is None or corpus.chunk_vectors is None else "used"
        return await asyncio.to_thread(_assemble, facts, corpus, text, vectors, semantic, share, settings)


class _QueryVectors:
    """The vectors of recent queries: made once, also when several callers ask for the same at the same time."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._kept: OrderedDict[str, Vectors] = OrderedDict()
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def model_id(self) -> str:
        return self._embedder.model_id

    @staticmethod
    def _key(text: str, model_id: str) -> str:
        return f"{model_id}\n{text[:_QUERY_CHARS_MAX]}"

    def begin(self, text: str) -> None:
        key = self._key(text, self.model_id)
        if key in self._kept or key in self._running or not self._embedder.is_ready:
            return
        if len(self._running) < _QUERIES_KEPT:
            task = asyncio.create_task(self._embed(key, text))
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))

    async def _embed(self, key: str, text: str) -> None:
        chunks = split_text(text[:_QUERY_CHARS_MAX], CHUNK_CHARS)
        if len(chunks) > _QUERY_CHUNKS_MAX:  # what is asked stands at the start or at the end
            half = _QUERY_CHUNKS_MAX // 2
            chunks = chunks[:half] + chunks[-half:]
        try:
            self._kept[key] = await self._embedder.embed(chunks, timeout_s=10.0)
        except MeshError:
            return  # `get` finds nothing, and the receipt says so
        while len(self._kept) > _QUERIES_KEPT:
            self._kept.popitem(last=False)

    async def get(self, text: str, model_id: str, *, timeout_s: float) -> Vectors | None:
        """Return the vectors of that model, or None when they cannot be had in time."""
        key = self._key(text, model_id)
        self.begin(text)
        if task := self._running.get(key):
            await asyncio.wait([task], timeout=timeout_s)
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    async def close(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _assemble(
    facts: ThreadFacts,
    corpus: Corpus,
    text: str,
    vectors: Vectors | None,
    semantic: str,
    share: ContextShare,
    settings: ContextSettings,
) -> BuiltContext:
    """Rank and pack. Pure, but too slow for the event loop on a long thread."""
    query = Query.of(text[:_QUERY_CHARS_MAX], vectors)
    ranking = rank(corpus, query, settings) if text else rank_by_recency(corpus)
    order = ranking.order()
    packed = pack(corpus.units, order, prelude_of(facts), share, settings)
    messages = [packed_message.message for packed_message in packed.messages]
    receipt = {
        "budget": share.max_tokens,
        "tokens": packed.tokens,
        "counting": COUNTING,
        "semantic": semantic,
        "query_tokens": count_tokens(text),
        "digest": hashlib.sha256(canonical_json.dumps([m.wire() for m in messages]).encode()).hexdigest(),
        "messages": [
            {
                "turn_number": message.turn_number,
                "source": message.source,
                "tokens": message.tokens,
                "similarity": None if message.unit is None else _rounded(ranking.similarity[message.unit]),
                "relevance": None if message.unit is None else _rounded(ranking.relevance[message.unit]),
            }
            for message in packed.messages
        ],
        "pins_left_out": packed.pins_left_out,
        "candidate_count": len(corpus.units),
        "candidates": _candidates(corpus, ranking, order, packed, settings.near_misses),
    }
    return BuiltContext(messages, receipt)


def _candidates(
    corpus: Corpus, ranking: Ranking, order: Sequence[int], packed: Packed, near_misses: int
) -> list[dict[str, Any]]:
    """Return all that is in and the best of what is not, best first."""
    misses = [index for index in order if index not in packed.included][:near_misses]
    shown = packed.included | set(misses)
    return [
        {
            "turn_number": corpus.units[index].turn_number,
            "message_id": corpus.units[index].messages[0].message_id,
            "role": corpus.units[index].messages[0].role,
            "tokens": corpus.units[index].tokens,
            "score": round(float(ranking.total[index]), 3),
            "scores": {name: round(float(part[index]), 3) for name, part in ranking.parts.items()},
            "similarity": _rounded(ranking.similarity[index]),
            "included": index in packed.included,
            "reason": packed.reasons[index],
            "is_indexed": corpus.is_indexed[index],
        }
        for index in order
        if index in shown
    ]


def _rounded(number: float) -> float | None:
    """Return a number as a receipt shows it; None where it is not known."""
    return None if math.isnan(number) else round(float(number), 3)


def prelude_of(facts: ThreadFacts) -> Prelude:
    """Return what stands before the history, as system messages."""
    summary = facts.row["summary"]
    notes = _notes(facts.row)
    return Prelude(
        pins=[ContextMessage(role="system", content=f"Pinned fact ({key}): {text}") for key, text in facts.pins],
        summary=ContextMessage(role="system", content=f"Summary of the conversation so far: {summary}")
        if summary
        else None,
        notes=ContextMessage(role="system", content="Notes on this conversation:\n" + "\n".join(notes))
        if notes
        else None,
    )


def _notes(row: Mapping[str, Any]) -> list[str]:
    lines = []
    if row["url"]:
        lines.append(f"- It takes place at {row['url']}")
    plan = row["last_plan"]
    if plan and _is_open(plan):
        lines.append(f"- Open plan: {canonical_json.dumps(plan)}")
    for call_id, call in (row["last_tool_calls"] or {}).items():
        is_uncertain = isinstance(call, dict) and call.get("status") == "uncertain"
        doubt = " [uncertain: it may or may not have taken effect]" if is_uncertain else ""
        lines.append(f"- Tool call {call_id}{doubt}: {canonical_json.dumps(call)}")
    if row["contextual_memory"]:
        lines.append(f"- To keep in mind: {canonical_json.dumps(row['contextual_memory'])}")
    return lines


def _is_open(plan: Mapping[str, Any]) -> bool:
    """Whether a plan has steps that are not completed; a plan of another shape counts as open."""
    steps, completed = plan.get("steps"), plan.get("completed")
    return not (isinstance(steps, list) and isinstance(completed, list) and len(completed) >= len(steps))
