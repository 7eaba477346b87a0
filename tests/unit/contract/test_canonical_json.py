"""The one door for JSON: what it refuses, what it mends, and that it changes nothing that it accepts."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.contract import canonical_json
from mesh.contract.errors import ErrorCode, MeshError

BYTES_MAX = 1_000_000

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(canonical_json.INTEGER_MIN, canonical_json.INTEGER_MAX)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="\x00", exclude_categories=("Cs",))),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_characters="\x00", exclude_categories=("Cs",)), max_size=8),
            children,
            max_size=4,
        )
    ),
    max_leaves=20,
)


def loads(text: str | bytes) -> canonical_json.Json:
    raw = text.encode() if isinstance(text, str) else text
    return canonical_json.loads(raw, bytes_max=BYTES_MAX)


@given(json_values)
def test_what_is_accepted_is_unchanged(value: canonical_json.Json) -> None:
    """Reading what was written gives the value back, and writing it again gives the same text."""
    text = canonical_json.dumps(value)
    assert loads(text) == value
    assert canonical_json.dumps(loads(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "NaN", '{"a": NaN}', "[Infinity]", "[-Infinity]", "1e999", "-1e999", '{"a":"\\u0000"}', '{"\\u0000":1}',
        '"a\\ud800b"', '{"a":["\\udc97"]}', '{"a":1,"a":2}', '{"x":{"a":1,"a":1}}', "9223372036854775808",
        "-9223372036854775809", "1" * 5000, "", " ", "{", "{'a':1}", '{"a":1}}', "[1,]", b"\xff", b'"\xed\xa0\x80"',
        "[" * 65 + "]" * 65, "[" * 20_000, '{"a":' * 5000, "\x00", '"\x00"', "\ufeff{}", "nul", "True",
    ],
)  # fmt: skip
def test_what_readers_disagree_about_is_refused(text: str | bytes) -> None:
    """Each of these is read in different ways by different parsers, or by none."""
    with pytest.raises(MeshError) as caught:
        loads(text)
    assert caught.value.code is ErrorCode.INVALID_JSON


def test_the_refusal_names_the_path() -> None:
    """A person can find the offending value."""
    with pytest.raises(MeshError) as caught:
        loads('{"payload": {"items": [{"name": "a\\ud800"}]}}')
    assert caught.value.field == "payload.items[0].name"


def test_depth_64_is_the_last_that_passes() -> None:
    """The limit is exact, and brackets inside strings do not count."""
    assert loads("[" * 64 + "]" * 64) is not None
    assert loads('["' + "[" * 500 + '"]') == ["[" * 500]
    assert loads('["\\"' + "{" * 500 + '"]') is not None


def test_too_many_bytes_are_refused_before_parsing() -> None:
    """The size is judged first."""
    with pytest.raises(MeshError) as caught:
        canonical_json.loads(b"[" * 101, bytes_max=100)
    assert caught.value.code is ErrorCode.TOO_LARGE


@given(st.text(st.characters(exclude_categories=())) | st.binary())
def test_any_input_is_read_or_refused(raw: str | bytes) -> None:
    """No input leads to anything but a value or a MeshError."""
    data = raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogatepass")
    try:
        value = loads(data)
    except MeshError:
        return
    canonical_json.check(value)


def test_worker_output_is_mended() -> None:
    """NUL, lone surrogates and bad UTF-8 from a worker become U+FFFD, so that the result is not lost."""
    frame = canonical_json.loads_frame(b'{"text":"a\\u0000b\\udc97c\xffd","k\\u0000":1}', bytes_max=1000)
    assert frame == {"text": "a\ufffdb\ufffdc\ufffdd", "k\ufffd": 1}
    canonical_json.check(frame)


@pytest.mark.parametrize("raw", [b"NaN", b'{"a":1e999}', b"[" * 100, b'{"a":1,"a":2}', b"{", b"\xff"])
def test_worker_output_without_one_meaning_is_refused(raw: bytes) -> None:
    """Only text is mended; a number or a structure that cannot be read is an error."""
    with pytest.raises(MeshError):
        canonical_json.loads_frame(raw, bytes_max=1000)


@pytest.mark.parametrize("value", [math.nan, math.inf, 2**63, "\ud800", {"a": "\x00"}, {1: 2}, {1, 2}, object()])
def test_check_refuses_python_values_that_are_not_json(value: object) -> None:
    """The same rules hold for values that never were text."""
    with pytest.raises(MeshError):
        canonical_json.check(value)


def test_check_does_not_recurse() -> None:
    """A value nested deeper than Python's own limit is refused, not a crash."""
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(MeshError):
        canonical_json.check(value)
    while value:  # take it apart by hand: the destructor of a deep list recurses too
        value = value.pop()  # type: ignore[assignment]


def test_dumps_is_one_text_for_equal_values() -> None:
    """Key order does not matter, which idempotency relies on."""
    assert canonical_json.dumps({"b": 1, "a": [1.5, "é"]}) == canonical_json.dumps(json.loads('{"a":[1.5,"é"],"b":1}'))
