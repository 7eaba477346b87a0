"""Which older messages matter to a new one: named scores over a thread's units. Pure: numbers in, numbers out.

Must never read a clock, a file or a model: vectors and terms are handed in.

Algorithm. Intuition: shared words find names and rare things, embeddings find the rest; both are turned into z-scores
within the thread, because ranks throw away how far ahead the best is. Rule: score = semantic + lexical, plus a share of
the neighbours' scores within a session (an answer often follows the message that holds the question's words), minus
ln(tokens / median), so that the budget buys value for each token. Hard cases: a unit without vectors yet is neither
favoured nor punished (z = 0); a long message scores by its best chunk.
Source: Robertson & Zaragoza, The Probabilistic Relevance Framework (2009), for BM25; the sum of z-scores, the neighbours
and the length term by measurement on public long-conversation sets.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ledger.context_settings import ContextSettings
from ledger.history import HistoryMessage, Unit, units_of
from ledger.words import counted_terms

Floats = NDArray[np.float64]
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Query:
    """The new message. `vectors`: unit length, float32[chunks, dimension], or None without embeddings."""

    terms: Mapping[str, int]
    vectors: Vectors | None = None


class Corpus:
    """A thread's units with what ranking needs of each. Never changes once made, so it may be shared and cached."""

    def __init__(
        self,
        messages: Sequence[HistoryMessage],
        terms: Mapping[str, Counter[str]],
        vectors: Mapping[str, Vectors],
    ) -> None:
        """Take messages in time order; `terms` and `vectors` (float32[chunks, dimension]) go by message id."""
        self.units: list[Unit] = units_of(messages)
        self.terms = [_terms_of_unit(unit, terms) for unit in self.units]
        self.tokens = np.array([unit.tokens for unit in self.units], dtype=np.float64)
        owned = [
            (index, vectors[message.message_id])
            for index, unit in enumerate(self.units)
            for message in unit.messages
            if message.message_id in vectors and len(vectors[message.message_id])
        ]
        self.chunk_owners = np.array([index for index, rows in owned for _ in rows], dtype=np.intp)
        self.chunk_vectors: Vectors | None = np.concatenate([rows for _, rows in owned]) if owned else None
        self.is_indexed = [all(message.message_id in vectors for message in unit.messages) for unit in self.units]

    def __repr__(self) -> str:
        return f"Corpus({len(self.units)} units, {len(self.chunk_owners)} chunks)"

    @cached_property
    def document_counts(self) -> Counter[str]:
        """In how many units each term stands."""
        return Counter(term for terms in self.terms for term in terms)

    @cached_property
    def lengths(self) -> Floats:
        """Terms of each unit."""
        return np.array([terms.total() for terms in self.terms], dtype=np.float64)

    def sessions(self, gap_s: int) -> NDArray[np.intp]:
        """Number each unit's session: a pause of `gap_s` begins the next."""
        at_ms = np.array([unit.messages[0].at_ms for unit in self.units], dtype=np.int64)
        return np.concatenate([[0], np.cumsum(np.diff(at_ms) >= gap_s * 1000)]).astype(np.intp)


@dataclass(frozen=True)
class Match:
    """One query held against one corpus; what several parts need is made once."""

    corpus: Corpus
    query: Query

    @cached_property
    def similarity(self) -> Floats:
        """Cosine of the closest pair of chunks, -1 to 1; NaN for a unit without vectors, or without a model."""
        best = np.full(len(self.corpus.units), -np.inf)
        if self.query.vectors is not None and self.corpus.chunk_vectors is not None:
            likeness = (self.corpus.chunk_vectors @ self.query.vectors.T).max(axis=1)
            np.maximum.at(best, self.corpus.chunk_owners, likeness)
        return np.where(np.isfinite(best), best, np.nan)


@dataclass(frozen=True)
class Ranking:
    """The scores of each unit: `total` is the sum of `parts`, higher is better.

    `similarity` is no score but an absolute measure: a reader can tell from it whether anything fits at all.
    """

    parts: dict[str, Floats]
    total: Floats
    similarity: Floats

    @property
    def relevance(self) -> Floats:
        """How much each unit itself has to do with the query: without its neighbours' share and the price of its length."""
        own = [part for name, part in self.parts.items() if name in PARTS]
        return np.sum(own, axis=0) if own else self.total

    def order(self) -> list[int]:
        """Return the units' places, best first; of equals the newer first."""
        return sorted(range(len(self.total)), key=lambda index: (-self.total[index], -index))


def _terms_of_unit(unit: Unit, terms: Mapping[str, Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for message in unit.messages:
        total.update(terms.get(message.message_id) or counted_terms(message.indexed_text))
    return total


def z_scores(values: Floats, known: NDArray[np.bool_] | None = None) -> Floats:
    """Return how many standard deviations each value lies above the mean; 0 where unknown or where all are alike."""
    known = np.ones(len(values), dtype=np.bool_) if known is None else known
    scores = np.zeros(len(values))
    if known.any() and (deviation := float(values[known].std())) > 1e-9:
        scores[known] = (values[known] - values[known].mean()) / deviation
    return scores


def _semantic(match: Match, settings: ContextSettings) -> Floats:
    """How near the meanings are."""
    return settings.semantic_weight * z_scores(match.similarity, np.isfinite(match.similarity))


def _lexical(match: Match, settings: ContextSettings) -> Floats:
    """BM25 with the speaker's name in the text."""
    corpus, query = match.corpus, match.query
    count, scores = len(corpus.units), np.zeros(len(corpus.units))
    mean_length = max(1.0, float(corpus.lengths.mean()))
    k1, b = settings.bm25_saturation, settings.bm25_length
    norms = k1 * (1 - b + b * corpus.lengths / mean_length)
    for term, repeats in query.terms.items():
        held_by = corpus.document_counts.get(term, 0)
        if not held_by:
            continue
        frequency = np.array([terms.get(term, 0) for terms in corpus.terms], dtype=np.float64)
        rarity = math.log(1 + (count - held_by + 0.5) / (held_by + 0.5))
        scores += min(repeats, 3) * rarity * frequency * (k1 + 1) / (frequency + norms)
    return settings.lexical_weight * z_scores(scores)


Part = Callable[[Match, ContextSettings], Floats]
# What a unit is worth by itself. A new kind of evidence is a new line here.
PARTS: dict[str, Part] = {"semantic": _semantic, "lexical": _lexical}


def _neighbours(scores: Floats, sessions: NDArray[np.intp], settings: ContextSettings) -> Floats:
    total = np.zeros(len(scores))
    for distance, share in ((1, settings.neighbour_share), (2, settings.second_neighbour_share)):
        is_same = sessions[distance:] == sessions[:-distance]
        total[:-distance] += share * np.where(is_same, scores[distance:], 0.0)
        total[distance:] += share * np.where(is_same, scores[:-distance], 0.0)
    return total


def rank(corpus: Corpus, query: Query, settings: ContextSettings) -> Ranking:
    """Score every unit of the corpus for the query."""
    if not corpus.units:
        return Ranking({}, np.zeros(0), np.zeros(0))
    match = Match(corpus, query)
    parts = {name: part(match, settings) for name, part in PARTS.items()}
    relevance = np.sum(list(parts.values()), axis=0)
    parts["neighbours"] = _neighbours(relevance, corpus.sessions(settings.session_gap_s), settings)
    median = max(1.0, float(np.median(corpus.tokens)))
    parts["length"] = -settings.length_weight * np.log(np.maximum(corpus.tokens, 1.0) / median)
    return Ranking(parts, np.sum(list(parts.values()), axis=0), match.similarity)


def rank_by_recency(corpus: Corpus) -> Ranking:
    """Score units when there is nothing to compare them with: the newer the better."""
    newness = np.arange(len(corpus.units), dtype=np.float64)
    return Ranking({"recency": newness}, newness, np.full(len(newness), np.nan))
