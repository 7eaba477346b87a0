"""Dates in a question: what is named is found, what only looks like a date is not, and nearness fades with the days."""

from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.dates import DateMention, date_nearness, dates_in

SIXTH_OF_MAY = DateMention(2023, 5, 6)


def ms(text: str) -> int:
    """Return a UTC time as milliseconds."""
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


def nearness(question: str, *times: str, fade_days: int = 7) -> list[float]:
    """Return how near each time is to the dates in a question."""
    found = date_nearness(dates_in(question), np.array([ms(time) for time in times], dtype=np.int64), fade_days)
    return [round(float(each), 3) for each in found]


@pytest.mark.parametrize(
    "text",
    [
        "on 6 May 2023?",
        "the 6th of May, 2023",
        "May 6, 2023",
        "may 6th 2023",
        "MAY 06 2023",
        "2023-05-06",
    ],
)
def test_a_day_is_read_however_it_is_written(text: str) -> None:
    """British, American and ISO forms name the same day."""
    assert dates_in(f"What happened {text}") == (SIXTH_OF_MAY,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("in June 2023", DateMention(2023, 6)),
        ("during September", DateMention(None, 9)),
        ("What did she do in May?", DateMention(None, 5)),
        ("since early August", DateMention(None, 8)),
        ("in 2022", DateMention(2022)),
        ("the summer of 2022", DateMention(2022)),
        ("on Dec. 24", DateMention(None, 12, 24)),
        ("2023-05", DateMention(2023, 5)),
        ("on Friday", DateMention(weekday=4)),
        ("on Sundays", DateMention(weekday=6)),
    ],
)
def test_months_years_and_weekdays_leave_the_rest_open(text: str, expected: DateMention) -> None:
    """What is not said is not guessed."""
    assert dates_in(text) == (expected,)


@pytest.mark.parametrize(
    "text",
    [
        "How may I help you?",
        "Did April and June march along?",
        "an august person",
        "It costs 2000 dollars",
        "May the best win, 45 to 3",
        "2023-13-40",
        "room 2023",
        "yesterday, last week",
        "",
    ],
)
def test_what_only_looks_like_a_date_is_none(text: str) -> None:
    """Names, verbs, prices and impossible dates raise nothing."""
    assert dates_in(text) == ()


def test_an_exact_date_outdoes_a_weekday() -> None:
    """ "The Friday before 14 August" means that August, not every Friday."""
    assert dates_in("the Friday before 14 August 2023") == (DateMention(2023, 8, 14),)


def test_several_dates_all_count() -> None:
    """A message of either day is as near as can be."""
    assert nearness("1 May 2023 or 20 May 2023", "2023-05-01", "2023-05-20", "2023-05-15") == [1, 1, 0]


def test_the_day_counts_whole_and_the_days_after_less_and_less() -> None:
    """Nothing the day before, one on the day, an even fall, nothing when the time is over."""
    times = ("2023-05-05T23:59:59", "2023-05-06", "2023-05-07", "2023-05-10", "2023-05-13", "2023-05-14")
    assert nearness("on 6 May 2023", *times) == [0, 1, 0.875, 0.5, 0.125, 0]


def test_a_month_counts_whole_and_fades_into_the_next() -> None:
    """Every day of June, then the days after it; an open year means each year, and December reaches into January."""
    assert nearness("in June 2023", "2023-05-31", "2023-06-01", "2023-06-30", "2023-07-01", "2022-06-10") == [
        0,
        1,
        1,
        0.875,
        0,
    ]
    assert nearness("in June", "2022-06-10", "2023-06-10") == [1, 1]
    assert nearness("in December", "2024-01-01") == [0.875]


def test_a_weekday_means_every_such_day() -> None:
    """12 May 2023 and 19 May 2023 were Fridays."""
    assert nearness("on Friday", "2023-05-12", "2023-05-19", "2023-05-13", "2023-05-11") == [1, 1, 0.875, 0.25]


def test_a_leap_day_is_no_error_in_other_years() -> None:
    """29 February without a year means the years that have one."""
    assert nearness("on 29 February", "2023-03-01", "2024-02-29") == [0, 1]


@given(st.text(max_size=200), st.lists(st.integers(0, 4_102_444_800_000), max_size=8), st.integers(0, 400))
def test_any_text_and_time_gives_numbers_between_zero_and_one(text: str, times: list[int], fade_days: int) -> None:
    """No text raises."""
    found = date_nearness(dates_in(text + " 6 May"), np.array(times, dtype=np.int64), fade_days)
    assert ((found >= 0) & (found <= 1)).all()
