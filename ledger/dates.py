"""The dates that a question names, and how near each message's day is to them. Pure.

Must never read a clock: "yesterday" and "last week" are left alone, and a weekday means every such day.

Rule: a date is a day, a month or a year, with what is not said left open ("in June" is June of any year). A message of
that time is as near as can be (1), and the days after fade evenly to 0, because people speak of a day on the days that
follow it. Weekdays count only where nothing more exact is named. Hard cases: "may", "march", "april", "june" and
"august" are words or names too and need a number or a preposition beside them; a number is a year only after a word that
asks for one. Known: English names, and ISO 8601 in any language. Units: days in UTC, as in a message's heading.
"""

import calendar
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_DAY_MS = 86_400_000

_MONTHS = {name.lower(): number for number, name in enumerate(calendar.month_name) if name}
_MONTHS |= {name.lower(): number for number, name in enumerate(calendar.month_abbr) if name} | {"sept": 9}
_WEEKDAYS = {name.lower(): number for number, name in enumerate(calendar.day_name)}
_ALSO_WORDS = {"may", "march", "april", "june", "august"}

_MONTH = rf"(?P<month>{'|'.join(sorted(_MONTHS, key=len, reverse=True))})\b\.?"
_FULL_MONTH = rf"(?P<month>{'|'.join(name.lower() for name in calendar.month_name if name)})\b"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?\b"
_YEAR = r"(?P<year>(?:19|20)\d\d)\b"
_BEFORE = r"(?P<before>\b(?:in|during|of|since|until|early|mid|late|last)[\s-]+)"
# Most exact first: what one has read, the next does not see.
_PATTERNS = [
    re.compile(pattern)
    for pattern in (
        r"\b(?P<year>\d{4})-(?P<month>\d\d)(?:-(?P<day>\d\d))?\b",
        rf"\b{_DAY}(?:\s+of)?\s+{_MONTH}(?:,?\s+{_YEAR})?",
        rf"\b{_MONTH}\s+{_DAY}(?!:\d)(?:,?\s+{_YEAR})?",
        rf"\b{_MONTH},?\s+(?:of\s+)?{_YEAR}",
        rf"{_BEFORE}?\b{_FULL_MONTH}",
        rf"(?:{_BEFORE}|\b(?:year|spring|summer|autumn|fall|winter)\s+){_YEAR}",
    )
]
_WEEKDAY = re.compile(rf"\b({'|'.join(_WEEKDAYS)})s?\b")


@dataclass(frozen=True)
class DateMention:
    """A day, month, year or weekday (Monday is 0) that a text names; None is what it leaves open."""

    year: int | None = None
    month: int | None = None
    day: int | None = None
    weekday: int | None = None

    def period(self, year: int) -> tuple[date, date] | None:
        """Return the first and last day it means in `year`; None when it means none there."""
        if self.year not in (None, year):
            return None
        if self.month is None:
            return date(year, 1, 1), date(year, 12, 31)
        last = calendar.monthrange(year, self.month)[1]
        if self.day is None:
            return date(year, self.month, 1), date(year, self.month, last)
        return (date(year, self.month, self.day),) * 2 if self.day <= last else None


def _mention(match: re.Match[str]) -> DateMention | None:
    named, year, day = (match.groupdict().get(part) for part in ("month", "year", "day"))
    if named in _ALSO_WORDS and not (year or day or match.groupdict().get("before")):
        return None
    month = _MONTHS.get(named) or int(named) if named else None
    mention = DateMention(int(year) if year else None, month, int(day) if day else None)
    is_real = mention.month in (None, *range(1, 13)) and mention.day in (None, *range(1, 32)) and mention.year != 0
    return mention if is_real else None


def _explicit(text: str) -> Iterator[DateMention]:
    for pattern in _PATTERNS:
        for match in pattern.finditer(text):
            if mention := _mention(match):
                yield mention
        text = pattern.sub(" ", text)


def dates_in(text: str) -> tuple[DateMention, ...]:
    """Return the dates that `text` names, the most exact first; weekdays only when there is nothing else."""
    text = text.lower()
    exact = tuple(dict.fromkeys(_explicit(text)))
    return exact or tuple(DateMention(weekday=_WEEKDAYS[name]) for name in dict.fromkeys(_WEEKDAY.findall(text)))


def _days_after(mention: DateMention, days: NDArray[np.int64]) -> Floats:
    """Return how many days each day lies after what was meant: 0 within it, infinite before it."""
    if mention.weekday is not None:
        # Day 0 of the epoch was a Thursday.
        return ((days + 3 - mention.weekday) % 7).astype(np.float64)
    years = days.astype("datetime64[D]").astype("datetime64[Y]").astype(np.int64) + 1970
    nearest = np.full(len(days), np.inf)
    for year in {int(shown) - back for shown in np.unique(years) for back in (0, 1)}:
        if not 1 <= year <= 9999 or not (period := mention.period(year)):
            continue
        first, last = (day.toordinal() - date(1970, 1, 1).toordinal() for day in period)
        after = np.maximum(days - last, 0).astype(np.float64)
        nearest = np.minimum(nearest, np.where(days >= first, after, np.inf))
    return nearest


def date_nearness(mentions: Sequence[DateMention], at_ms: NDArray[np.int64], fade_days: int) -> Floats:
    """Return for each time 1 within a mentioned date, falling evenly to 0 over the `fade_days` after, else 0."""
    days, places = np.unique(at_ms // _DAY_MS, return_inverse=True)
    best = np.zeros(len(days))
    for mention in mentions:
        best = np.maximum(best, np.clip(1 - _days_after(mention, days) / (fade_days + 1), 0, 1))
    return best[places]
