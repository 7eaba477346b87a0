"""What a node hands in at the end of an attempt, cleaned, bounded and counted before any transaction.

Must never let through what the database would refuse: whoever passes here can be committed. What cannot is refused
with an error that is not retryable, so that the node fails the attempt as `result_invalid`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ledger.store import Row
from ledger.turns import PreparedMessage, check_messages, prepare, text_of, user_text
from mesh.contract import canonical_json
from mesh.contract.canonical_json import DEPTH_MAX, clean_text
from mesh.contract.errors import ErrorCode, MeshError
from mesh.contract.messages import AttemptLog, CommitResult, ContextMessage, ThreadUpdate

# Worker output has crossed a frame of at most 64 levels; the messages that carry it add a few.
OUTPUT_DEPTH_MAX = DEPTH_MAX + 4
RESULT_BYTES_MAX = 4 * 1024 * 1024
PLAN_BYTES_MAX = 64 * 1024
MEMORY_BYTES_MAX = 64 * 1024
TOOL_CALLS_BYTES_MAX = 256 * 1024
TOOL_CALLS_KEPT = 20
TITLE_CHARS_MAX = 500
PINS_MAX = 100
PIN_KEY_CHARS_MAX = 128
PIN_TEXT_CHARS_MAX = 4000
LOG_CHARS_MAX = 64 * 1024
DETAIL_CHARS_MAX = 4000
PARTIAL_CHARS_MAX = 1_000_000
# A result beyond this travels in GET /intents/{id} only, not in the event as well.
EVENT_RESULT_CHARS_MAX = 64 * 1024


def cleaned(value: Any, *, field: str, bytes_max: int = RESULT_BYTES_MAX) -> tuple[Any, str]:
    """Return worker output that can be stored, and its JSON.

    Raises: MeshError `invalid_json` or `too_large`.
    """
    try:
        value = canonical_json.sanitise(value)
        canonical_json.check(value, depth_max=OUTPUT_DEPTH_MAX)
    except (RecursionError, TypeError) as error:
        raise MeshError(ErrorCode.INVALID_JSON, f"{field} is nested too deeply, or no JSON", field=field) from error
    except MeshError as error:
        path = ".".join(part for part in (field, error.field) if part)
        raise MeshError(error.code, f"{field}: {error.detail}", field=path) from error
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    if (size := len(text.encode())) > bytes_max:
        raise MeshError(ErrorCode.TOO_LARGE, f"{field} has {size} bytes, more than {bytes_max}", field=field)
    return value, text


def cleaned_log(log: AttemptLog) -> AttemptLog:
    """Return a log that can be stored: the newest part of each stream."""
    is_cut = max(len(log.stdout), len(log.stderr)) > LOG_CHARS_MAX
    return AttemptLog(
        stdout=clean_text(log.stdout[-LOG_CHARS_MAX:]),
        stderr=clean_text(log.stderr[-LOG_CHARS_MAX:]),
        is_truncated=log.is_truncated or is_cut,
    )


def cleaned_detail(detail: str) -> str:
    """Return the sentence that says why an attempt failed, bounded."""
    return clean_text(detail if len(detail) <= DETAIL_CHARS_MAX else detail[: DETAIL_CHARS_MAX - 1] + "…")


def check_pin(key: str, text: str) -> None:
    """Raise MeshError `invalid_request` for a pin that no thread can hold."""
    if not 1 <= len(key) <= PIN_KEY_CHARS_MAX or not key.isprintable() or "/" in key:
        raise MeshError(
            ErrorCode.INVALID_REQUEST,
            f"a pin's key has 1 to {PIN_KEY_CHARS_MAX} printable characters, no /",
            field="key",
        )
    if not 1 <= len(text) <= PIN_TEXT_CHARS_MAX or clean_text(text) != text:
        raise MeshError(
            ErrorCode.INVALID_REQUEST,
            f"a pin's text has 1 to {PIN_TEXT_CHARS_MAX} characters, and no NUL",
            field="text",
        )


@dataclass(frozen=True)
class Outcome:
    """A successful attempt as it will be committed. `*_patch` is None where the turn leaves the thread's value."""

    result: Any
    result_text: str
    messages: list[PreparedMessage]
    plan: dict[str, Any] | None
    memory_patch: dict[str, Any] | None
    tool_calls_patch: dict[str, Any] | None
    pins: dict[str, str | None]
    title: str | None
    log: AttemptLog

    @property
    def thread_values(self) -> dict[str, Any]:
        """The columns of the thread that the turn replaces without looking at them."""
        values = {"last_plan": self.plan, "title": self.title}
        return {name: value for name, value in values.items() if value is not None}

    def merged(self, thread: Row) -> dict[str, Any]:
        """Return the columns of the thread that the turn merges into.

        Raises: MeshError `too_large`.
        """
        values: dict[str, Any] = {}
        if self.memory_patch is not None:
            values["contextual_memory"] = merged_memory(thread["contextual_memory"], self.memory_patch)
        if self.tool_calls_patch is not None:
            values["last_tool_calls"] = merged_tool_calls(thread["last_tool_calls"], self.tool_calls_patch)
        return values

    @property
    def changed(self) -> dict[str, Any]:
        """What the turn changes besides its messages, as `thread.updated` shows it."""
        parts = {
            "plan": self.plan,
            "contextual_memory": self.memory_patch,
            "tool_calls": self.tool_calls_patch,
            "pins": self.pins or None,
            "title": self.title,
        }
        return {name: value for name, value in parts.items() if value is not None}

    @property
    def event_data(self) -> dict[str, Any]:
        """The result as `result.committed` shows it."""
        if len(self.result_text) > EVENT_RESULT_CHARS_MAX:
            return {"is_result_omitted": True}
        return {"result": self.result}


def merged_memory(before: Mapping[str, Any] | None, patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return contextual memory with a patch: key by key, null removes.

    Raises: MeshError `too_large`.
    """
    merged = {key: value for key, value in {**(before or {}), **patch}.items() if value is not None}
    return dict(cleaned(merged, field="thread_update.contextual_memory", bytes_max=MEMORY_BYTES_MAX)[0])


def merged_tool_calls(before: Mapping[str, Any] | None, patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the thread's last tool calls with new ones: the newest that are kept, in order.

    Raises: MeshError `too_large`.
    """
    merged = {key: value for key, value in (before or {}).items() if key not in patch} | dict(patch)
    kept = dict(list(merged.items())[-TOOL_CALLS_KEPT:])
    return dict(cleaned(kept, field="thread_update.tool_calls", bytes_max=TOOL_CALLS_BYTES_MAX)[0])


def _patch(value: dict[str, Any] | None, field: str, bytes_max: int) -> dict[str, Any] | None:
    return None if value is None else cleaned(value, field=f"thread_update.{field}", bytes_max=bytes_max)[0]


def _pins(update: ThreadUpdate) -> dict[str, str | None]:
    pins = {clean_text(key): None if text is None else clean_text(text) for key, text in (update.pins or {}).items()}
    if len(pins) > PINS_MAX:
        raise MeshError(ErrorCode.TOO_LARGE, f"more than {PINS_MAX} pins", field="thread_update.pins")
    for key, text in pins.items():
        try:
            check_pin(key, "-" if text is None else text)
        except MeshError as error:
            raise MeshError(error.code, error.detail, field=f"thread_update.pins.{key[:40]}") from error
    return pins


async def prepare_outcome(commit: CommitResult, payload: Mapping[str, Any]) -> Outcome:
    """Return what a commit will write.

    Raises: MeshError `invalid_json`, `invalid_request` or `too_large`; none is retryable.
    """
    update = commit.thread_update
    result, result_text = cleaned(commit.result, field="result")
    if update.messages is None:
        said = [
            ContextMessage(role="user", content=user_text(payload)),
            ContextMessage(role="assistant", content=text_of(result)),
        ]
    else:
        check_messages(update.messages)
        raw, _ = cleaned([message.model_dump() for message in update.messages], field="thread_update.messages")
        said = [ContextMessage.model_validate(item) for item in raw]
    title = None if update.title is None else clean_text(update.title)[:TITLE_CHARS_MAX]
    return Outcome(
        result=result,
        result_text=result_text,
        messages=await prepare(said),
        plan=_patch(update.plan, "plan", PLAN_BYTES_MAX),
        memory_patch=_patch(update.contextual_memory, "contextual_memory", MEMORY_BYTES_MAX),
        tool_calls_patch=_patch(update.tool_calls, "tool_calls", TOOL_CALLS_BYTES_MAX),
        pins=_pins(update),
        title=title,
        log=cleaned_log(commit.log),
    )


async def prepare_partial(payload: Mapping[str, Any], partial_text: str) -> list[PreparedMessage]:
    """Return the messages of a turn that was stopped after it had said something; none when it had not."""
    if not partial_text:
        return []
    return await prepare(
        [
            ContextMessage(role="user", content=user_text(payload)),
            ContextMessage(role="assistant", content=clean_text(partial_text[:PARTIAL_CHARS_MAX])),
        ]
    )
