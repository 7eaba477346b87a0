"""Which older messages matter to a new one: named scores over a thread's units. Pure: numbers in, numbers out.

Must never read a clock, a file or a model: vectors and terms are handed in.

Algorithm. Intuition: shared words find names and rare things, embeddings find the rest, and where a message stands tells
what it is about when its own words do not. Each kind of evidence is a z-score within the thread, because ranks throw away
how far ahead the best is. Rule: score = meaning + words (of the message, of it with those beside it, of its session) + the
session's best three + a share of the neighbours (an answer often follows the message that holds the question's words) +
points for the speaker and the date that the question names - ln(tokens / median), so that the budget buys value for each
token. Hard cases: a unit without vectors yet is neither favoured nor punished (z = 0); a long message scores by its best
chunk; a question that names two speakers favours neither.
Source: Robertson & Zaragoza, The Probabilistic Relevance Framework (2009), for BM25; the sum of z-scores and what stands
around a message by measurement on public long-conversation sets (docs/CONTEXT.md).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ledger.context_settings import ContextSettings
from ledger.dates import DateMention, date_nearness, dates_in
from ledger.history import HistoryMessage, Unit, units_of
from ledger.words import counted_terms, terms_of

Floats = NDArray[np.float64]
Vectors = NDArray[np.float32]
# A word that the query repeats counts no more than so often.
ASKED_TIMES_MAX = 3
# One hit in a session is chance, three are its topic.
SESSION_BEST_COUNT = 3
TINY = 1e-12


@dataclass(frozen=True)
class Query:
    """The new message. `vectors`: unit length, float32[chunks, dimension], or None without embeddings."""

    terms: Mapping[str, int]
    vectors: Vectors | None = None
    dates: tuple[DateMention, ...] = ()

    @classmethod
    def of(cls, text: str, vectors: Vectors | None = None) -> "Query":
        """Read the terms and dates of a message."""
        return cls(counted_terms(text), vectors, dates_in(text))


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
    def lengths(self) -> Floats:
        """Terms of each unit."""
        return np.array([terms.total() for terms in self.terms], dtype=np.float64)

    @cached_property
    def at_ms(self) -> NDArray[np.int64]:
        """When each unit began."""
        return np.array([unit.messages[0].at_ms for unit in self.units], dtype=np.int64)

    @cached_property
    def speakers(self) -> NDArray[np.str_]:
        """Who spoke each unit; "" where nobody is named."""
        return np.array([unit.messages[0].name or "" for unit in self.units], dtype=np.str_)

    def frequencies(self, terms: Iterable[str]) -> Floats:
        """Return how often each term stands in each unit, float64[terms, units]."""
        rows = [[held.get(term, 0) for held in self.terms] for term in terms]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self.units))

    def sessions(self, gap_s: int) -> NDArray[np.intp]:
        """Number each unit's session: a pause of `gap_s` begins the next."""
        return np.concatenate([[0], np.cumsum(np.diff(self.at_ms) >= gap_s * 1000)]).astype(np.intp)


@dataclass(frozen=True)
class Match:
    """One query held against one corpus; what several parts need is made once."""

    corpus: Corpus
    query: Query
    settings: ContextSettings

    @cached_property
    def similarity(self) -> Floats:
        """Cosine of the closest pair of chunks, -1 to 1; NaN for a unit without vectors, or without a model."""
        best = np.full(len(self.corpus.units), -np.inf)
        if self.query.vectors is not None and self.corpus.chunk_vectors is not None:
            likeness = (self.corpus.chunk_vectors @ self.query.vectors.T).max(axis=1)
            np.maximum.at(best, self.corpus.chunk_owners, likeness)
        return np.where(np.isfinite(best), best, np.nan)

    @cached_property
    def frequencies(self) -> Floats:
        """How often each of the query's terms stands in each unit, float64[terms, units]."""
        return self.corpus.frequencies(self.query.terms)

    @cached_property
    def sessions(self) -> NDArray[np.intp]:
        """The number of each unit's session."""
        return self.corpus.sessions(self.settings.session_gap_s)

    @cached_property
    def relevance(self) -> Floats:
        """What each unit itself says about the query: the sum of `OWN_PARTS`."""
        total: Floats = np.sum([PARTS[name](self) for name in OWN_PARTS], axis=0)
        return total

    def bm25(self, frequencies: Floats, lengths: Floats) -> Floats:
        """Return BM25 of documents whose counts of the query's terms are `frequencies`, float64[terms, documents]."""
        k1, b = self.settings.bm25_saturation, self.settings.bm25_length
        norms = k1 * (1 - b + b * lengths / max(1.0, float(lengths.mean())))
        held_by = np.count_nonzero(frequencies, axis=1)
        rarity = np.log(1 + (len(lengths) - held_by + 0.5) / (held_by + 0.5))
        asked = np.minimum(np.fromiter(self.query.terms.values(), dtype=np.float64), ASKED_TIMES_MAX)
        worth = frequencies * (k1 + 1) / np.maximum(frequencies + norms, TINY)
        scores: Floats = (asked * rarity) @ worth
        return scores


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
        own = [part for name, part in self.parts.items() if name in OWN_PARTS]
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


def _semantic(match: Match) -> Floats:
    """How near the meanings are."""
    return match.settings.semantic_weight * z_scores(match.similarity, np.isfinite(match.similarity))


def _lexical(match: Match) -> Floats:
    """BM25 of the unit with the speaker's name and the day in its text."""
    return match.settings.lexical_weight * z_scores(match.bm25(match.frequencies, match.corpus.lengths))


def _passage(match: Match) -> Floats:
    """BM25 of the unit read together with the one before and the one after it in its session."""
    frequencies, lengths = match.frequencies.copy(), match.corpus.lengths.copy()
    is_same = match.sessions[1:] == match.sessions[:-1]
    for around, own in ((frequencies, match.frequencies), (lengths, match.corpus.lengths)):
        around[..., :-1] += own[..., 1:] * is_same
        around[..., 1:] += own[..., :-1] * is_same
    return match.settings.passage_weight * z_scores(match.bm25(frequencies, lengths))


def _session(match: Match) -> Floats:
    """BM25 of the whole session, the same for each of its units."""
    starts = np.flatnonzero(np.diff(match.sessions, prepend=-1))
    frequencies = np.add.reduceat(match.frequencies, starts, axis=1)
    scores = z_scores(match.bm25(frequencies, np.add.reduceat(match.corpus.lengths, starts)))
    return match.settings.session_weight * scores[match.sessions]


def _session_best(match: Match) -> Floats:
    """The mean relevance of the session's best units, the same for each of its units."""
    order = np.lexsort((-match.relevance, match.sessions))
    sessions = match.sessions[order]
    starts = np.flatnonzero(np.diff(sessions, prepend=-1))
    is_best = np.arange(len(order)) - starts[sessions] < SESSION_BEST_COUNT
    sums = np.bincount(sessions[is_best], weights=match.relevance[order][is_best])
    return match.settings.session_best_weight * (sums / np.bincount(sessions[is_best]))[match.sessions]


def _speaker(match: Match) -> Floats:
    """One point for what was said by the one speaker whom the query names; none when it names several."""
    speakers = match.corpus.speakers
    terms_of_name = {str(name): set(terms_of(str(name))) for name in np.unique(speakers)}
    shared = Counter(term for terms in terms_of_name.values() for term in terms)
    asked = {term for term in match.query.terms if shared[term] == 1}
    named = [name for name, terms in terms_of_name.items() if terms & asked]
    is_named = speakers == named[0] if len(named) == 1 else np.zeros(len(speakers))
    return match.settings.speaker_weight * is_named.astype(np.float64)


def _date(match: Match) -> Floats:
    """One point for what was said at a date that the query names, less on the days after."""
    return match.settings.date_weight * date_nearness(
        match.query.dates, match.corpus.at_ms, match.settings.date_fade_days
    )


def _neighbours(match: Match) -> Floats:
    """A share of what the units beside it in its session say themselves."""
    scores, sessions, total = match.relevance, match.sessions, np.zeros(len(match.relevance))
    for distance, share in ((1, match.settings.neighbour_share), (2, match.settings.second_neighbour_share)):
        is_same = sessions[distance:] == sessions[:-distance]
        total[:-distance] += share * np.where(is_same, scores[distance:], 0.0)
        total[distance:] += share * np.where(is_same, scores[:-distance], 0.0)
    return total


def _length(match: Match) -> Floats:
    """The price of a unit's tokens, against the thread's median."""
    tokens = match.corpus.tokens
    return -match.settings.length_weight * np.log(np.maximum(tokens, 1.0) / max(1.0, float(np.median(tokens))))


Part = Callable[[Match], Floats]
# A new kind of evidence is a new line here.
PARTS: dict[str, Part] = {
    "semantic": _semantic,
    "lexical": _lexical,
    "passage": _passage,
    "session": _session,
    "session_best": _session_best,
    "speaker": _speaker,
    "date": _date,
    "neighbours": _neighbours,
    "length": _length,
}
# What a unit says by itself; the rest is where it stands, who said it, when, and what it costs.
OWN_PARTS = ("semantic", "lexical")


def rank(corpus: Corpus, query: Query, settings: ContextSettings) -> Ranking:
    """Score every unit of the corpus for the query."""
    if not corpus.units:
        return Ranking({}, np.zeros(0), np.zeros(0))
    match = Match(corpus, query, settings)
    parts = {name: part(match) for name, part in PARTS.items()}
    return Ranking(parts, np.sum(list(parts.values()), axis=0), match.similarity)


def rank_by_recency(corpus: Corpus) -> Ranking:
    """Score units when there is nothing to compare them with: the newer the better."""
    newness = np.arange(len(corpus.units), dtype=np.float64)
    return Ranking({"recency": newness}, newness, np.full(len(newness), np.nan))
