"""Frames, exit codes and logs: the pure parts of what a node hears from a worker."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.capability_files import SHIPPED, claim_of

from mesh.contract.errors import Cause
from mesh.contract.messages import Claim, ContextMessage, ThreadUpdate
from worker.assignment import Assignment
from worker.capability_folder import load_capability
from worker.child import newest_that_fits
from worker.exit_codes import cause_of_exit
from worker.frames import FRAME_BYTES_MAX, Error, FrameInvalid, FrameTooLarge, Result, merge_updates, parse_frame
from worker.log_tail import LogTail
from worker.wire import encode_frame

ENVIRONMENT_ROOM = 131_051


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(), st.lists, max_leaves=20))
def test_what_is_encoded_is_what_is_parsed(value: object) -> None:
    """Any JSON survives the wire; bad text is mended, and only that."""
    frame = parse_frame(encode_frame({"kind": "result", "result": value}).strip())
    assert isinstance(frame, Result)
    if "\\u0000" not in json.dumps(value):
        assert frame.result == value


@given(st.binary(max_size=300))
def test_no_line_breaks_the_reader(line: bytes) -> None:
    """Whatever a worker writes is a frame or a FrameInvalid."""
    with contextlib.suppress(FrameInvalid):
        parse_frame(line)


def test_a_frame_may_have_one_mebibyte_and_no_more() -> None:
    """The limit is exact."""
    line = encode_frame({"kind": "delta", "text": ""}).strip()
    fitting = line[:-2] + b"x" * (FRAME_BYTES_MAX - len(line)) + line[-2:]
    parse_frame(fitting)
    with pytest.raises(FrameTooLarge):
        parse_frame(fitting + b" ")


def test_a_long_detail_is_cut() -> None:
    """A program that writes a megabyte of reasons gets two thousand characters of them told."""
    frame = parse_frame(encode_frame({"kind": "error", "detail": "x" * 500_000}).strip())
    assert isinstance(frame, Error)
    assert (len(frame.detail), frame.detail[-1]) == (2000, "…")


def test_updates_merge_by_key_and_the_later_word_counts() -> None:
    """Mappings merge; messages, plan and title are replaced; what is None changes nothing."""
    earlier = ThreadUpdate(
        messages=[ContextMessage(role="user", content="a")], pins={"a": "1", "b": "2"}, plan={"x": 1}, title="t"
    )
    later = ThreadUpdate(messages=[], pins={"b": None, "c": "3"}, plan={"y": None})
    merged = merge_updates(earlier, later)
    assert merged == ThreadUpdate(messages=[], pins={"a": "1", "b": None, "c": "3"}, plan={"y": None}, title="t")
    assert merge_updates(ThreadUpdate(), ThreadUpdate()) == ThreadUpdate()


@pytest.mark.parametrize(
    ("exit_code", "signal_number", "reason", "cpu_ms", "cause"),
    [
        (0, None, None, 0, Cause.NO_RESULT),
        (3, None, None, 0, Cause.WORKER_CRASHED),
        (137, None, None, 0, Cause.OOM_KILLED),
        (None, 9, None, 0, Cause.OOM_KILLED),
        (None, 9, None, 5000, Cause.TIMED_OUT),
        (None, 24, None, 0, Cause.TIMED_OUT),
        (None, 11, None, 0, Cause.WORKER_CRASHED),
        (None, 60, None, 0, Cause.WORKER_CRASHED),
        (None, 9, "processes", 0, Cause.WORKER_CRASHED),
        (None, 9, "zygote_died", 0, Cause.WORKER_CRASHED),
        (None, 9, "killed", 0, Cause.WORKER_CRASHED),
    ],
)
def test_each_end_has_its_cause(
    exit_code: int | None, signal_number: int | None, reason: str | None, cpu_ms: int, cause: Cause
) -> None:
    """The table of docs and code is this one."""
    found, detail = cause_of_exit(
        exit_code=exit_code, signal_number=signal_number, reason=reason, cpu_ms=cpu_ms, cpu_limit_s=5
    )
    assert found is cause
    assert detail


@given(st.lists(st.binary(max_size=50), max_size=40))
def test_a_log_keeps_the_newest_bytes(pieces: list[bytes]) -> None:
    """The text is the end of what was written, storable, within the bound, and honest about what is missing."""
    tail = LogTail(60)
    for piece in pieces:
        tail.append(piece)
    everything = b"".join(pieces)
    assert tail.is_truncated == (len(everything) > 60)
    assert len(tail.text()) <= 60
    assert "\0" not in tail.text()
    if not tail.is_truncated:
        assert tail.text() == everything.decode("utf-8", "replace").replace("\0", "\ufffd")


def test_a_cut_log_begins_with_a_whole_character() -> None:
    """The rest of a character that was cut in two is dropped."""
    tail = LogTail(7)
    tail.append("äöüß".encode())
    assert tail.text() == "öüß"


@given(st.lists(st.text(max_size=40_000), min_size=1, max_size=12))
def test_the_newest_messages_that_fit(contents: list[str]) -> None:
    """The value fits, is a JSON array, and holds the newest messages without a hole."""
    messages = [{"role": "user", "content": content} for content in contents]
    value = newest_that_fits(messages)
    assert len(value.encode()) <= ENVIRONMENT_ROOM
    kept = json.loads(value)
    assert kept == messages[-len(kept) :]


@given(st.integers(100_000, 300_000), st.sampled_from(["x", "ü", "\\", "\n", "日", "\0"]))
def test_a_newest_message_that_does_not_fit_is_cut_at_its_front(length: int, character: str) -> None:
    """A visible mark, the end of the content, and not a byte wasted that a character could use."""
    message = {"role": "user", "content": character * length + "end", "name": "n"}
    value = newest_that_fits([{"role": "user", "content": "old"}, message])
    assert len(value.encode()) <= ENVIRONMENT_ROOM
    (kept,) = json.loads(value)[-1:]
    assert kept["content"].endswith("end")
    if kept != message:
        assert kept["content"].startswith("[cut] ")
        assert len(value.encode()) > ENVIRONMENT_ROOM - 2 * len(json.dumps(character).encode())


def test_an_assignment_tells_a_worker_no_more_than_it_needs() -> None:
    """Neither the tenant nor the epoch, the budget or the receipt's candidates."""
    claim: Claim = claim_of(
        {"text": "x"},
        messages=[ContextMessage(role="user", content="a")],
        receipt={"messages": [{"turn_number": 7, "similarity": 0.5, "relevance": 2.5, "source": "older", "tokens": 9}]},
    )
    told = json.loads(Assignment.from_claim(claim, load_capability(SHIPPED / "recall")).line())
    assert told["remarks"] == [{"turn": 7, "similarity": 0.5, "relevance": 2.5}]
    assert set(told) == {"claim", "remarks"}
    assert not {"tenant_id", "epoch", "budget", "receipt", "lease_ttl_s", "version", "sent_at"} & set(told["claim"])
