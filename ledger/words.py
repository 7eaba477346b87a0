"""A text as the terms that full-text ranking compares: folded, lightly stemmed, function words left out.

Must never raise on any text, and never fold two words together that are not forms of one word oftener than not.

Rule: a run of letters and digits is a word; English endings (plural, -ing, -ed, -ly) are taken off where enough of a
word is left; writing without spaces (Chinese, Japanese, Thai, …) is cut into pairs of characters, the common stand-in
for a dictionary. Hard cases: "bed", "thing", "news" and "glass" stay whole by the length and ending rules; irregular forms
("went") are left to the embeddings.
Source: Harman, How effective is suffixing? (1991): plurals bring most of a stemmer's gain.
"""

import functools
import re
import unicodedata
from collections import Counter

_WORD = re.compile(r"[^\W_]+")
_UNSPACED = re.compile("[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
_VOWEL = re.compile("[aeiouy]")
_STEM_CHARS_MIN = 3

_FUNCTION_WORDS = """
a about after again all also am an and any are as at be because been before being both but by can could did do does
doing down during each few for from further had has have having he her here hers herself him himself his how i if in
into is it its itself just let ll me more most my myself no nor not now of off on once only or other our ours
ourselves out over own re s same she should so some such t than that the their theirs them themselves then there
these they this those through to too under until up us ve very was we were what when where which while who whom why
will with would you your yours yourself yourselves d m don didn doesn isn wasn aren
"""
STOP_WORDS = frozenset(_FUNCTION_WORDS.split())


def _without_ending(word: str) -> str:
    """Take one inflection off: the stem must keep a vowel and three letters."""
    for ending in ("ing", "ed"):
        stem = word.removesuffix(ending)
        if stem != word and len(stem) >= _STEM_CHARS_MIN and _VOWEL.search(stem):
            # running -> run, but falling -> fall, and missed -> miss
            return stem[:-1] if stem[-1] == stem[-2] and stem[-1] not in "lsz" else stem
    if word.endswith("ly") and len(word) > 5:
        return word[:-2]
    return word


@functools.lru_cache(maxsize=65_536)
def stem(word: str) -> str:
    """Return the stem of one folded word."""
    if len(word) <= _STEM_CHARS_MIN or not word.isascii() or not word.isalpha():
        return word
    if word.endswith("ies") and len(word) > 4:
        word = word[:-3] + "y"
    elif word.endswith(("sses", "shes", "ches", "xes", "zes")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    word = _without_ending(word)
    # love, loving and loved meet without the e; try and tries without the y
    if len(word) > _STEM_CHARS_MIN and word[-1] == "e":
        return word[:-1]
    if len(word) > _STEM_CHARS_MIN and word[-1] == "y":
        return word[:-1] + "i"
    return word


def _pairs(run: str) -> list[str]:
    return [run[index : index + 2] for index in range(len(run) - 1)] or [run]


def terms_of(text: str) -> list[str]:
    """Return the terms of `text` in order, with repeats."""
    terms = []
    for word in _WORD.findall(unicodedata.normalize("NFKC", text).casefold()):
        if word.isascii():
            if word not in STOP_WORDS:
                terms.append(stem(word))
            continue
        rest = _UNSPACED.sub(" ", word).split()
        terms += [stem(part) for part in rest if part not in STOP_WORDS]
        terms += [pair for run in _UNSPACED.findall(word) for pair in _pairs(run)]
    return terms


def counted_terms(text: str) -> Counter[str]:
    """Return how often each term stands in `text`."""
    return Counter(terms_of(text))
