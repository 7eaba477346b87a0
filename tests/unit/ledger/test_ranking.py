"""Ranking: words and meaning both count, neighbours share, length costs, missing vectors do no harm."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.history import MINUTE_MS, corpus, message

from ledger.context_settings import ContextSettings
from ledger.ranking import Query, Vectors, rank, rank_by_recency, z_scores
from ledger.words import counted_terms

SETTINGS = ContextSettings()
ALONE = ContextSettings(
    passage_weight=0,
    session_weight=0,
    session_best_weight=0,
    speaker_weight=0,
    date_weight=0,
    neighbour_share=0,
    second_neighbour_share=0,
    length_weight=0,
)


def unit(*values: float) -> Vectors:
    """Return one chunk's vector of unit length, float32[1, n]."""
    vector = np.array([values], dtype=np.float32)
    return vector / np.linalg.norm(vector)


def test_the_message_with_the_rare_shared_word_is_best() -> None:
    """A word that stands once in the thread finds its message, whatever its form."""
    thread = corpus([message(n, f"We talked about lunch number {n}") for n in range(1, 20)] + [message(20, "I paint")])
    assert rank(thread, Query(counted_terms("who paints?")), SETTINGS).order()[0] == 19


def test_the_speaker_is_searched_too() -> None:
    """A name that stands only as the speaker is found."""
    thread = corpus(
        [message(1, "I moved", name="Ada"), message(2, "I moved", name="Bob"), message(3, "Fine", name="Eve")]
    )
    assert rank(thread, Query(counted_terms("Where is Bob?")), ALONE).order()[0] == 1


def test_meaning_finds_what_words_do_not() -> None:
    """With vectors, a message without a shared word can be best."""
    messages = [message(n, f"sentence {n}") for n in range(1, 6)]
    vectors = {each.message_id: unit(1.0, 0.1 * index) for index, each in enumerate(messages)}
    vectors["m3.0"] = unit(0.0, 1.0)
    ranking = rank(corpus(messages, vectors), Query(counted_terms("zebra"), unit(0.0, 1.0)), ALONE)
    assert ranking.order()[0] == 2


def test_a_long_message_scores_by_its_best_chunk() -> None:
    """One chunk that fits outweighs many that do not."""
    messages = [message(1, "first"), message(2, "second"), message(3, "third")]
    vectors = {
        "m1.0": unit(1.0, 0.5),
        "m2.0": np.concatenate([unit(1.0, 0.0)] * 5 + [unit(0.0, 1.0)]),
        "m3.0": unit(1.0, 0.2),
    }
    assert rank(corpus(messages, vectors), Query({}, unit(0.0, 1.0)), ALONE).order()[0] == 1


def test_a_message_without_vectors_is_neither_favoured_nor_punished() -> None:
    """Its semantic part is exactly zero."""
    messages = [message(n, f"sentence {n}") for n in range(1, 5)]
    vectors = {f"m{n}.0": unit(1.0, float(n)) for n in (1, 2, 3)}
    thread = corpus(messages, vectors)
    ranking = rank(thread, Query({}, unit(1.0, 1.0)), ALONE)
    assert ranking.parts["semantic"][3] == 0
    assert thread.is_indexed == [True, True, True, False]


def test_neighbours_share_within_a_session_only() -> None:
    """The message after the one that matches gains; after a long pause nothing is shared."""
    near = [message(1, "zebra"), message(2, "yes"), message(3, "no"), message(4, "so")]
    shares = rank(corpus(near), Query(counted_terms("zebra")), SETTINGS).parts["neighbours"]
    assert shares[1] > shares[2] > shares[3]
    far = [message(1, "zebra"), *(message(n, "yes", at_ms=100 * n * MINUTE_MS) for n in (2, 3, 4))]
    assert not rank(corpus(far), Query(counted_terms("zebra")), SETTINGS).parts["neighbours"].any()


def test_length_costs() -> None:
    """Of two messages that match alike, the shorter is better value."""
    thread = corpus([message(1, "zebra " + "padding words here " * 50), message(2, "ok"), message(3, "zebra stripes")])
    ranking = rank(thread, Query(counted_terms("zebra")), SETTINGS)
    assert ranking.parts["length"][0] < ranking.parts["length"][2]
    assert ranking.order()[0] == 2


def test_without_a_query_the_newest_is_best() -> None:
    """Recency is the only evidence then."""
    assert rank_by_recency(corpus([message(n, "x") for n in (1, 2, 3)])).order() == [2, 1, 0]


def test_an_empty_thread_has_an_empty_ranking() -> None:
    """Nothing to rank is no error."""
    assert rank(corpus([]), Query({"a": 1}), SETTINGS).order() == []


@settings(deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=12), st.text(max_size=60))
def test_parts_sum_to_the_total_and_stay_finite(texts: list[str], query: str) -> None:
    """Every score is a number, and the receipt's parts explain the whole of it."""
    ranking = rank(
        corpus([message(n + 1, text) for n, text in enumerate(texts)]), Query(counted_terms(query)), SETTINGS
    )
    assert np.isfinite(ranking.total).all()
    assert np.allclose(np.sum(list(ranking.parts.values()), axis=0), ranking.total)


def test_z_scores_of_equal_values_are_zero() -> None:
    """No spread, no evidence."""
    assert not z_scores(np.full(4, 7.0)).any()


def test_relevance_is_what_a_message_says_itself() -> None:
    """It knows neither the neighbour's share nor the price of length, so that one statement can be quoted by it."""
    thread = corpus([message(1, "zebra " + "padding words here " * 50), message(2, "ok"), message(3, "zebra stripes")])
    ranking = rank(thread, Query(counted_terms("zebra")), SETTINGS)
    assert np.allclose(ranking.relevance, ranking.parts["semantic"] + ranking.parts["lexical"])
    assert not np.allclose(ranking.relevance, ranking.total)
    newest = rank_by_recency(thread)
    assert np.array_equal(newest.relevance, newest.total)


def test_similarity_is_absolute_and_unknown_without_a_vector() -> None:
    """A reader can tell from it whether anything fits at all."""
    messages = [message(n, f"sentence {n}") for n in (1, 2, 3)]
    thread = corpus(messages, {"m1.0": unit(1.0, 0.0), "m2.0": unit(0.0, 1.0)})
    found = rank(thread, Query({}, unit(1.0, 0.0)), SETTINGS).similarity
    assert found[0] == 1
    assert found[1] == 0
    assert np.isnan(found[2])
