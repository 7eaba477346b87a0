"""What a node hands in, cleaned and bounded; times, cursors and imported turns."""

import itertools
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import cursors
from ledger.history_import import group_into_turns
from ledger.outcomes import TOOL_CALLS_KEPT, cleaned, cleaned_log, merged_memory, merged_tool_calls
from ledger.times import to_ms, to_text, to_time
from ledger.turns import PreparedMessage, text_of
from mesh.contract import canonical_json
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.messages import AttemptLog, ContextMessage

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_any_json_can_be_stored_after_cleaning(value: Any) -> None:
    """Nothing but bad text changes, and cleaning twice changes nothing."""
    clean, text = cleaned(value, field="result")
    canonical_json.check(clean)
    assert cleaned(clean, field="result") == (clean, text)
    assert canonical_json.loads(text.encode(), bytes_max=10**7) == clean


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**63, {1: 2}, object(), _nested(100), _nested(50_000)])
def test_what_no_attempt_can_store_is_refused_for_good(value: Any) -> None:
    """Whatever it is, the error is not retryable and names the field."""
    with pytest.raises(MeshError) as refused:
        cleaned(value, field="result")
    assert (refused.value.code, refused.value.retryable) == (ErrorCode.INVALID_JSON, False)
    assert (refused.value.field or "").startswith("result")


def test_a_result_has_a_largest_size() -> None:
    """In bytes, not characters."""
    with pytest.raises(MeshError) as refused:
        cleaned("ä" * 60, field="result", bytes_max=100)
    assert refused.value.code is ErrorCode.TOO_LARGE


def test_the_newest_part_of_a_long_log_is_kept() -> None:
    """And said to be cut."""
    log = cleaned_log(AttemptLog(stdout="a" * 100_000 + "end", stderr="\x00"))
    assert log.stdout.endswith("end")
    assert log.is_truncated
    assert log.stderr == "\ufffd"


def test_memory_merges_by_key_and_null_removes() -> None:
    """A patch, not a replacement."""
    assert merged_memory({"a": 1, "b": 2}, {"b": None, "c": 3}) == {"a": 1, "c": 3}
    assert merged_memory(None, {"a": None}) == {}


def test_the_newest_tool_calls_are_kept_in_order() -> None:
    """A call that is said again moves to the end."""
    before = {f"c{number}": number for number in range(TOOL_CALLS_KEPT)}
    merged = merged_tool_calls(before, {"c0": "again", "new": 1})
    assert list(merged)[-2:] == ["c0", "new"]
    assert len(merged) == TOOL_CALLS_KEPT
    assert "c1" not in merged


@pytest.mark.parametrize(
    ("value", "text"), [({"text": "x", "n": 1}, "x"), ("x", "x"), ({"text": 1}, '{"text":1}'), ([1, None], "[1,null]")]
)
def test_a_value_as_a_message_is_its_text_or_its_json(value: Any, text: str) -> None:
    """The same for payloads and results."""
    assert text_of(value) == text


@given(st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 30), timezones=st.just(UTC)))
def test_times_survive_the_database(moment: datetime) -> None:
    """To the millisecond."""
    value = to_ms(moment, field="x")
    assert to_time(value) == moment.replace(microsecond=moment.microsecond // 1000 * 1000)
    assert to_text(value).endswith("Z")


@given(
    st.integers(-(2**63), 2**63 - 1),
    st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=100),
)
def test_a_cursor_leads_back_to_its_place(number: int, name: str) -> None:
    """Whatever the thread is called."""
    assert cursors.unwrap(cursors.wrap(number, name), int, str) == [number, name]


@given(st.text())
def test_anything_else_is_no_cursor(text: str) -> None:
    """A clear error, whatever somebody sends."""
    with pytest.raises(MeshError) as refused:
        cursors.unwrap(text, int, str, str)
    assert refused.value.field == "cursor"


@given(st.lists(st.sampled_from(["user", "assistant", "system", "tool"]), max_size=30))
def test_grouping_keeps_every_message_in_order(roles: list[str]) -> None:
    """A turn is one message, or a user's with the assistant's right after it."""
    history = [PreparedMessage(ContextMessage(role=role, content=str(index)), 5) for index, role in enumerate(roles)]
    groups = group_into_turns(history)
    assert [item for group in groups for item in group] == history
    for group in groups:
        assert len(group) == 1 or [item.message.role for item in group] == ["user", "assistant"]
    singles = [group[0].message.role for group in groups if len(group) == 1]
    pairs = sum(first == "user" and second == "assistant" for first, second in itertools.pairwise(roles))
    assert len(singles) + 2 * pairs == len(roles)
