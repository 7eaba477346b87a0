"""The numbers that decide which messages enter a context, each round and each with its reason.

Must never hold a weight that was fitted to a data set: such weights inherit the set's licence, and nobody can defend
them.
"""

from pydantic import BaseModel, ConfigDict, Field


class ContextSettings(BaseModel):
    """How a context is chosen. Weights multiply z-scores, so 1.0 means one standard deviation counts as one point."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    semantic_weight: float = Field(1.0, ge=0, le=100, description="Weight of the meaning's likeness (embeddings)")
    lexical_weight: float = Field(1.0, ge=0, le=100, description="Weight of shared words (BM25); as much as meaning")
    passage_weight: float = Field(0.0, ge=0, le=100, description="Weight of words shared with a message and those beside it")
    session_weight: float = Field(0.0, ge=0, le=100, description="x")
    session_best_weight: float = Field(0.0, ge=0, le=100, description="x")
    speaker_weight: float = Field(0.0, ge=0, le=100, description="x")
    date_weight: float = Field(0.0, ge=0, le=100, description="x")
    date_fade_days: int = Field(14, ge=0, le=3660, description="x")
    neighbour_share: float = Field(
        0.3, ge=0, le=1, description="Share of the scores of the messages right before and after: answers lie there"
    )
    second_neighbour_share: float = Field(0.1, ge=0, le=1, description="The same, two messages away")
    length_weight: float = Field(
        0.5, ge=0, le=10, description="Weight of -ln(tokens / median): what counts is value for each token"
    )
    session_gap_s: int = Field(
        3600, ge=1, le=10_000_000, description="A pause as long as this parts two sessions; neighbours end there"
    )
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
