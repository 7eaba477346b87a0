"""The numbers that decide which messages enter a context, each round and each with its reason.

Must never hold a weight that was fitted to a data set: such weights inherit the set's licence, and nobody can defend
them.
"""

from pydantic import BaseModel, ConfigDict, Field


class ContextSettings(BaseModel):
    """How a context is chosen. Weights multiply z-scores, so 1.0 means one standard deviation counts as one point.

    A named speaker or date is no z-score: it is there or not, and its weight is the points that it gives.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    semantic_weight: float = Field(1.0, ge=0, le=100, description="Weight of the meaning's likeness (embeddings)")
    lexical_weight: float = Field(
        0.5,
        ge=0,
        le=100,
        description="Weight of shared words (BM25): with passage and session 1.0, so that words count as much as meaning",
    )
    passage_weight: float = Field(
        0.25,
        ge=0,
        le=100,
        description="Weight of words shared with a message and the two beside it: question and answer divide them",
    )
    session_weight: float = Field(
        0.25,
        ge=0,
        le=100,
        description="Weight of words shared with the whole session: what it was about; no more, it lifts all alike",
    )
    session_best_weight: float = Field(
        0.5,
        ge=0,
        le=100,
        description="Weight of the mean of a session's three best messages: half of what a message says itself",
    )
    speaker_weight: float = Field(
        1.0,
        ge=0,
        le=100,
        description="Points for the one speaker whom the message names: like a whole deviation in meaning, no more",
    )
    date_weight: float = Field(
        2.0,
        ge=0,
        le=100,
        description="Points for a date that the message names: two deviations, for a date is exact; what fits better still wins",
    )
    date_fade_days: int = Field(
        7,
        ge=0,
        le=3660,
        description="Days after a named date that still count, less each day: one tells of it that week",
    )
    neighbour_share: float = Field(
        0.3, ge=0, le=1, description="Share of the scores of the messages right before and after: answers lie there"
    )
    second_neighbour_share: float = Field(0.1, ge=0, le=1, description="The same, two messages away")
    length_weight: float = Field(
        0.5, ge=0, le=10, description="Weight of -ln(tokens / median): what counts is value for each token"
    )
    session_gap_s: int = Field(3600, ge=1, le=10_000_000, description="A pause as long as this parts two sessions")
    bm25_saturation: float = Field(
        0.9, ge=0, le=10, description="BM25's k1: how soon a repeated word stops to count: soon"
    )
    bm25_length: float = Field(0.4, ge=0, le=1, description="BM25's b: how much a long message is held back")
    recent_share: float = Field(
        0.15, ge=0, le=1, description="Share of the budget for the last turns: a share, since turns differ in length"
    )
    newest_share: float = Field(
        0.3, ge=0, le=1, description="Share up to which the newest exchange stays whole; beyond, it is cut"
    )
    summary_share: float = Field(0.25, ge=0, le=1, description="Largest share of the budget for the summary")
    notes_share: float = Field(0.15, ge=0, le=1, description="Largest share of the budget for the notes")
    near_misses: int = Field(50, ge=0, le=1000, description="Candidates left out that the receipt still lists")
    query_timeout_s: float = Field(
        1.0, ge=0, le=60, description="Longest wait for the query's embedding before words alone decide"
    )
