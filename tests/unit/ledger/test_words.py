"""Terms: forms of one word meet, different words stay apart, other scripts are searchable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.words import stem, terms_of


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("dogs", "dog"),
        ("studies", "study"),
        ("boxes", "box"),
        ("running", "run"),
        ("loved", "love"),
        ("loving", "love"),
        ("missed", "miss"),
        ("painting", "paint"),
        ("paintings", "painted"),
        ("quickly", "quick"),
        ("tries", "try"),
    ],
)
def test_forms_of_one_word_meet(one: str, other: str) -> None:
    """Plural, -ing, -ed and -ly fold to one stem."""
    assert stem(one) == stem(other)


@pytest.mark.parametrize(("one", "other"), [("bed", "b"), ("thing", "th"), ("glass", "glas"), ("bus", "bu")])
def test_words_that_only_look_inflected_stay_whole(one: str, other: str) -> None:
    """An ending is taken off only where a word remains."""
    assert stem(one) != stem(other)


def test_function_words_are_left_out() -> None:
    """A question's frame carries no meaning of its own."""
    assert terms_of("What did you say about the Kea?") == [stem("say"), "kea"]


def test_writing_without_spaces_is_cut_into_pairs() -> None:
    """A Chinese word is found inside a sentence."""
    assert set(terms_of("北京")) <= set(terms_of("我住在北京。"))


def test_accents_and_width_do_not_part_words() -> None:
    """Full-width and upper-case letters fold."""
    assert terms_of("ＡＢＣ Straße") == terms_of("abc STRASSE")


@given(st.text(max_size=200))
def test_any_text_has_terms_without_error(text: str) -> None:
    """No text raises, and no term is empty."""
    assert all(terms_of(text))
