"""Each part of the score by itself, with the shipped weights: what it raises, what it leaves alone."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.history import MINUTE_MS, corpus, message

from ledger.context_settings import ContextSettings
from ledger.history import HistoryMessage
from ledger.ranking import PARTS, Corpus, Query, Vectors, rank

SETTINGS = ContextSettings()
DAY_MS = 24 * 60 * MINUTE_MS
# 1 May 2023, a Monday.
MAY_MS = 1_682_899_200_000


def parts(thread: Corpus, question: str, vectors: Vectors | None = None) -> dict[str, list[float]]:
    """Return the shipped score parts of a question, rounded."""
    ranking = rank(thread, Query.of(question, vectors), SETTINGS)
    return {name: [round(float(each), 3) for each in part] for name, part in ranking.parts.items()}


def said_on(days: list[list[str]]) -> list[HistoryMessage]:
    """Return messages of one session a day, days apart, each by nobody in particular."""
    texts = [(day, place, text) for day, said in enumerate(days) for place, text in enumerate(said)]
    return [
        message(number, text, at_ms=MAY_MS + day * DAY_MS + place * MINUTE_MS)
        for number, (day, place, text) in enumerate(texts, start=1)
    ]


def test_every_part_counts_as_shipped() -> None:
    """In one thread that offers each kind of evidence, no part is zero: a part that is switched off shows here."""
    messages = [
        message(n, text, name=name, at_ms=MAY_MS + day * DAY_MS + n * MINUTE_MS)
        for n, (day, name, text) in enumerate(
            [
                (0, "Ada", "I saw a zebra"),
                (0, "Bob", "A zebra? Really? Tell me everything about it"),
                (0, "Ada", "Yes, in the park"),
                (3, "Bob", "The kettle broke"),
                (9, "Ada", "Good morning"),
                (9, "Bob", "The tea is cold today"),
            ],
            start=1,
        )
    ]
    vectors = {each.message_id: np.eye(6, dtype=np.float32)[[n]] for n, each in enumerate(messages)}
    found = parts(corpus(messages, vectors), "Which zebra did Ada see on 1 May 2023?", np.eye(6, dtype=np.float32)[:1])
    assert list(found) == list(PARTS)
    assert [name for name, values in found.items() if not any(values)] == []
    assert all(values[0] > values[4] for name, values in found.items() if name not in {"length", "speaker"})


def test_passage_raises_an_answer_that_stands_beside_the_words() -> None:
    """Question and answer divide the words between them; far away and in another session nothing is raised."""
    thread = corpus(said_on([["kettle", "zebra?", "yes", "tea", "cups"], ["rain", "snow"]]))
    passage = parts(thread, "zebra")["passage"]
    assert min(passage[0], passage[2]) > passage[3] == passage[4]
    at_the_edge = corpus(said_on([["tea", "cups", "zebra"], ["yes", "snow"]]))
    assert parts(at_the_edge, "zebra")["passage"][3] == parts(at_the_edge, "zebra")["passage"][4]


def test_passage_joins_words_of_neighbours() -> None:
    """Of two messages without any word of the question, the one between both words is the better passage."""
    thread = corpus(said_on([["zebra", "yes", "park", "kettle", "cup", "tea", "zebra", "no", "milk", "park"]]))
    passage = parts(thread, "zebra park")["passage"]
    assert passage[1] > passage[7]


def test_session_raises_all_of_the_session_that_was_about_it() -> None:
    """Every message of the session with the words gets the same; the others less."""
    thread = corpus(said_on([["tea", "cups"], ["zebra", "yes", "no", "zebra"], ["rain", "snow"]]))
    session = parts(thread, "zebra")["session"]
    assert session[2] == session[3] == session[4] == session[5] > 0
    assert session[0] == session[1] == session[6] == session[7] < 0


def test_one_session_alone_is_no_evidence() -> None:
    """A thread without pauses has nothing to compare."""
    assert not any(parts(corpus(said_on([["zebra", "tea", "park"]])), "zebra")["session"])


def test_session_best_raises_a_session_with_three_hits_over_one_with_one() -> None:
    """The mean of the best three: further weak messages of a long session do not pull it down."""
    long_session = ["zebra", "zebra", "zebra", *["tea"] * 10]
    thread = corpus(said_on([long_session, ["zebra", "rain", "snow"], ["milk", "sugar", "salt"]]))
    best = parts(thread, "zebra")["session_best"]
    assert len(set(best[:13])) == 1
    assert best[0] > best[13] > best[16]
    relevance = rank(thread, Query.of("zebra"), SETTINGS).relevance
    assert best[13] == pytest.approx(SETTINGS.session_best_weight * relevance[13:16].mean(), abs=1e-3)
    assert best[0] == pytest.approx(SETTINGS.session_best_weight * relevance[:3].mean(), abs=1e-3)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What did Ada's sister say?", [1, 0, 0]),
        ("Did bob agree?", [0, 1, 0]),
        ("What do Ada and Bob share?", [0, 0, 0]),
        ("Who is it?", [0, 0, 0]),
        ("Smith?", [0, 0, 0]),
    ],
)
def test_speaker_raises_the_one_who_is_named(question: str, expected: list[int]) -> None:
    """Whoever is named alone; of two, of a name that two share, and of nobody, none."""
    thread = corpus([message(1, "x", name="Ada Smith"), message(2, "x", name="Bob Smith"), message(3, "x")])
    assert parts(thread, question)["speaker"] == [SETTINGS.speaker_weight * each for each in expected]


def test_date_raises_the_day_and_the_days_after() -> None:
    """What was said on the day most, a day later less, the day before and a month later not at all."""
    messages = [message(n, "x", at_ms=MAY_MS + day * DAY_MS) for n, day in enumerate((4, 5, 6, 40), start=1)]
    date = parts(corpus(messages), "What happened on 6 May 2023?")["date"]
    assert date[1] == SETTINGS.date_weight
    assert date[1] > date[2] > date[0] == date[3] == 0


def test_date_decides_between_messages_that_are_alike() -> None:
    """The same words every week: the week that is asked for is best, without its date among the words."""
    messages = [message(n, "we went swimming", at_ms=MAY_MS + 7 * n * DAY_MS) for n in range(1, 9)]
    terms = {each.message_id: Query.of("we went swimming").terms for each in messages}
    thread = Corpus(messages, terms, {})  # type: ignore[arg-type]
    assert rank(thread, Query.of("Where did we swim on 22 May 2023?"), SETTINGS).order()[0] == 2


def test_what_stands_around_a_message_is_no_part_of_its_relevance() -> None:
    """Relevance is what a message says itself, whoever says it, whenever."""
    thread = corpus([*said_on([["zebra", "yes"]]), message(3, "zebra", name="Ada", at_ms=MAY_MS + 9 * DAY_MS)])
    ranking = rank(thread, Query.of("Did Ada see a zebra on 1 May 2023?"), SETTINGS)
    assert np.allclose(ranking.relevance, ranking.parts["semantic"] + ranking.parts["lexical"])


words = st.lists(st.sampled_from(["zebra", "park", "tea", "", "Ada", "1 May 2023"]), max_size=5).map(" ".join)


@settings(deadline=None)
@given(
    st.lists(st.tuples(words, st.integers(0, 5), st.sampled_from([None, "Ada", "Bob"])), min_size=1, max_size=12), words
)
def test_parts_are_finite_whatever_the_order_of_times(rows: list[tuple[str, int, str | None]], question: str) -> None:
    """Messages out of time order, empty ones and equal ones give numbers that add up."""
    thread = corpus(
        [message(n, text, name=name, at_ms=MAY_MS + day * DAY_MS) for n, (text, day, name) in enumerate(rows, start=1)]
    )
    ranking = rank(thread, Query.of(question), SETTINGS)
    assert np.isfinite(ranking.total).all()
    assert np.allclose(np.sum(list(ranking.parts.values()), axis=0), ranking.total)


def test_ranking_seven_hundred_turns_takes_milliseconds() -> None:
    """The best of several runs stays far below what a claim may wait."""
    texts = [f"word{n % 97} word{n % 31} zebra{n % 211} and some more words of an ordinary length" for n in range(700)]
    thread = corpus(said_on([texts[start : start + 20] for start in range(0, 700, 20)]))
    query = Query.of("What about word5, word7, word11, zebra3, zebra9 and the other ordinary words on 3 May 2023?")
    spent_s = []
    for _ in range(10):
        started = time.perf_counter()
        rank(thread, query, SETTINGS)
        spent_s.append(time.perf_counter() - started)
    assert min(spent_s) < 0.02
