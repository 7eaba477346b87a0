"""Frames: what a worker and its node say to each other, one JSON object a line, on the descriptor MESH_FD.

A worker speaks `delta`, `progress`, `log`, `tool.started`, `tool.finished`, `llm.chat`, `thread.updated`,
`result` and `error`; a node answers with `ack`, `llm.delta`, `llm.result` and `llm.error`.
Must never accept a frame that it does not know whole: an unknown kind or field is an error, not a surprise.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mesh.contract import canonical_json
from mesh.contract.errors import Cause, MeshError
from mesh.contract.messages import ThreadUpdate, Usage
from worker.wire import FRAME_BYTES_MAX

__all__ = ["FRAME_BYTES_MAX", "Frame", "FrameError", "FrameInvalid", "FrameTooLarge", "parse_frame"]

_SHOWN_BYTES_MAX = 80
_DETAIL_CHARACTERS_MAX = 2000
# What else may end an attempt is the node's and the ledger's to say.
_CAUSES_OF_WORKERS = frozenset(
    {
        Cause.HANDLER_FAILED,
        Cause.HANDLER_REFUSED,
        Cause.MODEL_FAILED,
        Cause.MODEL_NOT_CONFIGURED,
        Cause.OOM_KILLED,
        Cause.RESULT_INVALID,
        Cause.FRAME_TOO_LARGE,
        Cause.SPAWN_FAILED,
    }
)
_MERGED_BY_KEY = frozenset({"contextual_memory", "pins", "tool_calls"})


class FrameError(Exception):
    """The worker broke the protocol. `cause` and `detail` are fit for the attempt's error."""

    cause: Cause

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class FrameInvalid(FrameError):
    """A line that is no frame."""

    cause = Cause.FRAME_INVALID


class FrameTooLarge(FrameError):
    """A line longer than FRAME_BYTES_MAX."""

    cause = Cause.FRAME_TOO_LARGE

    def __init__(self) -> None:
        super().__init__(f"the worker sent a frame of more than {FRAME_BYTES_MAX} bytes")


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Delta(_Said):
    """A piece of the answer, for whoever streams it."""

    kind: Literal["delta"]
    text: str


class Progress(_Said):
    """How far the work is. `fraction` runs from 0 to 1."""

    kind: Literal["progress"]
    fraction: float | None = Field(None, ge=0, le=1)
    note: str | None = Field(None, max_length=2000)


class Log(_Said):
    """A line for the operator's log."""

    kind: Literal["log"]
    level: Literal["debug", "info", "warning", "error"] = "info"
    text: str


class ToolStarted(_Said):
    """An effect is about to happen; the worker waits for the `ack`, given when that is durable."""

    kind: Literal["tool.started"]
    call_id: str = Field(min_length=1, max_length=200)
    name: str = Field(min_length=1, max_length=200)
    arguments: Any = None


class ToolFinished(_Said):
    """The effect happened; the worker waits for the `ack`, given when the result is durable."""

    kind: Literal["tool.finished"]
    call_id: str = Field(min_length=1, max_length=200)
    result: Any = None


class LlmChat(_Said):
    """Ask the node to call the model. Answered by `llm.delta`s and one `llm.result` or `llm.error`."""

    kind: Literal["llm.chat"]
    request_id: str = Field(min_length=1, max_length=200)
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    stream_to_caller: bool = True


class ThreadUpdated(ThreadUpdate):
    """What this turn adds to the thread, committed together with the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["thread.updated"]

    def update(self) -> ThreadUpdate:
        """The update without the frame's `kind`."""
        return ThreadUpdate.model_validate(self.model_dump(exclude={"kind"}))


class Result(_Said):
    """The outcome. The last frame that counts."""

    kind: Literal["result"]
    result: Any


def _shorten(text: str) -> str:
    return text if len(text) <= _DETAIL_CHARACTERS_MAX else text[: _DETAIL_CHARACTERS_MAX - 1] + "…"


def _a_workers_cause(cause: Cause) -> Cause:
    if cause not in _CAUSES_OF_WORKERS:
        raise ValueError(f"a worker may name one of: {', '.join(sorted(_CAUSES_OF_WORKERS))}")
    return cause


class Error(_Said):
    """The attempt failed. Without `is_retryable`, the cause decides. Long texts are cut."""

    kind: Literal["error"]
    cause: Annotated[Cause, AfterValidator(_a_workers_cause)] = Cause.HANDLER_FAILED
    detail: Annotated[str, AfterValidator(_shorten)]
    is_retryable: bool | None = None
    hint: Annotated[str, AfterValidator(_shorten)] | None = None


Frame = Annotated[
    Delta | Progress | Log | ToolStarted | ToolFinished | LlmChat | ThreadUpdated | Result | Error,
    Field(discriminator="kind"),
]
_FRAMES: TypeAdapter[Frame] = TypeAdapter(Frame)


def parse_frame(line: bytes) -> Frame:
    """Return the frame that `line` holds. Bytes that are not UTF-8, NUL and lone surrogates become U+FFFD.

    Raises: FrameInvalid, FrameTooLarge.
    """
    if len(line) > FRAME_BYTES_MAX:
        raise FrameTooLarge
    shown = line[:_SHOWN_BYTES_MAX].decode("utf-8", "replace")
    try:
        value = canonical_json.loads_frame(line, bytes_max=FRAME_BYTES_MAX * 3)  # U+FFFD has three bytes
    except MeshError as error:
        raise FrameInvalid(f"the worker sent a line that is no frame: {error.detail}: {shown!r}") from error
    try:
        return _FRAMES.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise FrameInvalid(f"the worker sent a bad frame: {where or 'kind'}: {first['msg']}: {shown!r}") from error


def merge_updates(earlier: ThreadUpdate, later: ThreadUpdate) -> ThreadUpdate:
    """Return both updates as one: mappings merge key by key, of everything else the later word counts."""
    merged: dict[str, Any] = {}
    for field in ThreadUpdate.model_fields:
        before, after = getattr(earlier, field), getattr(later, field)
        if field in _MERGED_BY_KEY and before is not None and after is not None:
            merged[field] = {**before, **after}
        else:
            merged[field] = before if after is None else after
    return ThreadUpdate.model_validate(merged)


def ack(ref: str) -> dict[str, Any]:
    """Answer to `tool.started` and `tool.finished`; `ref` is the call_id."""
    return {"kind": "ack", "ref": ref}


def llm_delta(request_id: str, text: str) -> dict[str, Any]:
    """A piece of the model's answer."""
    return {"kind": "llm.delta", "request_id": request_id, "text": text}


def llm_result(request_id: str, text: str, *, usage: Usage, finish_reason: str) -> dict[str, Any]:
    """The model's whole answer."""
    return {
        "kind": "llm.result",
        "request_id": request_id,
        "text": text,
        "usage": {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens},
        "finish_reason": finish_reason,
    }


def llm_error(request_id: str, *, cause: Cause, detail: str, hint: str | None = None) -> dict[str, Any]:
    """The model gave no answer."""
    return {"kind": "llm.error", "request_id": request_id, "cause": cause.value, "detail": detail, "hint": hint}
