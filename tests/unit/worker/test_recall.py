"""The shipped `recall`: what it finds, and what it honestly does not."""

import runpy
from typing import Any

import pytest
from support.capability_files import SHIPPED, claim_of

from worker.sdk import Intent

HANDLER = runpy.run_path(str(SHIPPED / "recall" / "handler.py"))
DIALOGUE = [
    ("user", "Hello! My name is Ada and I live in Lisbon."),
    ("assistant", "Nice to meet you, Ada."),
    ("user", "What is the weather like?"),
    ("assistant", "I cannot look outside."),
    ("user", "My sister Joana studies marine biology in Porto."),
    ("assistant", "That sounds fascinating."),
    ("user", "I am allergic to peanuts."),
    ("assistant", "I will keep that in mind: no peanuts."),
    ("user", "The deadline of the project is the 14th of May."),
    ("assistant", "Understood."),
]


def recall(question: str, dialogue: list[tuple[str, str]] = DIALOGUE, *, names: dict[str, str] | None = None) -> Any:
    """Run the handler over a dialogue in which two messages are one turn."""
    context: list[dict[str, Any]] = [
        {"role": role, "content": content, "turn": index // 2 + 1} for index, (role, content) in enumerate(dialogue)
    ]
    for message in context:
        if names and message["role"] in names:
            message["name"] = names[message["role"]]
    return HANDLER["run"](Intent(claim_of({"text": question}).model_dump()), context)


@pytest.mark.parametrize(
    ("question", "turn_number", "words"),
    [
        ("What is my name?", 1, "name is Ada"),
        ("Where do I live?", 1, "Lisbon"),
        ("Do you remember what my sister studies?", 3, "marine biology"),
        ("Which allergies do I have?", 4, "allergic to peanuts"),
        ("when is the project's deadline", 5, "14th of May"),
        ("PORTO", 3, "Porto"),
    ],
)
def test_the_statement_that_answers_is_quoted_with_its_turn(question: str, turn_number: int, words: str) -> None:
    """Word for word, by whom, and where."""
    answer = recall(question)
    assert answer["found"] is True
    assert answer["turn_number"] == turn_number
    assert words in answer["quote"]
    assert answer["text"] == f"In turn {turn_number} you said: {answer['quote']}"


@pytest.mark.parametrize("question", ["What is my car's colour?", "Who am I?", "???", "Quantum chromodynamics"])
def test_what_was_not_said_is_not_invented(question: str) -> None:
    """No guess: found is false, and quote and turn are null."""
    assert recall(question) == {
        "text": "I found nothing about that in this conversation.",
        "found": False,
        "turn_number": None,
        "quote": None,
    }


def test_questions_and_own_answers_are_no_statements() -> None:
    """Asking the same thing again finds what was said, not that it was asked or answered before."""
    asked = [("user", "What is my name?"), ("assistant", "In turn 1 you said: My name is Ada")]
    nothing = [("user", "What is my shoe size?"), ("assistant", HANDLER["NOTHING"])]
    assert recall("What is my name?", DIALOGUE + asked * 3)["turn_number"] == 1
    assert recall("What is my shoe size?", DIALOGUE + nothing * 3)["found"] is False


def test_a_correction_counts_more_than_what_it_corrects() -> None:
    """Of two statements that answer equally well the later one is quoted."""
    moved = [("user", "I live in Berlin now."), ("assistant", "Noted.")]
    assert recall("Where do I live?", DIALOGUE + moved)["quote"] == "I live in Berlin now."


def test_a_named_speaker_is_named() -> None:
    """Imported conversations have people in them."""
    assert recall("Where does she live?", names={"user": "Ada"})["text"].startswith("In turn 1 Ada said: ")


def test_a_long_message_is_quoted_by_its_sentence() -> None:
    """Not three pages, but the sentence that answers."""
    long = " ".join(f"Sentence number {number} is about nothing." for number in range(50))
    dialogue = [("user", f"{long} My locker has the code 4711. {long}"), ("assistant", "Fine.")]
    assert recall("What is the code of my locker?", dialogue)["quote"] == "My locker has the code 4711."


def test_an_empty_conversation_finds_nothing() -> None:
    """The first turn has no earlier one."""
    assert recall("What is my name?", [])["found"] is False


def test_an_unknown_turn_is_not_made_up() -> None:
    """Without a number the answer says `Earlier`."""
    context = [{"role": "user", "content": "My name is Ada."}]
    answer = HANDLER["run"](Intent(claim_of({"text": "name?"}).model_dump()), context)
    assert (answer["text"], answer["turn_number"]) == ("Earlier you said: My name is Ada.", None)


def recall_by_meaning(similarities: list[float]) -> Any:
    """Ask what shares no word with any statement, with the similarity that the mesh measured for each."""
    statements = ["My daughter Ada is allergic to peanuts.", "The train leaves at seven.", "We painted the kitchen."]
    context = [
        {"role": "user", "content": content, "turn": turn, "similarity": similarity}
        for turn, (content, similarity) in enumerate(zip(statements, similarities, strict=True), start=1)
    ]
    return HANDLER["run"](Intent(claim_of({"text": "Which foods must my child avoid?"}).model_dump()), context)


def test_a_statement_of_the_same_meaning_is_found_without_a_shared_word() -> None:
    """The similarity that comes with the context counts beside the words."""
    assert recall_by_meaning([0.24, 0.01, 0.09])["turn_number"] == 1


def test_a_faint_similarity_is_no_answer() -> None:
    """The nearest of what is far is still nothing."""
    assert recall_by_meaning([0.17, 0.01, 0.09])["found"] is False


def test_of_a_turn_the_statement_counts_and_not_its_echo() -> None:
    """An answer that repeats the statement word for word does not take its place; a later turn does."""
    echoed = [("user", "My name is Ada"), ("assistant", "My name is Ada")]
    assert recall("What is my name?", echoed)["text"] == "In turn 1 you said: My name is Ada"
    corrected = [*echoed, ("user", "My name is Eve"), ("assistant", "Noted.")]
    assert recall("What is my name?", corrected)["turn_number"] == 2
