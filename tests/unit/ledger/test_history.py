"""Units and chunks: what belongs together stays together, and nothing of a long message is lost."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.history import message

from ledger.history import CHUNK_CHARS, CHUNKS_MAX, chunks_of, split_text, units_of


def test_a_tool_call_and_its_results_are_one_unit() -> None:
    """Two results after a call are kept or dropped with it; the next answer is a unit of its own."""
    call = message(1, "", role="assistant", position=1, tool_calls=[{"id": "a"}, {"id": "b"}])
    results = [message(1, f"result {n}", role="tool", position=2 + n, tool_call_id="ab"[n]) for n in range(2)]
    units = units_of([message(1, "book it"), call, *results, message(1, "done", role="assistant", position=4)])
    assert [len(unit.messages) for unit in units] == [1, 3, 1]


def test_a_result_without_its_call_stands_alone() -> None:
    """A tool message of another turn is never joined to this turn's call."""
    call = message(1, "", role="assistant", tool_calls=[{"id": "a"}])
    assert [len(unit.messages) for unit in units_of([call, message(2, "late", role="tool")])] == [1, 1]


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=3000), st.integers(20, 400))
def test_splitting_loses_no_visible_character(text: str, chars_max: int) -> None:
    """The parts hold the text's visible characters in order, none longer than allowed."""
    parts = split_text(text, chars_max)
    assert all(len(part) <= chars_max for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())


def test_each_chunk_carries_speaker_and_day() -> None:
    """Who said it and when is part of what is searched."""
    chunks = chunks_of(message(1, "A short sentence. " * 200, name="Ada", at_ms=1_683_552_960_000))
    assert len(chunks) > 3
    assert all(chunk.startswith("Ada (8 May 2023): ") for chunk in chunks)


def test_a_very_long_message_has_longer_chunks_instead_of_more() -> None:
    """A megabyte gives no more chunks than the bound, and short text gives chunks of the usual size."""
    assert len(chunks_of(message(1, "x" * 1_000_000))) <= CHUNKS_MAX
    assert max(map(len, chunks_of(message(1, "word " * 2000)))) < CHUNK_CHARS + 40


def test_an_empty_message_has_no_chunks() -> None:
    """There is nothing to embed in white space."""
    assert chunks_of(message(1, " \n ")) == []
