"""Every error that one room may tell another, and every cause for which an attempt ends.

Must never hold text for one language of transport: HTTP status codes stand in gateway/http_errors.py.
"""

from enum import StrEnum
from typing import Any


class ErrorCode(StrEnum):
    """What went wrong with a call, as a caller sees it in `code`."""

    INVALID_JSON = "invalid_json"
    INVALID_REQUEST = "invalid_request"
    PAYLOAD_INVALID = "payload_invalid"
    TOO_LARGE = "too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    TOO_SLOW = "too_slow"
    TOO_MANY_REQUESTS = "too_many_requests"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    UNKNOWN_CAPABILITY = "unknown_capability"
    THREAD_BUSY = "thread_busy"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    ALREADY_TERMINAL = "already_terminal"
    NOT_REPLAYABLE = "not_replayable"
    NOT_CLAIMABLE = "not_claimable"
    STALE_EPOCH = "stale_epoch"
    DEADLINE_PASSED = "deadline_passed"
    CONFLICT = "conflict"
    UNAVAILABLE = "unavailable"
    STORAGE_FULL = "storage_full"
    INTERNAL = "internal"


class Cause(StrEnum):
    """Why an attempt, or the whole intent, ended without a result."""

    SPAWN_FAILED = "spawn_failed"
    WORKER_CRASHED = "worker_crashed"
    OOM_KILLED = "oom_killed"
    TIMED_OUT = "timed_out"
    LEASE_LOST = "lease_lost"
    NODE_DRAINED = "node_drained"
    NO_RESULT = "no_result"
    FRAME_INVALID = "frame_invalid"
    FRAME_TOO_LARGE = "frame_too_large"
    RESULT_INVALID = "result_invalid"
    HANDLER_FAILED = "handler_failed"
    HANDLER_REFUSED = "handler_refused"
    MODEL_NOT_CONFIGURED = "model_not_configured"
    MODEL_FAILED = "model_failed"
    DEADLINE_PASSED = "deadline_passed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    ROLLED_BACK = "rolled_back"


# What fails the same way every time is not tried again (RELIABILITY: rule 7).
DETERMINISTIC_CAUSES = frozenset(
    {
        Cause.SPAWN_FAILED,
        Cause.FRAME_INVALID,
        Cause.FRAME_TOO_LARGE,
        Cause.RESULT_INVALID,
        Cause.HANDLER_REFUSED,
        Cause.MODEL_NOT_CONFIGURED,
        Cause.DEADLINE_PASSED,
        Cause.CANCELLED,
        Cause.INTERRUPTED,
        Cause.ROLLED_BACK,
    }
)


class MeshError(Exception):
    """An operating error with a code that a program, and a hint that a person, can act on.

    Args:
        code: one of `ErrorCode`.
        detail: what happened, one sentence.
        hint: the next step for the person who reads it.
        field: JSON path of the offending value, as in `payload.items[3].name`.
        retryable: whether the same call may succeed later.
        retry_after_s: seconds to wait before that, when known.
        extra: further members of the problem document (for example `state`).
    """

    def __init__(
        self,
        code: ErrorCode,
        detail: str,
        *,
        hint: str | None = None,
        field: str | None = None,
        retryable: bool = False,
        retry_after_s: float | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.hint = hint
        self.field = field
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.extra = extra or {}

    def __repr__(self) -> str:
        return f"MeshError({self.code}: {self.detail})"


def unavailable(detail: str, *, retry_after_s: float = 1.0) -> MeshError:
    """Return the error for a part that does not answer now and may answer later."""
    return MeshError(
        ErrorCode.UNAVAILABLE,
        detail,
        hint="try again; with the same Idempotency-Key nothing is done twice",
        retryable=True,
        retry_after_s=retry_after_s,
    )


def not_found(noun: str, name: str, *, listed_at: str | None = None) -> MeshError:
    """Return the error for a thing that does not exist, or belongs to another tenant: the same to a caller.

    Args:
        listed_at: the path that lists such things, when it is not the noun's plural.
    """
    hint = f"list what there is: GET {listed_at or f'/{noun}s'}"
    return MeshError(ErrorCode.NOT_FOUND, f"there is no {noun} {name!r}", hint=hint)
