"""Quote the earlier statement that answers a question best, from the context alone, without a model.

Intuition: the statement shares the question's rare words, or its meaning. Rule: words are cut to stems, a stem weighs
more the fewer statements hold it (inverse document frequency), a statement scores the share of the question's weight
that it holds; it must reach a minimum in that or in the similarity of meaning that the mesh has measured. Of those that do,
the one that ranks highest in the whole thread is quoted; where no rank is known, share and similarity decide. Equals go to the later turn, because people correct themselves. Hard cases: questions say nothing, so they
are no candidates, nor are this capability's own answers; a question of stop words alone is answered by meaning or not.
Must never invent: what it returns was said word for word.
"""

import math
import re
from typing import Any, NamedTuple

from worker.sdk import Context, Intent

NOTHING = "I found nothing about that in this conversation."
SHARE_MIN = 0.3  # of the question's weight; less is chance
# Cosine of MiniLM's vectors, the date in the indexed text: unrelated sentences stay below 0.18, the same topic in
# other words begins at 0.24. A quote that is merely near shows itself to be so.
SIMILARITY_MIN = 0.2
QUOTE_CHARACTERS_MAX = 300
PREFIX_CHARACTERS_MIN = 5  # so long a common beginning makes two stems the same word

_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|\n+")
_OWN_ANSWER = re.compile(r"(?:In turn \d+|Earlier) .{1,200} said: ")
_QUESTION_START = re.compile(
    r"(?:what|who|whom|whose|where|when|why|how|which|do you (?:know|remember|recall)|can you|could you|tell me)\b",
    re.IGNORECASE,
)
_STOP_WORDS = frozenset(
    _WORD.findall(
        """a about again am an and any are as at be been but by can could did do does for from had has have he her him his
    how i if in into is it its just know last like me mentioned my no not of on one or our out please recall remember
    remind said say she should so some tell than that the their them then there these they thing this those to told
    too up us was we were what when where which who whom whose why will with would you your"""
    )
)
_ENDINGS = ("ingly", "edly", "ings", "ies", "ing", "ed", "es", "ly", "s")


class Statement(NamedTuple):
    """One thing that was said."""

    text: str
    speaker: str
    turn_number: int | None
    stems: frozenset[str]
    similarity: float = 0.0
    relevance: float | None = None


def run(intent: Intent, context: Context) -> dict[str, Any]:
    """Return {"text", "found", "turn_number", "quote"}; the last two are null when nothing was found."""
    statement = find(intent.payload["text"], statements_of(context))
    if statement is None:
        return {"text": NOTHING, "found": False, "turn_number": None, "quote": None}
    quote = shorten(statement, stems_of(intent.payload["text"]))
    where = "Earlier" if statement.turn_number is None else f"In turn {statement.turn_number}"
    return {
        "text": f"{where} {statement.speaker} said: {quote}",
        "found": True,
        "turn_number": statement.turn_number,
        "quote": quote,
    }


def stem(word: str) -> str:
    """Cut the commonest English endings; other languages keep most of their words."""
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            word = word[: -len(ending)] + ("y" if ending == "ies" else "")
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lsz":
        word = word[:-1]
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


def stems_of(text: str) -> frozenset[str]:
    """Return the stems of the words that carry meaning."""
    words = (match.group() for match in _WORD.finditer(text.casefold()))
    return frozenset(stem(word) for word in words if word not in _STOP_WORDS and (len(word) > 1 or word.isdigit()))


def statements_of(context: Context) -> list[Statement]:
    """Return what was stated, in order: no questions, no answers of this capability, nothing without meaning."""
    statements = []
    for message in context:
        text = (message.get("content") or "").strip()
        role = message["role"]
        if role not in {"user", "assistant"} or (role == "assistant" and is_own_answer(text)):
            continue
        stated = " ".join(part for part in _SENTENCE_END.split(text) if part and not is_question(part))
        if stems := stems_of(stated):
            speaker = message.get("name") or ("you" if role == "user" else "I")
            similarity = message.get("similarity", 0.0)
            statements.append(
                Statement(stated, speaker, message.get("turn"), stems, similarity, message.get("relevance"))
            )
    return statements


def is_question(sentence: str) -> bool:
    """Return whether a sentence asks rather than states."""
    sentence = sentence.strip()
    return sentence.endswith("?") or _QUESTION_START.match(sentence) is not None


def is_own_answer(text: str) -> bool:
    """Return whether an earlier run of this capability said it."""
    return text == NOTHING or _OWN_ANSWER.match(text) is not None


def find(question: str, statements: list[Statement]) -> Statement | None:
    """Return the statement with the most in common, in words and in meaning; None when none has enough in either."""
    wanted = stems_of(question)
    weights = {
        one: math.log(1 + len(statements) / (1 + sum(_holds(statement.stems, one) for statement in statements)))
        for one in wanted
    }
    whole = sum(weights.values())
    best, best_score = None, -math.inf
    for statement in statements:
        share = sum(weight for one, weight in weights.items() if _holds(statement.stems, one)) / whole if whole else 0.0
        if share < SHARE_MIN and statement.similarity < SIMILARITY_MIN:
            continue
        score = share + statement.similarity if statement.relevance is None else statement.relevance
        # The answer of a turn often repeats what was said: of one turn's equals, the first counts.
        if best is None or score > best_score or (score == best_score and _is_later(statement, best)):
            best, best_score = statement, score
    return best


def _is_later(one: Statement, other: Statement) -> bool:
    return one.turn_number is None or other.turn_number is None or one.turn_number > other.turn_number


def shorten(statement: Statement, wanted: frozenset[str]) -> str:
    """Return the statement, or of a long one the sentence that holds most of what is wanted."""
    if len(statement.text) <= QUOTE_CHARACTERS_MAX:
        return statement.text
    sentences = [sentence for sentence in _SENTENCE_END.split(statement.text) if sentence]
    best = max(sentences, key=lambda sentence: sum(_holds(stems_of(sentence), one) for one in wanted))
    return best if len(best) <= QUOTE_CHARACTERS_MAX else best[: QUOTE_CHARACTERS_MAX - 1] + "…"


def _holds(stems: frozenset[str], wanted: str) -> bool:
    return wanted in stems or any(_is_same_word(one, wanted) for one in stems)


def _is_same_word(one: str, other: str) -> bool:
    """Allergy and allergic: the shorter begins the longer, its last letter aside."""
    needed = max(PREFIX_CHARACTERS_MIN, min(len(one), len(other)) - 1)
    return abs(len(one) - len(other)) <= 3 and len(other) >= needed and one[:needed] == other[:needed]
