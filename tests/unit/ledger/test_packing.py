"""Packing: never over budget, pins word for word, the newest exchange always in, order kept."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.history import exchange, message

from ledger.context_settings import ContextSettings
from ledger.history import HistoryMessage, units_of
from ledger.packing import NEWEST_CUT, TURNS_REACHED, Packed, Prelude, pack
from ledger.tokens import CUT_MARK, message_tokens
from mesh.contract.messages import ContextMessage
from mesh.contract.template import ContextShare

SETTINGS = ContextSettings()


def share(max_tokens: int, *, recent_turns: int = 3, older_turns: int = 1000) -> ContextShare:
    """Return a share with room for older turns."""
    return ContextShare(max_tokens=max_tokens, recent_turns=recent_turns, older_turns=older_turns)


def packed(messages: list[HistoryMessage], room: ContextShare, *, order: list[int] | None = None) -> Packed:
    """Pack messages, best first by `order` or as they come."""
    units = units_of(messages)
    return pack(units, range(len(units)) if order is None else order, Prelude(), room, SETTINGS)


def pin(text: str) -> ContextMessage:
    """Return a pinned fact."""
    return ContextMessage(role="system", content=text)


history = st.lists(
    st.tuples(st.text(max_size=120), st.text(max_size=400), st.sampled_from([None, "Ada", "名前: <|endoftext|>"])),
    max_size=14,
)


@settings(max_examples=200, deadline=None)
@given(history, st.lists(st.text(max_size=80), max_size=4), st.text(max_size=400), st.integers(1, 500), st.randoms())
def test_a_context_never_exceeds_its_budget(turns: list[tuple[str, str, str | None]], pins: list[str], notes: str, budget: int, random: object) -> None:  # fmt: skip
    """Whatever the history, pins, notes, order and budget: the cost as sent, counted anew, is within the budget."""
    messages = [
        each
        for number, (question, answer, name) in enumerate(turns, start=1)
        for each in (
            message(number, question, name=name),
            message(number, answer, role="assistant", position=1, tool_calls=[{"id": "c"}] if not answer else None),
        )
    ]
    units = units_of(messages)
    order = list(range(len(units)))
    random.shuffle(order)  # type: ignore[attr-defined]
    prelude = Prelude([pin(text) for text in pins], pin(notes) if notes else None, pin(notes) if notes else None)
    result = pack(units, order, prelude, share(budget), SETTINGS)
    cost = sum(message_tokens(m.message.content, m.message.name, m.message.tool_calls) for m in result.messages)
    assert cost == result.tokens <= budget
    kept_pins = [m.message.content for m in result.messages if m.source == "pin"]
    assert len(kept_pins) + result.pins_left_out == len(pins)
    assert set(kept_pins) <= set(pins)
    numbers = [m.turn_number for m in result.messages if m.turn_number is not None]
    assert numbers == sorted(numbers)


def test_when_everything_fits_everything_is_in() -> None:
    """A short thread is sent whole, in order."""
    messages = [each for n in range(1, 6) for each in exchange(n, f"question {n}", f"answer {n}")]
    result = packed(messages, share(2000))
    assert [m.message.content for m in result.messages] == [each.content for each in messages]
    assert [m.source for m in result.messages] == ["older"] * 4 + ["recent"] * 6


def test_pins_come_first_word_for_word() -> None:
    """A pin is printed as it is, before summary, notes and history."""
    prelude = Prelude([pin("Allergic to  nuts\n!")], pin("summary"), pin("notes"))
    result = pack(units_of(exchange(1, "hi", "hello")), [0, 1], prelude, share(500), SETTINGS)
    assert [m.source for m in result.messages] == ["pin", "summary", "note", "recent", "recent"]
    assert result.messages[0].message.content == "Allergic to  nuts\n!"


def test_the_newest_exchange_is_cut_visibly_when_it_is_too_long() -> None:
    """The short question stays whole, the long answer is cut with a mark, and older turns keep their room."""
    messages = [*exchange(1, "my name is Ada", "hello Ada"), *exchange(2, "tell me a story", "once upon a time " * 400)]
    messages += exchange(3, "and another", "there was a king " * 400)
    result = packed(messages, share(400))
    contents = [m.message.content for m in result.messages]
    assert "my name is Ada" in contents
    assert "and another" in contents
    assert contents[-1].endswith(CUT_MARK)
    assert NEWEST_CUT in result.reasons
    assert result.tokens > 350  # what was left over went back to the cut answer


def test_recent_turns_end_where_their_share_ends() -> None:
    """With long turns, three recent turns do not eat the budget: the best older one is in."""
    messages = [message(n, f"turn {n} " + "blah " * 100) for n in range(1, 10)]
    result = packed(messages, share(400), order=[0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert [m.turn_number for m in result.messages] == [1, 2, 9]


def test_older_turns_are_capped() -> None:
    """No more older turns than the template allows, whatever room is left."""
    messages = [message(n, f"turn {n}") for n in range(1, 20)]
    result = packed(messages, share(2000, recent_turns=2, older_turns=3), order=[4, 2, 9, 0])
    assert [m.turn_number for m in result.messages] == [3, 5, 10, 18, 19]
    assert result.reasons[0] == TURNS_REACHED


def test_a_tool_call_is_never_parted_from_its_result() -> None:
    """When both do not fit, neither is in."""
    call = message(1, "", role="assistant", tool_calls=[{"id": "a", "function": {"name": "book"}}])
    result = message(1, "booked " * 60, role="tool", position=1, tool_call_id="a")
    later = [message(n, "small talk") for n in (2, 3, 4, 5)]
    kept = packed([call, result, *later], share(60), order=[0, 1, 2, 3, 4])
    assert all(m.turn_number != 1 for m in kept.messages)
    assert kept.messages


def test_without_recent_turns_only_the_ranking_counts() -> None:
    """`recent_turns: 0` gives the newest exchange no privilege."""
    messages = [message(n, f"turn number {n}") for n in range(1, 10)]
    assert [m.turn_number for m in packed(messages, share(9, recent_turns=0), order=[3]).messages] == [4]


@pytest.mark.parametrize("budget", [1, 4, 5, 6, 9])
def test_a_tiny_budget_is_no_error(budget: int) -> None:
    """Even one token gives a context, if an empty one."""
    assert packed(exchange(1, "a long question " * 20, "a long answer " * 20), share(budget)).tokens <= budget
